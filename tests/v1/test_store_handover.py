# SPDX-License-Identifier: Apache-2.0
"""PDConnector with the store on V1's real schedulers (B104): what it has is a prefix hit before anybody decides.

The store is a dictionary, and a load ends when the test says so. Its blocks are written at that moment, as late as the
worker's thread may, so a block that was given to somebody else meanwhile shows as a wrong read.
"""
import random
from collections import Counter
from dataclasses import replace

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput

from tests.v1 import test_holds
from tests.v1.simulated import BLOCK_SIZE, Engine, answer, contents
from tests.v1.test_hazards import PARKED, prompt
from vllm_pd.protocol.actions import Cancelled, Prefilled, Released
from vllm_pd.protocol.messages import Attempt, Timings
from vllm_pd.transfer.requests import Read
from vllm_pd.v1.store import connector, with_peers
from vllm_pd.v1.store.handover import V1HandoverWithStore


class RankMemory:
    """The slots of an engine with several ranks: each has its part of what is written there, as the same content."""

    def __init__(self, ranks):
        self.parts = [{} for _ in range(ranks)]

    def __setitem__(self, slot, content):
        for part in self.parts:
            part[slot] = content

    def get(self, slot):
        """What all ranks have there; a list where they differ, which is nothing that anybody may read."""
        contents = [part.get(slot) for part in self.parts]
        return contents[0] if len(set(contents)) == 1 else contents


class StoredEngine(Engine):
    """An engine with the store `stored`: contents of the slots of a block, by rank and name."""

    CONNECTOR, MODULE = "PDConnectorWithStore", "vllm_pd.v1.store.with_peers"
    EXTRA = {"store": {}}
    ranks = 1
    stored: dict[tuple[int, bytes], list[int]] = {}

    def make_binding(self, *arguments):
        self.open_loads: dict[str, list[tuple[bytes, int]]] = {}  # that have not ended on all ranks
        self.open_ranks: dict[str, list[int]] = {}
        self.loads: list[str] = []  # requests that were loaded for
        self.puts: list[int] = []  # blocks that were put with each step
        self.ended_loads: dict[tuple[str, int], bool] = {}  # by request and rank
        self.holds_loads = False  # else a load ends with the step that begins it
        self.gather = KVOutputAggregator(self.ranks)
        return self.bind(*arguments)

    def bind(self, *arguments):
        paired = self.scheduler.connector
        paired._store._config.parallel_config.world_size = self.ranks
        paired.set_xfer_handshake_metadata_pp_aware({
            (0, rank): with_peers.PairedHandshake(None, connector.StoreHandshake(b"model %d" % rank, 1))
            for rank in range(self.ranks)})
        return V1HandoverWithStore(paired._store, *arguments)

    def step_of(self, output):
        """What the workers are to do for the store."""
        return output.kv_connector_metadata.store

    def report(self, ended, failed):
        """What one rank reports."""
        return KVConnectorOutput(kv_connector_worker_meta=with_peers.LoadReport(Counter(ended), failed))

    def run_workers(self, output, work):
        if not isinstance(self.slots, RankMemory):
            self.slots = RankMemory(self.ranks)
        result, step = self.execute(work), self.step_of(output)
        self.puts.append(len(step.puts))
        for name, block_id in step.puts:
            for rank, part in enumerate(self.slots.parts):
                self.stored[rank, name] = [part.get((block_id, offset)) for offset in range(BLOCK_SIZE)]
        assert not step.loads.keys() & self.open_loads.keys(), "an id is loaded for twice at a time"
        self.open_loads.update(step.loads)
        self.open_ranks.update((one, list(range(self.ranks))) for one in step.loads)
        self.loads += step.loads
        for request_id in [] if self.holds_loads else list(self.open_loads):
            self.end_load(request_id)
        results = [result, *(replace(result) for _ in range(1, self.ranks))]
        for rank, one in enumerate(results):
            ended = {name: ok for (name, by), ok in self.ended_loads.items() if by == rank}
            one.kv_connector_output = self.report(set(ended), {name for name, ok in ended.items() if not ok}) if (
                ended) else None
        self.ended_loads = {}
        return self.gather.aggregate(results)

    def end_load(self, request_id, ok=True, rank=None):
        """All blocks are copied, or some are missing; it is reported with the next step. Of all ranks where it has not
        ended, and then only the last one fails, or of one."""
        blocks, ranks = self.open_loads[request_id], self.open_ranks[request_id]
        for one in list(ranks) if rank is None else [rank]:
            ranks.remove(one)
            right = ok or (rank is None and bool(ranks))
            for number, (name, block_id) in enumerate(blocks):
                for offset in range(BLOCK_SIZE):
                    found = self.stored.get((one, name), [None] * BLOCK_SIZE)[offset]
                    self.slots.parts[one][block_id, offset] = found if right or number else -1
            self.ended_loads[request_id, one] = right
        if not ranks:
            del self.open_loads[request_id]

    def end(self):
        self.holds_loads = False
        self.run()
        self.check_answers()
        self.check_at_rest()
        binding = self.binding
        assert not (binding._loads or binding._offers or binding._loaded or len(binding._load_fence))
        assert not any(self.scheduler.connector._store.debug_state().values())


