# SPDX-License-Identifier: Apache-2.0
"""Orders of events that leave some requests without blocks or steps, on V1's real schedulers: all others go on."""
import itertools
import time
import types

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState

from tests.v1.simulated import PEER, Engine
from tests.v1.test_hazards import PARKED, end, prompt
from vllm_pd.decisions import mutual
from vllm_pd.protocol.actions import Cancelled, FallbackReason, Released
from vllm_pd.protocol.holds import hold_params
from vllm_pd.protocol.messages import Attempt


@pytest.fixture
def engine(model_folder, in_flight):
    return Engine(model_folder, in_flight)


def crowded(model_folder, in_flight) -> tuple[Engine, list, list]:
    """A kv_both engine whose pool is full: four jobs are being sent to a decode engine that has stopped, and two of its
    own requests, x1 and x2, are parked. Returns it, the attempts of the jobs, and those of the requests."""
    engine = Engine(model_folder, in_flight, blocks=64, max_parked_fraction=0.5, prefix_reads="never")
    jobs = [engine.job(prompt(9 * 16), number=number) for number in range(4)]
    engine.run()
    for job in jobs:
        engine.sent(job)
    for name in ("x1", "x2"):
        engine.add(name, prompt(12 * 16 - 4))
        engine.run()
    engine.protocol.peers = 0
    return engine, jobs, [engine.attempt("x1"), engine.attempt("x2")]


def leave(engine: Engine, jobs: list, first) -> None:
    """The peers that had stopped go on."""
    for job in jobs:
        engine.transfer.end(str(job))
    engine.tell(Released(first))
    end(engine)


def test_b32_a_request_that_finds_no_block_stops_none_whose_kv_is_there(model_folder, in_flight):
    engine, jobs, (first, _) = crowded(model_folder, in_flight)
    engine.lost(first, FallbackReason.LEASE)  # its peer has stopped, too: the fence stays
    engine.run()
    engine.prefilled("x2")
    engine.run()
    assert "x2" in engine.ended and "x1" in engine.ended, "x1 in the blocks of x2"
    leave(engine, jobs, first)


def test_b32_nor_one_that_falls_back_after_it(model_folder, in_flight):
    engine, jobs, (first, second) = crowded(model_folder, in_flight)
    engine.lost(first, FallbackReason.LEASE)
    engine.run()
    engine.lost(second, FallbackReason.FAILED)
    engine.tell(Released(second))
    engine.run()
    assert engine.ended, "both wait, though the blocks of one are free"
    leave(engine, jobs, first)


def test_b32_requests_that_fall_back_together_keep_their_order(model_folder, in_flight):
    engine, attempts = Engine(model_folder, in_flight, batch_tokens=512), []
    for name in "abc":
        engine.add(name, prompt(100))
        engine.run()
        attempts.append(engine.attempt(name))
    engine.protocol.peers = 0
    for attempt in attempts:
        engine.lost(attempt)
    engine.tell(*map(Released, attempts))
    engine.scheduler.has_requests()
    assert [request.request_id for request in engine.scheduler.waiting] == ["a", "b", "c"]
    end(engine)


def test_b32_batches_that_fell_back_are_as_far_apart_as_configured(model_folder, in_flight, monkeypatch):
    """Also those that come with an event, not from a step. Each look at the clock takes a second."""
    looks = itertools.count()
    monkeypatch.setattr("vllm_pd.handover.decode.time",
                        types.SimpleNamespace(monotonic=lambda: float(next(looks)), time=time.time))
    engine = Engine(model_folder, in_flight, blocks=200, batch_tokens=128, role="kv_consumer", max_fallback_share=0.01)
    for number in range(4):
        engine.add(f"x{number}", prompt(120))
    engine.run()
    engine.add("c", prompt(10), 60)
    for _ in range(3):
        engine.turn()
    engine.protocol.peers = 0
    for number in range(4):
        attempt = engine.attempt(f"x{number}")
        engine.lost(attempt)
        engine.tell(Released(attempt))
    for _ in range(14):
        engine.turn()
    assert engine.ended.keys() == {"x0"}, "one batch's worth"
    assert engine.status("x1") is engine.status("x3") is PARKED
    while "c" not in engine.ended:
        engine.turn()
    end(engine)


