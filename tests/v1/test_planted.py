# SPDX-License-Identifier: Apache-2.0
"""The bench finds what it is for: defects are planted into the binding, and each must be noticed (B34, B93, B95)."""
import pytest

from tests.v1.simulated import Engine, WrongRead
from tests.v1.test_hazards import parked
from vllm_pd.handover.fence import BlockFence
from vllm_pd.protocol.actions import Prefilled, Released
from vllm_pd.protocol.messages import Timings
from vllm_pd.v1.scheduler import HandoverScheduling


@pytest.fixture
def engine(model_folder, in_flight):
    return Engine(model_folder, in_flight)


def test_without_touch_a_fallback_computes_in_granted_blocks(engine, monkeypatch):
    monkeypatch.setattr(BlockFence, "hold", lambda fence, attempt, block_ids: fence._held.update({attempt: []}))
    attempt = parked(engine)
    engine.protocol.peers = 0
    engine.lost(attempt)
    with pytest.raises(AssertionError, match="is used by|is free|reads position"):
        while engine.has_work():
            engine.turn()
            assert not set(engine.block_ids("a")) & set(engine.grant(attempt)), "is used by itself again"


def test_an_in_place_recompute_reads_what_the_peer_writes(engine, monkeypatch):
    def in_place(scheduler, request):  # as upstream's invalid_block_ids: nothing is freed
        request.num_computed_tokens = 16
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
        scheduler.finished_recving_kv_req_ids.add(request.request_id)

    monkeypatch.setattr(HandoverScheduling, "fail_parked", in_place)
    attempt = parked(engine)
    engine.protocol.peers = 0
    engine.lost(attempt)
    with pytest.raises(WrongRead):
        while engine.has_work():
            engine.turn()
            engine.slots[engine.grant(attempt)[2], 3] = -1  # a write that is still in flight


def test_a_late_word_resumes_a_later_parking(engine, monkeypatch):
    """Without the look at the status, and with a request that parks again."""
    monkeypatch.setattr(HandoverScheduling, "resume_parked",
                        lambda scheduler, request: scheduler.finished_recving_kv_req_ids.add(request.request_id))
    first = parked(engine)
    request = engine.scheduler.requests["a"]
    engine.lost(first)
    engine.run()
    engine.binding.remote_prefills._by_attempt[first] = request  # a binding that mixes attempts up
    engine.binding.remote_prefills._by_id["a"] = first
    engine.tell(Prefilled(first, Timings()))
    with pytest.raises(WrongRead):
        engine.run()


def test_a_double_id_in_a_connector_output_ends_the_engine(engine):
    """Why nothing is ever reported there: upstream's assertion."""
    from vllm.v1.outputs import KVConnectorOutput
    parked(engine)
    engine.abort("a")
    with pytest.raises(AssertionError):
        engine.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={"a"}))


def test_a_fence_that_comes_down_too_early_lets_a_late_write_hit_another_request(engine, monkeypatch):
    release = BlockFence.release
    attempt = parked(engine)
    engine.protocol.peers = 0
    engine.abort("a")
    release(engine.binding.fence, attempt)
    engine.add("b", [7] * 100)
    with pytest.raises((WrongRead, AssertionError)):
        while engine.has_work():
            engine.turn()
            engine.write(attempt)


def test_a_second_release_of_one_fence_shows_in_the_references(engine):
    attempt = parked(engine)
    blocks = [engine.pool.blocks[block] for block in engine.binding.fence.block_ids(attempt)]
    engine.pool.free_blocks(blocks)
    engine.prefilled("a")
    with pytest.raises((WrongRead, AssertionError)):
        engine.run()
        engine.check_answers()
        engine.check_at_rest()


def test_a_peer_may_not_write_after_its_own_last_word(engine):
    attempt = parked(engine)
    engine.abort("a")
    engine.tell(Released(attempt))
    with pytest.raises(AssertionError, match="was released"):
        engine.write(attempt)