class FakeView:
    asked = 0  # by all engines of a test

    def __init__(self, settings, slot_bytes, models):
        self.ranks = [int(model.removeprefix(b"model ")) for model in models]

    def contains(self, name):
        FakeView.asked += 1
        return all((rank, name) in StoredEngine.stored for rank in self.ranks)

    def close(self):
        """Nothing."""


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def make(model_folder, in_flight, monkeypatch, request):
    """Makes engines with one store."""
    monkeypatch.setattr(connector, "StoreView", FakeView)
    monkeypatch.setattr(connector, "check_store", lambda *arguments: None)  # the store is refused with stages, for now
    monkeypatch.setattr(StoredEngine, "stored", {})
    monkeypatch.setattr(StoredEngine, "ranks", request.param)
    monkeypatch.setattr(FakeView, "asked", 0)
    return lambda **settings: StoredEngine(model_folder, in_flight, **settings)


def put(tokens: list[int], blocks: int | None = None) -> None:
    """The store has the KV of these tokens, or of their first blocks."""
    names = [bytes(name) for name in get_request_block_hasher(BLOCK_SIZE, sha256)(FakeRequest(tokens))]
    found = contents(tokens)
    for number, name in enumerate(names[:blocks]):
        for rank in range(StoredEngine.ranks):
            StoredEngine.stored[rank, name] = found[number * BLOCK_SIZE:(number + 1) * BLOCK_SIZE]


class FakeRequest:
    def __init__(self, tokens):
        self.all_token_ids, self.num_tokens, self.block_hashes = tokens, len(tokens), []
        self.mm_features, self.lora_request, self.cache_salt, self.prompt_embeds = [], None, None, None


def check_stored(*texts: list[int]) -> None:
    """All that is in the store is right, and it has all whole blocks of these texts."""
    names = {}
    for tokens in texts:
        found = contents(tokens)
        for number, name in enumerate(get_request_block_hasher(BLOCK_SIZE, sha256)(FakeRequest(tokens))):
            for rank in range(StoredEngine.ranks):
                names[rank, bytes(name)] = found[number * BLOCK_SIZE:(number + 1) * BLOCK_SIZE]
    assert names.items() <= StoredEngine.stored.items()


def test_b104_what_the_store_has_is_the_prefix_hit_by_which_is_decided(make):
    """B104: of 100 tokens 80 are in the store. The rest is handed over where that is more than the threshold, and P is
    granted what follows the hit; else it is computed here."""
    for threshold, remote in ((16, True), (20, False)):
        engine = make(threshold=threshold)
        asked = prompt(100)
        put(asked, 5)
        engine.add("a", asked)
        engine.run()
        assert engine.loads == ["a"]
        if remote:
            attempt = engine.attempt("a")
            assert engine.protocol.jobs[attempt][2] == 5 and len(engine.grant(attempt)) == 2
            engine.prefilled("a")
            engine.run()
        engine.end()
        assert engine.tokens_computed == (4 if remote else 100 - 80 + 3)
        assert engine.cached["a"] == 80


