# SPDX-License-Identifier: Apache-2.0
"""The store with two ranks, on V1's real schedulers (B104): a load counts when both have loaded their part, and not if
either has failed. PDConnector with the store, and PDStoreConnector alone, whose loads V1 counts itself.
"""
import itertools

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput

from tests.v1.simulated import BLOCK_SIZE, WrongRead
from tests.v1.test_hazards import PARKED, prompt
from tests.v1.test_store_handover import FakeView, StoredEngine, check_stored, put
from vllm_pd.v1.store import connector, handover, with_peers
from vllm_pd.v1.store.handover import V1HandoverWithStore


class AloneEngine(StoredEngine):
    """An engine with PDStoreConnector alone: V1's own scheduler, which has no binding."""

    CONNECTOR, MODULE = "PDStoreConnector", "vllm_pd.v1.store.connector"
    EXTRA = {}

    def bind(self, *arguments):
        own = self.scheduler.connector
        own._config.parallel_config.world_size = self.ranks
        own.set_xfer_handshake_metadata_pp_aware({
            (0, rank): connector.StoreHandshake(b"model %d" % rank, 1) for rank in range(self.ranks)})

    def step_of(self, output):
        return output.kv_connector_metadata

    def report(self, ended, failed):
        return KVConnectorOutput(finished_recving=ended, failed_recving=failed)

    def check(self):
        """There are no fences."""

    def end(self):
        self.holds_loads = False
        self.run()
        self.check_answers()
        assert not self.scheduler.requests and not self.scheduler.finished_recving_kv_req_ids
        assert self.pool.get_num_free_blocks() == self.free_at_start
        assert not any(self.scheduler.connector.debug_state().values())


@pytest.fixture(params=[StoredEngine, AloneEngine], ids=["with peers", "alone"])
def make(model_folder, in_flight, monkeypatch, request):
    """Makes engines of two ranks with one store."""
    monkeypatch.setattr(connector, "StoreView", FakeView)
    monkeypatch.setattr(connector, "check_store", lambda *arguments: None)  # the store is refused with stages
    monkeypatch.setattr(StoredEngine, "stored", {})
    monkeypatch.setattr(StoredEngine, "ranks", 2)
    return lambda **settings: request.param(model_folder, in_flight, threshold=1000, **settings)


def check_load(engine, name: str, outcomes: tuple[bool, bool], first: int, abort_at: int | None, turns: int) -> None:
    """One request of 100 tokens, of which 80 are in the store. The ranks end their loads in the order that begins with
    `first`. It is aborted after `abort_at` of these ends, and then others want its blocks. `turns` after each event."""
    asked = prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    engine.add(name, asked)
    while not engine.open_loads:
        engine.turn()
    into = {block for _, block in engine.open_loads[name]}
    for number, rank in enumerate((first, 1 - first)):
        if abort_at == number:
            engine.abort(name)
            engine.add(f"other {name}", prompt(150), 4)
        elif abort_at is None:
            assert engine.status(name) is PARKED
        for _ in range(turns):
            engine.turn()
            for other in engine.scheduler.requests.keys() - {name}:
                assert not into & set(engine.block_ids(other)), "blocks are given away while a rank copies"
        engine.end_load(name, outcomes[rank], rank)
        for _ in range(turns):
            engine.turn()
    engine.holds_loads = False
    engine.end()
    if abort_at is None:
        assert engine.cached[name] == (80 if all(outcomes) else 0)
    check_stored(asked[:80])


def check_every_order(engine) -> None:
    """Each rank right or wrong, in both orders, aborted before either end or not at all, with steps between or not."""
    for number, (outcomes, first, abort_at, turns) in enumerate(itertools.product(
            itertools.product((True, False), repeat=2), (0, 1), (None, 0, 1), (0, 3))):
        check_load(engine, f"r{number}", outcomes, first, abort_at, turns)


def test_b104_b25_a_load_counts_if_both_ranks_have_loaded(make):
    """B104, B25: in every order."""
    check_every_order(make(blocks=24))


