# SPDX-License-Identifier: Apache-2.0
"""B20, B34 on V1's real schedulers: any order of parking, resuming, failing, aborting, preempting and late words.

After each step of a history no block that a peer may write belongs to another request; at the end every request has
ended once with the right tokens, the pool is as it was, and the gauges are 0. A seed is a history (`tests.v1.walk`).
VLLM_PD_V1_EXAMPLES=N plays N of them.
"""
import os

import pytest
from vllm.v1.engine import EngineCoreRequest

from tests.v1 import simulated
from tests.v1.walk import failure, history, play, shrink
from vllm_pd.handover.decode import DecodeHandover
from vllm_pd.handover.fence import BlockFence
from vllm_pd.handover.holds import HeldPrompts
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.scope import NO_SCOPE
from vllm_pd.protocol.writes import AttemptWrites
from vllm_pd.v1.binding import V1Handover
from vllm_pd.v1.decode import ParkedRequests
from vllm_pd.v1.prefill import InternalRequests
from vllm_pd.v1.scheduler import HandoverScheduling

HISTORIES = int(os.environ.get("VLLM_PD_V1_EXAMPLES", "200"))
MOST = 400  # histories until a planted defect is found


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")


def first_failure(folder, in_flight: int, histories: int) -> str:
    """The first history that fails, without the steps that its failure does not need; empty where none does. Every
    fourth engine is of a usual size."""
    for seed in range(histories):
        setting, steps = history(seed)
        setting = setting._replace(in_flight=in_flight, stages=simulated.STAGES)
        if seed % 4 == 3:
            setting = setting._replace(blocks=(20, 30, 64)[seed // 4 % 3], batch_tokens=64, seats=4)
        if found := failure(folder, setting, steps):
            return "\n".join(map(str, (f"seed {seed}: {found}", setting, *shrink(folder, setting, steps))))
    return ""


@pytest.mark.search
def test_b20_b34_any_order(model_folder, in_flight):
    assert not first_failure(model_folder, in_flight, HISTORIES)


def test_b34_a_seed_is_a_history(model_folder):
    for seed in range(5):
        one, two = (play(model_folder, *history(seed)) for _ in range(2))
        assert one == two and one.steps


def no_wake(monkeypatch):
    """The engine is not woken to give back what nothing here will make room for."""
    monkeypatch.setattr(DecodeHandover, "falling_back", False)


def no_touch(monkeypatch):
    monkeypatch.setattr(BlockFence, "hold", lambda fence, attempt, block_ids: fence._held.update({attempt: []}))


def released_at_the_fallback(monkeypatch):
    leave = ParkedRequests.leave
    monkeypatch.setattr(ParkedRequests, "leave",
                        lambda prefills, attempt: (prefills._fence.release(attempt), leave(prefills, attempt))[1])


def any_word_resumes(monkeypatch):
    monkeypatch.setattr(HandoverScheduling, "fail_parked", HandoverScheduling.resume_parked)


def sent_before_it_is_computed(monkeypatch):
    step_done = InternalRequests.step_done
    monkeypatch.setattr(InternalRequests, "step_done", lambda jobs, step: step_done(jobs, step + 1))


def sources_not_held(monkeypatch):
    finished = InternalRequests.finished

    def without_fence(jobs, request, block_ids, progress):
        finished(jobs, request, block_ids, progress)
        jobs._fence.release(jobs._attempts[request.request_id])

    monkeypatch.setattr(InternalRequests, "finished", without_fence)


def sources_of_chunks_not_held(monkeypatch):
    chunk_computed = InternalRequests.chunk_computed

    def without_hold(jobs, attempt, block_ids):
        jobs._fence.release(attempt, block_ids)
        chunk_computed(jobs, attempt, block_ids)

    monkeypatch.setattr(InternalRequests, "chunk_computed", without_hold)


def answered_while_a_chunk_is_sent(monkeypatch):
    monkeypatch.setattr(AttemptWrites, "close", lambda writes, error="": setattr(writes, "_closed", True))


def gauges_of_the_last_but_one_update(monkeypatch):
    monkeypatch.setattr(V1Handover, "rest", lambda binding: None)


def held_for_ever(monkeypatch):
    monkeypatch.setattr(HeldPrompts, "_forget", lambda holds, hold: None)


def salts_ignored_by_jobs(monkeypatch):
    monkeypatch.setattr("vllm_pd.v1.prefill.EngineCoreRequest", lambda **fields: EngineCoreRequest(
        **{**fields, "cache_salt": None}))


def salts_ignored_on_d(monkeypatch):
    monkeypatch.setattr("vllm_pd.v1.decode.scope_of", lambda *asked: NO_SCOPE)


def salts_ignored_by_holders(monkeypatch):
    monkeypatch.setattr("vllm_pd.v1.binding.scope_of", lambda *asked: NO_SCOPE)


def salts_ignored_by_readers(monkeypatch):
    monkeypatch.setattr("vllm_pd.handover.decode.token_digest", lambda token_ids, scope: token_digest(token_ids))


@pytest.mark.parametrize("defect", [
    salts_ignored_by_jobs, salts_ignored_on_d, salts_ignored_by_holders, salts_ignored_by_readers,
    no_wake, no_touch, released_at_the_fallback, any_word_resumes, sent_before_it_is_computed, sources_not_held,
    sources_of_chunks_not_held, answered_while_a_chunk_is_sent, gauges_of_the_last_but_one_update, held_for_ever])
def test_b34_b115_the_search_finds_planted_defects(model_folder, in_flight, defect, monkeypatch):
    defect(monkeypatch)
    monkeypatch.setattr("tests.v1.test_machine.shrink", lambda *history: ())
    assert first_failure(model_folder, in_flight, MOST)


def test_b20_the_search_finds_an_engine_that_sleeps_after_a_step_that_preempts(model_folder, monkeypatch):
    """With one step in flight: V1 begins none that waits in such a step."""
    after_schedule = V1Handover.after_schedule

    def without_preemptions(binding, output, throttled):
        output.preempted_req_ids = None
        after_schedule(binding, output, throttled)

    monkeypatch.setattr(V1Handover, "after_schedule", without_preemptions)
    monkeypatch.setattr("tests.v1.test_machine.shrink", lambda *history: ())
    assert "slept" in first_failure(model_folder, 1, MOST)


def test_b20_a_failure_is_shrunk_and_played_again(model_folder, monkeypatch):
    no_wake(monkeypatch)
    seed = next(seed for seed in range(MOST) if failure(model_folder, *history(seed)))
    setting, steps = history(seed)
    least = shrink(model_folder, setting, steps)
    assert len(least) < len(steps) // 2 and failure(model_folder, setting, least)
    assert shrink(model_folder, setting, least) == least