@pytest.mark.parametrize("scores", [{"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[1]] * 99}],
                         ids=lambda one: next(iter(one)))
def test_b7_b104_a_prompt_whose_tokens_are_scored_is_computed_whole(make, scores):
    """B7, B104: also where the client has it use a prefix hit."""
    engine, asked = make(), prompt(100)
    put(asked, 5)
    engine.add("a", asked, params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True,
                                                 skip_reading_prefix_cache=False, **scores))
    engine.run()
    engine.end()
    assert not engine.protocol.jobs and not engine.loads and engine.tokens_computed == 100 + 3


def test_b104_a_prompt_that_is_in_the_store_is_nobody_s_to_prefill(make):
    """B104: its last token is always computed."""
    engine = make()
    for tokens in (96, 97):
        asked = prompt(tokens)
        put(asked)
        engine.add(f"a{tokens}", asked)
        engine.run()
    engine.end()
    assert not engine.protocol.jobs and engine.tokens_computed == 16 + 3 + 1 + 3


def test_b104_d_puts_what_arrived_and_p_what_it_computed(make):
    """B104: each engine alone makes the prompt known to all; nothing before it is whole."""
    d, asked = make(), prompt(100)
    d.add("a", asked)
    d.run()
    d.write(d.attempt("a"), 50)
    assert not StoredEngine.stored
    d.prefilled("a")
    d.end()
    check_stored(asked)
    StoredEngine.stored.clear()
    p, other = make(role="kv_producer"), prompt(100)
    attempt = p.job(other)
    p.run()
    p.check_sent(attempt, other)
    p.transfer.end(str(attempt))
    p.end()
    check_stored(other)


def test_b104_a_job_of_a_peer_is_loaded_for_and_invisible(make):
    """B104, B97: P computes what is not in the store, and V1 counts no look-up of it."""
    engine, asked = make(role="kv_producer"), prompt(100)
    put(asked, 4)
    attempt = engine.job(asked, cached_blocks=2)
    engine.run()
    engine.check_sent(attempt, asked)
    assert engine.loads == [f"pd-{attempt}"] and engine.tokens_computed == 100 - 64
    assert not [one for one in engine.transfer.requests if isinstance(one, Read)], "P has more than D"
    engine.transfer.end(str(attempt))
    engine.end()


def test_b104_what_d_has_beyond_the_store_p_reads(make):
    engine, asked = make(role="kv_producer", prefix_reads="always"), prompt(100)
    put(asked, 2)
    attempt = engine.job(asked, cached_blocks=4)
    engine.run()
    assert engine.fill(asked).remote_block_ids == [102, 103]
    engine.run()
    assert engine.tokens_computed == 100 - 64
    engine.check_sent(attempt, asked)
    engine.transfer.end(str(attempt))
    engine.end()


def test_b104_a_load_that_fails_is_not_tried_again(make):
    """B104: nothing of it is used, and the request goes as without the store."""
    engine, asked = make(), prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    engine.add("a", asked)
    while not engine.open_loads:
        engine.turn()
    engine.end_load("a", False)
    engine.run()
    assert engine.status("a") is PARKED and engine.protocol.jobs[engine.attempt("a")][2] == 0
    engine.prefilled("a")
    engine.end()
    assert engine.loads == ["a"] and engine.cached["a"] == 0


def test_b104_b98_the_store_is_not_asked_for_a_request_that_is_computed_whole(make):
    engine, asked = make(threshold=1000), prompt(100)
    put(asked)
    engine.add("a", asked, params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=1))
    engine.end()
    assert not engine.loads and not FakeView.asked and engine.tokens_computed == 103