@pytest.mark.parametrize("first", ["held", "plain"])
def test_b20_equal_prompts_that_fall_back_together_do_not_wait_for_each_other(model_folder, in_flight, first):
    """The first is let in, and the other waits until it is computed. Something runs all the time."""
    engine = Engine(model_folder, in_flight, role="kv_consumer")
    engine.add("runs", prompt(5), 400)
    tokens = prompt(100)
    engine.add("plain", tokens)
    engine.turn()
    engine.add("held", tokens, params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args={
        "kv_transfer_params": hold_params(Attempt(PEER, "held", 5))}))
    while "held" not in engine.binding.remote_prefills.parked_ids():
        engine.turn()
    attempts = [engine.attempt(name) for name in ("held", "plain")]
    engine.protocol.peers = 0
    for attempt in attempts if first == "held" else reversed(attempts):
        engine.lost(attempt, FallbackReason.LEASE)
    while "runs" not in engine.ended:
        engine.turn()
    assert list(engine.ended) == [first, "plain" if first == "held" else "held", "runs"]
    engine.tell(*map(Released, attempts))
    end(engine)


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_b32_a_step_that_preempts_all_that_runs_is_followed_by_one_for_those_that_wait(model_folder, in_flight, policy):
    """V1 begins none that waits in a step that preempts. The parked request may hold its blocks for long."""
    engine = Engine(model_folder, in_flight, blocks=24, policy=policy)
    engine.add("parked", prompt(10 * 16 - 4))
    engine.run()
    engine.protocol.peers = 0
    engine.add("low", prompt(12 * 16 - 4), 60, priority=2)
    while not engine.outputs["low"]:
        engine.turn()
    engine.add("high", prompt(20))
    engine.run()
    assert "low" not in engine.ended and engine.scheduler.requests["low"].num_preemptions == 1
    assert ("high" in engine.ended) == (policy == "priority"), "else it waits behind low, which finds no room"
    assert engine.binding.asleep
    engine.prefilled("parked")
    end(engine)


def test_b94_a_job_on_an_engine_that_sleeps_begins_a_wave(engine):
    engine.job(prompt(40))
    engine.run()
    assert engine.access.waves and engine.steps


@pytest.mark.parametrize("value", ["x", [1], {"do_remote_prefill": True}])
def test_b43_a_client_s_own_transfer_parameters_change_nothing(engine, value):
    engine.add("a", prompt(100), params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True,
                                                       extra_args={"kv_transfer_params": value}))
    engine.run()
    engine.prefilled("a")
    end(engine)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_b96_a_paused_engine_gives_jobs_back(engine, state):
    began, waits = engine.job(prompt(900), number=1), engine.job(prompt(900), number=2)
    engine.turn()
    engine.turn()
    assert engine.binding.prefill_jobs.queued == [waits] and began not in engine.binding.prefill_jobs.waiting
    engine.access.takes_requests = False
    engine.scheduler.set_pause_state(state)
    given_back = [attempt for kind, attempt in engine.protocol.calls if kind == "failed"]
    assert given_back == ([waits] if state is PauseState.PAUSED_NEW else [began, waits])
    assert engine.protocol.credits == 0
    engine.run()
    engine.access.takes_requests = True
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.protocol.credits > 0, "at once: nothing else may happen in an idle engine"
    engine.run()
    if state is PauseState.PAUSED_NEW:
        engine.transfer.end(str(began))
    end(engine)


def test_b96_a_job_that_is_preempted_while_the_engine_is_paused_is_given_back(engine):
    """Under this pause V1 ends what runs, and begins nothing that waits."""
    engine.protocol.peers = 0
    engine.add("c", prompt(48), 30)
    attempt = engine.job(prompt(600))
    for _ in range(3):
        engine.turn()
    engine.access.takes_requests = False
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    while engine.begun_steps:
        engine.process()
    [job] = (one for one in engine.scheduler.running if one.request_id == f"pd-{attempt}")
    engine.scheduler.running.remove(job)
    engine.scheduler._preempt_request(job, time.monotonic())  # as where no block is free
    for _ in range(3):
        engine.turn()
    assert ("failed", attempt) in engine.protocol.calls and "c" not in engine.ended
    engine.access.takes_requests = True
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    end(engine)


def test_b32_a_job_without_room_does_not_stop_a_request_whose_kv_is_there(model_folder, in_flight, monkeypatch):
    """V1 looks at those that hold blocks one after the other, up to one that finds no room for the rest."""
    monkeypatch.setattr(mutual, "BLOCKED_S", 0.0)
    engine = Engine(model_folder, in_flight, blocks=24, prefix_reads="always")
    one = prompt(162)
    attempt = engine.job(one, cached_blocks=4)
    engine.turn()
    engine.add("r", prompt(100))
    engine.turn()
    assert engine.status("r") is PARKED
    engine.protocol.peers = 0
    engine.add("big", prompt(160), 60)
    while not engine.outputs["big"]:
        engine.turn()
    engine.fill(one)
    engine.turn()
    engine.prefilled("r")
    for _ in range(8):
        engine.turn()
    assert engine.outputs["r"] and "big" not in engine.ended
    assert ("failed", attempt) in engine.protocol.calls
    end(engine)


def test_b20_nothing_is_kept_of_jobs_that_are_cancelled_before_their_read(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, blocks=20, prefix_reads="always")
    engine.add("big", prompt(250), 40)
    engine.protocol.peers = 0
    for _ in range(3):
        engine.turn()
    for number in range(5):
        attempt = engine.job(prompt(100), cached_blocks=4, number=number)
        engine.turn()
        engine.tell(Cancelled(attempt))
        engine.turn()
    assert not engine.binding.prefill_jobs._hits
    end(engine)