def test_b104_a_block_of_which_a_rank_lacks_its_part_ends_the_hit(make):
    """B104: a rank's part was not put, or was replaced."""
    engine = make()
    for rank, missing in itertools.product(range(2), range(5)):
        asked = prompt(100)
        put(asked, 5)
        lacking = list(StoredEngine.stored)[-10:][missing * 2 + rank]
        del StoredEngine.stored[lacking]
        name = f"r{rank}{missing}"
        engine.add(name, asked)
        engine.end()
        assert engine.cached[name] == missing * BLOCK_SIZE and (name in engine.loads) == (missing > 0)
        check_stored(asked[:96])


def test_b104_a_part_that_is_replaced_after_the_look_up(make):
    """B104: the load fails on that rank alone. What the engine then computes, both ranks put."""
    engine = make()
    for rank in range(2):
        asked = prompt(100)
        put(asked, 5)
        engine.holds_loads = True
        engine.add(f"r{rank}", asked)
        while not engine.open_loads:
            engine.turn()
        for key in [key for key in StoredEngine.stored if key[0] == rank][-2:]:
            del StoredEngine.stored[key]
        engine.end_load(f"r{rank}", True, 1 - rank)
        engine.end_load(f"r{rank}", False, rank)
        engine.end()
        assert engine.cached[f"r{rank}"] == 0
        check_stored(asked[:96])


def first_report_counts(monkeypatch) -> None:
    monkeypatch.setattr(V1HandoverWithStore, "loads_ended", lambda binding, ended, failed: [
        vars(binding._loads[one]).update(open_ranks=0, is_right=one not in failed) for one in ended
        if one in binding._loads])


def last_report_counts(monkeypatch) -> None:
    def loads_ended(binding, ended, failed):
        for one, ranks in ended.items():
            load = binding._loads[one]
            load.open_ranks, load.is_right = load.open_ranks - ranks, one not in failed
    monkeypatch.setattr(V1HandoverWithStore, "loads_ended", loads_ended)


def one_step_has_one_report(monkeypatch) -> None:
    monkeypatch.setattr(with_peers.LoadReport, "aggregate", lambda ours, theirs: with_peers.LoadReport(
        ours.ended | theirs.ended, ours.failed | theirs.failed))


def one_failure_of_a_step_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(with_peers.LoadReport, "aggregate", lambda ours, theirs: with_peers.LoadReport(
        ours.ended + theirs.ended, theirs.failed))


def blocks_go_with_the_first_report(monkeypatch) -> None:
    loads_ended = V1HandoverWithStore.loads_ended

    def release(binding, ended, failed):
        loads_ended(binding, ended, failed)
        for one in ended:
            binding._load_fence.release(handover._load_key(one))
    monkeypatch.setattr(V1HandoverWithStore, "loads_ended", release)


def hit_by_the_first_rank(monkeypatch) -> None:
    monkeypatch.setattr(FakeView, "contains", lambda view, name: (0, name) in StoredEngine.stored)


@pytest.mark.parametrize("defect", [
    first_report_counts, last_report_counts, one_step_has_one_report, one_failure_of_a_step_is_lost,
    blocks_go_with_the_first_report, hit_by_the_first_rank], ids=lambda one: one.__name__)
@pytest.mark.parametrize("make", [StoredEngine], indirect=True, ids=["with peers"])
def test_b104_planted_defects_are_found(make, monkeypatch, defect):
    """B104: each of these would be used somewhere as KV that it is not, or leak, or be a load that must fail."""
    defect(monkeypatch)
    with pytest.raises((WrongRead, AssertionError, KeyError)):
        if defect is hit_by_the_first_rank:
            test_b104_a_block_of_which_a_rank_lacks_its_part_ends_the_hit(make)
        else:
            check_every_order(make(blocks=24))


@pytest.mark.parametrize("make", [AloneEngine], indirect=True, ids=["alone"])
def test_b104_v1_counts_the_ranks(make):
    """B104: were it not so, what is half loaded would be read."""
    engine = make(blocks=24)
    engine.gather = KVOutputAggregator(1)
    with pytest.raises((WrongRead, AssertionError)):
        check_every_order(engine)