def test_b104_a_request_is_loaded_for_once(make):
    """B104: also where the store has more by then."""
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 4)
    engine.holds_loads = True
    engine.add("a", asked)
    while not engine.open_loads:
        engine.turn()
    put(asked, 6)
    engine.end_load("a")
    engine.end()
    assert engine.loads == ["a"] and engine.cached["a"] == 64


@pytest.mark.parametrize("ok", [True, False])
def test_b104_b25_a_request_that_is_aborted_is_gone_and_its_blocks_are_not(make, ok):
    """B104, B25: the thread still copies. Another request of the same name may come at once."""
    engine, asked = make(blocks=20, threshold=1000), prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    engine.add("a", asked)
    while not engine.open_loads:
        engine.turn()
    into = {block for _, block in engine.open_loads["a"]}
    engine.abort("a")
    assert "a" not in engine.scheduler.requests
    for _ in range(5):
        assert engine.has_work(), "the end of the load comes with a step"
        engine.turn()
    engine.ended.clear()
    engine.prompts.clear()
    engine.add("a", asked, 60)
    engine.add("b", prompt(60), 60)
    for _ in range(30):
        engine.turn()
        for name in engine.scheduler.requests:
            assert not into & set(engine.block_ids(name))
    engine.end_load("a", ok)
    engine.end()
    assert engine.loads == ["a"]


def test_b104_b94_a_load_has_steps_beside_parked_requests_only(make):
    """B94: an engine that waits for peers sleeps. No load would ever end in it."""
    engine, asked = make(), prompt(100)
    engine.add("a", prompt(100))
    engine.run()
    assert engine.binding.asleep
    put(asked, 5)
    engine.holds_loads = True
    engine.add("b", asked)
    for _ in range(10):
        assert engine.has_work()
        engine.turn()
    engine.end_load("b")
    engine.run()
    assert engine.binding.asleep and engine.protocol.jobs[engine.attempt("b")][2] == 5
    engine.prefilled("a")
    engine.prefilled("b")
    engine.end()


def test_b104_equal_prompts_are_loaded_for_once(make):
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 5)
    for name in "abc":
        engine.add(name, asked + [ord(name)] * 5)
    engine.end()
    assert engine.loads == ["a"] and engine.cached["a"] == 80
    assert min(engine.cached.values()) == 80, "what was loaded for one is the hit of the others"


def test_b104_b97_a_step_asks_the_store_about_nobody_who_waits_for_a_load(make):
    """B104, B97: a look at the store takes long. Those behind a load wait for it without one, in each step."""
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    for name in "abcdefgh":
        engine.add(name, asked + [ord(name)] * 5)
    while not engine.open_loads:
        engine.turn()
    before = FakeView.asked
    for _ in range(20):
        engine.turn()
    assert FakeView.asked == before
    engine.end_load("a")
    engine.end()
    assert min(engine.cached.values()) == 80


def test_b104_b97_a_request_that_waits_for_blocks_is_counted_once_in_a_while(make, monkeypatch):
    """B104, B97: V1 asks for the head of its queue in each step. What is found is counted anew after `COUNT_S`."""
    engine, asked = make(blocks=12, threshold=1000), prompt(100)
    put(asked, 5)
    engine.add("first", prompt(100), 60)
    engine.turn()
    engine.add("a", asked)
    engine.turn()
    before = FakeView.asked
    for _ in range(20):
        engine.turn()
    assert FakeView.asked == before and "a" not in engine.loads
    monkeypatch.setattr("vllm_pd.store.plan.COUNT_S", 0.0)
    engine.turn()
    engine.turn()
    assert FakeView.asked >= before + 10
    engine.end()
    assert engine.loads == ["a"] and engine.cached["a"] == 80


def test_b104_b25_nobody_waits_for_the_load_of_a_request_that_is_gone(make):
    """B104, B25: nothing of it will be a hit. The retry of a client loads by itself, at once."""
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    engine.add("a", asked)
    while not engine.open_loads:
        engine.turn()
    engine.abort("a")
    engine.add("b", asked)
    for _ in range(5):
        engine.turn()
    assert list(engine.open_loads) == ["a", "b"]
    engine.end_load("b")
    for _ in range(20):
        engine.turn()
    assert engine.cached["b"] == 80
    engine.end_load("a")
    engine.end()


def test_b104_b25_a_load_that_failed_is_not_that_of_a_later_request_of_the_same_name(make):
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    engine.add("a", asked)
    while not engine.open_loads:
        engine.turn()
    engine.abort("a")
    engine.ended.clear()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add("a", asked)
    engine.end_load("a", False)
    for _ in range(5):
        engine.turn()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.end()
    assert engine.loads == ["a", "a"] and engine.cached["a"] == 80


def test_b104_b98_a_request_that_was_preempted_is_computed_again(make):
    """B104: also where the store has what it had computed. It goes as without the store."""
    engine, asked = make(threshold=1000), prompt(100)
    engine.add("a", asked, 20)
    while not engine.outputs["a"]:
        engine.turn()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    check_stored(asked)
    engine.end()
    assert not engine.loads


def test_b104_a_long_prompt_that_arrived_is_put_over_several_steps(make, monkeypatch):
    """B104: the running decodes wait while a step puts. What the step itself has filled comes on top."""
    monkeypatch.setattr(connector, "LATE_BYTES", 2)
    engine, asked = make(), {name: prompt((10 - number) * BLOCK_SIZE + 3) for number, name in enumerate("abcd")}
    for name, tokens in asked.items():
        engine.add(name, tokens, 40)
    engine.run()
    assert not any(engine.puts)
    for name in asked:
        engine.prefilled(name)
    engine.end()
    assert max(engine.puts) <= 2 + len(asked)
    check_stored(*(tokens + engine.outputs[name][:-BLOCK_SIZE] for name, tokens in asked.items()))


def test_b104_what_was_loaded_is_not_put_again(make):
    """B104: and all of a load that failed is put when it is computed: the store may have it no more."""
    for ok in (True, False):
        engine, asked = make(threshold=1000), prompt(100)
        put(asked, 5)
        engine.holds_loads = True
        engine.add("a", asked)
        while not engine.open_loads:
            engine.turn()
        engine.end_load("a", ok)
        engine.end()
        assert sum(engine.puts) == (1 if ok else 6)
        check_stored(asked[:6 * BLOCK_SIZE])


def test_b104_b102_a_hold_is_read_after_what_the_store_has(make):
    """B102: prefill first. What P keeps and D has loaded is not read again."""
    d, asked = make(threshold=10**6), prompt(6 * BLOCK_SIZE + 3)
    put(asked, 2)
    attempt = test_holds.claimed(d, tokens=asked)
    posted = test_holds.read(d, attempt)
    assert posted.remote_block_ids == [102, 103, 104, 105, 106]
    test_holds.fill(d, posted, asked)
    d.tell(Prefilled(attempt, Timings()))
    d.end()
    assert d.cached["a"] == 2 * BLOCK_SIZE and d.tokens_computed == 4
    check_stored(asked)


@pytest.mark.parametrize("ends", ["meanwhile", "never"])
def test_b104_b96_a_reset_of_the_prefix_cache_waits_for_loads(make, monkeypatch, ends):
    """B96: or it fails, as V1 says it, where a disk hangs. Nothing that was loaded before it is a hit after it."""
    monkeypatch.setattr("vllm_pd.v1.store.handover.LOADS_S", 0.02)
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    engine.add("a", asked)
    while not engine.open_loads:
        engine.turn()
    if ends == "never":
        with pytest.raises(RuntimeError):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.end()
        return
    engine.holds_loads = False
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.end()
    assert engine.cached["a"] == 0
    other = prompt(100)
    put(other)
    engine.add("b", other)
    engine.run()
    assert engine.loads == ["a"], "the weights may be others"
    engine.check_answers()


def test_b104_b96_a_job_that_is_loaded_for_is_given_back_by_a_pause(make):
    """B96: after its load it would wait until the engine goes on, and its D with it. A client's request waits."""
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    attempt = engine.job(asked)
    other = prompt(100)
    put(other, 5)
    engine.add("a", other)
    while len(engine.open_loads) < 2:
        engine.turn()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for name in list(engine.open_loads):
        engine.end_load(name)
    for _ in range(10):
        if engine.has_work():
            engine.turn()
    assert ("failed", attempt) in engine.protocol.calls and "a" not in engine.ended
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.end()
    assert engine.cached["a"] == 80


def test_b104_b96_a_job_whose_load_ends_within_a_reset_is_given_back(make):
    """B96: while the engine is paused for new requests, its prefix cache is reset."""
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    attempt = engine.job(asked)
    while not engine.open_loads:
        engine.turn()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.end_load(f"pd-{attempt}")
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert ("failed", attempt) in engine.protocol.calls
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.end()


@pytest.mark.parametrize("ok", [True, False])
def test_b104_b96_an_engine_with_other_weights_uses_the_store_no_more(make, ok):
    """B104, B96: what it loads fails, also where it had come before, and what its peers compute is not for it."""
    engine, asked = make(), prompt(100)
    put(asked, 5)
    engine.holds_loads = True
    engine.add("a", asked)
    while not engine.open_loads:
        engine.turn()
    engine.binding.weights_replaced()
    engine.end_load("a", ok)
    engine.run()
    assert engine.cached["a"] == 0
    engine.add("b", asked)
    engine.end()
    assert engine.loads == ["a"] and not engine.protocol.jobs


def test_b104_an_engine_of_which_a_rank_uses_the_store_no_more_loads_nothing(make):
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 5)
    engine.scheduler.connector.update_connector_output(KVConnectorOutput(
        kv_connector_worker_meta=with_peers.LoadReport(Counter(), set(), with_peers.StoreReport(0, True))))
    engine.add("a", asked)
    engine.end()
    assert not engine.loads and engine.cached["a"] == 0


def test_b104_b32_those_whose_loads_end_together_go_on_in_their_order(make):
    engine = make(threshold=1000, max_num_seqs=1)
    engine.holds_loads = True
    for name in "abc":
        asked = prompt(100)
        put(asked, 5)
        engine.add(name, asked)
    while len(engine.open_loads) < 3:
        engine.turn()
    for name in "abc":
        engine.end_load(name)
    engine.end()
    assert list(engine.ended) == ["a", "b", "c"]


def test_b104_b97_look_ups_count_once(make):
    """B97: V1 looks a request up a second time after its load."""
    engine, asked = make(threshold=1000), prompt(100)
    put(asked, 5)
    found = []
    make_stats = engine.scheduler.make_stats
    engine.scheduler.make_stats = lambda *some, **more: found.append(make_stats(*some, **more)) or found[-1]
    engine.add("a", asked)
    engine.end()
    for name, right in (("prefix_cache_stats", (1, 100, 80)), ("connector_prefix_cache_stats", (1, 20, 0))):
        each = [getattr(stats, name) for stats in found]
        assert tuple(sum(getattr(one, key) for one in each) for key in ("requests", "queries", "hits")) == right


def test_b104_a_conversation_over_two_decode_and_two_prefill_engines(make):
    """B104: each turn goes to another D, and what is new of it to another P. All engines together compute of a turn
    what no turn before has put, and that is at most a block more than what is new: the last one of an answer is full
    when its request has ended."""
    ds, ps = [make(threshold=40) for _ in range(2)], [make(role="kv_producer") for _ in range(2)]
    chat, whole, handed_over = prompt(150), 0, 0
    for turn in range(6):
        d, p, name = ds[turn % 2], ps[turn // 2 % 2], f"turn{turn}"
        before = sum(engine.tokens_computed for engine in (*ds, *ps))
        d.add(name, chat, 20)
        d.run()
        was_remote = name not in d.ended
        if was_remote:
            token_ids, _, cached_blocks = d.protocol.jobs[d.attempt(name)]
            assert cached_blocks * BLOCK_SIZE == whole
            job = p.job(token_ids, cached_blocks, number=turn)
            p.run()
            p.check_sent(job, token_ids)
            p.transfer.end(str(job))
            p.end()
            d.prefilled(name)
        d.end()
        handed_over += was_remote
        computed = sum(engine.tokens_computed for engine in (*ds, *ps)) - before
        assert computed == len(chat) - whole + 19 + was_remote, turn
        assert d.cached[name] == whole
        chat = chat + d.outputs[name]
        whole = (len(chat) - 1) // BLOCK_SIZE * BLOCK_SIZE
        check_stored(chat[:whole])
        chat = chat + prompt((20, 60)[turn % 2])
    assert 2 < handed_over < 6


@pytest.mark.parametrize("seed", range(12))
def test_b104_any_order(make, seed):
    """B104, B34: requests that share beginnings, jobs, aborts, loads that end late, right or wrong, peers that write or
    are lost; what is put and read is right, and nothing is left."""
    engine, rng = make(blocks=40, batch_tokens=64, role="kv_both"), random.Random(seed)
    texts = [prompt(140) for _ in range(5)]
    for number, text in enumerate(texts):
        put(text, number)
    jobs: dict[Attempt, list[int]] = {}
    for number in range(120):
        engine.holds_loads = True
        draw = rng.random()
        text = rng.choice(texts)
        asked = text[:rng.randrange(20, 130)] + [number] * rng.randrange(1, 12)
        if draw < 0.2:
            engine.add(f"r{number}", asked, rng.randrange(1, 30))
        elif draw < 0.28:
            jobs[engine.job(asked, rng.randrange(0, 2), number)] = asked
        elif draw < 0.36 and engine.scheduler.requests:
            name = rng.choice(sorted(engine.scheduler.requests))
            if not name.startswith("pd-"):
                attempts = {one for one in engine.protocol.jobs if one.request_id == name} - engine.released
                engine.abort(name)
                engine.tell(*map(Released, attempts))
        elif draw < 0.4 and jobs:
            attempt = rng.choice(sorted(jobs, key=str))
            engine.tell(Cancelled(attempt))
        elif draw < 0.6 and engine.open_loads:
            name = rng.choice(sorted(engine.open_loads))
            engine.end_load(name, rng.random() < 0.8, rng.choice(engine.open_ranks[name]))
        elif draw < 0.7:
            for attempt in [one for one in engine.protocol.jobs if one not in engine.released]:
                engine.prefilled(attempt.request_id)
        elif draw < 0.75 and (open_attempts := sorted(engine.protocol.jobs.keys() - engine.released, key=str)):
            attempt = rng.choice(open_attempts)
            engine.write(attempt, rng.randrange(20, len(engine.protocol.jobs[attempt][0]) + 1))
            engine.lost(attempt)
            engine.tell(Released(attempt))
        elif draw < 0.8:
            for write in list(engine.transfer.open_writes.values()):
                engine.transfer.end(write.key)
        if engine.has_work():
            engine.turn()
    engine.holds_loads = False
    for _ in range(200):
        for attempt in [one for one in engine.protocol.jobs if one not in engine.released]:
            engine.prefilled(attempt.request_id)
        for write in list(engine.transfer.open_writes.values()):
            engine.transfer.end(write.key)
        for read in [one for one in engine.transfer.requests if isinstance(one, Read)]:
            engine.transfer.requests.remove(read)
            engine.fill(jobs[next(one for one in jobs if str(one) in read.key)], read=read)
        engine.run()
    engine.end()
    assert engine.loads
    check_stored(*(text[:16] for text in texts))
    right = {}
    for asked in (*texts, *engine.prompts.values(), *jobs.values()):
        whole = asked + answer(asked, 40)
        found = contents(whole)
        for number, one in enumerate(get_request_block_hasher(BLOCK_SIZE, sha256)(FakeRequest(whole))):
            right[bytes(one)] = found[number * BLOCK_SIZE:(number + 1) * BLOCK_SIZE]
    wrong = [name in right for (_, name), found in StoredEngine.stored.items() if right.get(name) != found]
    assert not wrong, "a block is in the store that is not what its name says"
