# SPDX-License-Identifier: Apache-2.0
"""Prompts that belong at a prefill engine and can't go there, with `fallback` `bounded` or `refuse`, on V1's real
scheduler, sync and async with two steps in flight. Time is the test's own."""
import time
import types

import pytest
from vllm.config import ParallelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc

from tests.v1.simulated import BLOCK_SIZE, PEER, Engine
from tests.v1.test_engine_access import Loop, begin_drain
from tests.v1.test_hazards import PARKED, end, parked, prompt
from vllm_pd.handover.decode import REFUSED_LOG_S
from vllm_pd.peer.cluster import QueueView
from vllm_pd.protocol.actions import Released
from vllm_pd.protocol.holds import hold_params
from vllm_pd.protocol.messages import Attempt, Role
from vllm_pd.v1.binding import LOOK_S

WAIT_S = 10.0
BOUND = 200
RULES = ("bounded", "refuse")


class Clock:
    """The time of the modules that decide."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        for module in ("handover.decode", "v1.decode", "v1.binding"):
            monkeypatch.setattr(f"vllm_pd.{module}.time", types.SimpleNamespace(
                monotonic=lambda: self.now, time=time.time, sleep=time.sleep))

    def wait(self, engine: Engine, seconds: float) -> None:
        """Let time pass, and the engine's timer wake it as often as it wants."""
        until = self.now + seconds
        for _ in range(1000):
            if engine.access.due is None or engine.access.due > until:
                break
            self.now, engine.access.due = max(self.now, engine.access.due), None
            engine.access.wake()
            engine.run()
        else:
            raise AssertionError("the timer comes again and again")
        self.now = until


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def make(model_folder, in_flight, clock):
    """An engine with this rule and no prefill engine."""

    def make(rule: str, **more) -> Engine:
        more = {"fallback_wait_s": WAIT_S, "fallback_tokens": BOUND, "role": "kv_consumer", "blocks": 200, **more}
        engine = Engine(model_folder, in_flight, fallback=rule, **more)
        engine.protocol.peers = 0
        return engine

    return make


def add(engine: Engine, request_id: str, tokens: int = 100, count: int = 4, **fields) -> None:
    engine.add(request_id, prompt(tokens), count, **fields)
    engine.run()


def waiting(engine: Engine) -> list[str]:
    return engine.binding.remote_prefills.waiting_fallbacks()


def decisions(engine: Engine) -> list[tuple]:
    return [tuple(call[1:]) for call in engine.counted() if call[0] == "decision"]


def refused(engine: Engine) -> list[str]:
    return sorted(name for name, reason in engine.ended.items() if reason == "error")


@pytest.mark.parametrize("rule", RULES)
def test_a_prompt_is_refused_at_its_deadline_in_an_engine_that_sleeps(make, clock, rule):
    engine = make(rule)
    engine.binding.remote_prefills.fallbacks.begin("other", 1)  # there is no room
    engine.binding.remote_prefills.fallbacks._uncomputed = lambda request: 1
    add(engine, "a", 300)
    assert waiting(engine) == ["a"] and not engine.has_work(), "it makes no steps meanwhile"
    steps = engine.steps
    clock.wait(engine, WAIT_S - 0.1)
    assert waiting(engine) == ["a"] and not engine.ended and engine.steps == steps
    clock.wait(engine, 0.2)
    assert engine.ended == {"a": "error"} and decisions(engine) == [("refused", "peer")]
    assert engine.gauge("waiting_fallbacks") == 0
    end(engine)
    assert engine.tokens_computed == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_peer_that_comes_while_a_prompt_waits_gets_it(make, clock, rule):
    engine = make(rule)
    engine.add("full", prompt(BOUND), 4)
    if rule == "bounded":
        engine.turn()  # it is here, and leaves no room
    add(engine, "a", 300) if rule == "refuse" else engine.add("a", prompt(300))
    if rule == "bounded":
        engine.turn()
    assert "a" in waiting(engine)
    engine.protocol.peers = 1
    clock.wait(engine, LOOK_S)
    engine.run()
    assert engine.status("a") is PARKED and not waiting(engine)
    clock.wait(engine, 2 * WAIT_S)
    assert engine.status("a") is PARKED, "it waits no more"
    for name in engine.binding.remote_prefills.parked_ids():
        engine.prefilled(name)
    end(engine)
    assert ("remote", "length") in decisions(engine) and not refused(engine)


def test_those_behind_a_prompt_that_waits_go_on(make, clock):
    engine = make("refuse")
    add(engine, "a")
    engine.add("short", prompt(BLOCK_SIZE), 4)
    engine.add("stays", prompt(100), params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True,
                                                           extra_args={"kv_transfer_params": {"pd": "local"}}))
    engine.run()
    assert list(engine.ended) == ["short", "stays"] and waiting(engine) == ["a"]
    clock.wait(engine, WAIT_S + 1)
    assert refused(engine) == ["a"]
    end(engine)


def test_it_is_refused_while_others_run_that_take_all_seats(make, clock):
    """V1 asks about nobody then."""
    engine = make("refuse", max_num_seqs=1)
    add(engine, "a")
    engine.add("runs", prompt(BLOCK_SIZE), 200)
    for _ in range(5):
        engine.turn()
    clock.now += WAIT_S + 1
    assert engine.access.due <= clock.now
    engine.access.wake()
    engine.turn()
    assert refused(engine) == ["a"] and "runs" not in engine.ended
    end(engine)


def test_bounded_lets_in_what_there_is_room_for(make, clock):
    """While it is computed, the others wait: no more than the bound is here at a time. The next one begins with the
    step after that, not when an answer ends."""
    engine = make("bounded", batch_tokens=128)
    for name in "abcd":
        engine.add(name, prompt(190), 30)
    most, order = 0, []
    while engine.has_work():
        engine.turn()
        here = [request for request in engine.scheduler.running if request.num_computed_tokens < 190]
        most = max(most, sum(190 - request.num_computed_tokens for request in here))
        order += [one.request_id for one in engine.scheduler.running if one.request_id not in order]
        assert len(order) == 4 or not engine.ended
    assert 0 < most <= BOUND and order == list("abcd")
    end(engine)
    assert decisions(engine) == [("local", "peer")] * 4


def test_bounded_takes_a_prompt_that_is_larger_than_the_bound_alone(make, clock):
    engine = make("bounded", batch_tokens=64)
    engine.add("small", prompt(150), 4)
    engine.add("large", prompt(2 * BOUND), 4)
    engine.add("after", prompt(100), 4)
    seen = set()
    while engine.has_work():
        engine.turn()
        seen.add(tuple(one.request_id for one in engine.scheduler.running
                       if one.num_computed_tokens < one.num_prompt_tokens))
    assert ("large", ) in seen and ("small", "large") not in seen
    end(engine)


@pytest.mark.parametrize("rule", RULES)
def test_no_time_to_wait_is_a_refusal_at_once(make, rule):
    engine = make(rule, fallback_wait_s=0)
    engine.add("a", prompt(BOUND), 4)
    engine.add("b", prompt(BOUND), 4)
    engine.run()
    assert refused(engine) == (["a", "b"] if rule == "refuse" else ["b"])
    end(engine)


@pytest.mark.parametrize("reason", ["broker", "queue", "cap"])
def test_what_may_pass_is_waited_for(make, clock, reason):
    engine = make("refuse", **({"max_parked_fraction": 0.01} if reason == "cap" else {}))
    engine.protocol.peers = 2
    normal = engine.protocol.view
    engine.protocol.view = lambda avoid=(): QueueView(reason != "broker", 64 if reason == "queue" else 0, 2, None)
    add(engine, "a")
    assert waiting(engine) == ["a"]
    if reason == "cap":
        clock.wait(engine, WAIT_S + 1)
        assert refused(engine) == ["a"]
    else:
        engine.protocol.view = normal
        clock.wait(engine, LOOK_S)
        assert engine.status("a") is PARKED
        engine.prefilled("a")
    end(engine)
    assert decisions(engine) == [("refused", "cap") if reason == "cap" else ("remote", "length")]


@pytest.mark.parametrize("rule", RULES)
def test_a_peer_dies_and_no_other_one_is_there(make, clock, rule):
    """The blocks that the peer may still write stay fenced after the refusal."""
    engine = make(rule)
    engine.protocol.peers = 1
    attempt = parked(engine, tokens=100)
    engine.protocol.peers = 0
    engine.lost(attempt)
    engine.run()
    if rule == "refuse":
        assert waiting(engine) == ["a"]
        clock.wait(engine, WAIT_S + 1)
        assert refused(engine) == ["a"]
    engine.write(attempt, 50)  # late
    assert len(engine.binding.fence) == 1
    engine.tell(Released(attempt))
    end(engine)
    assert decisions(engine)[1:] == [("refused" if rule == "refuse" else "local", "peer")]


def test_attempts_that_are_used_up_are_a_refusal_at_once(make):
    engine = make("refuse", attempts=1)
    engine.protocol.peers = 2
    attempt = parked(engine)
    engine.lost(attempt)
    engine.run()
    assert refused(engine) == ["a"] and decisions(engine)[1:] == [("refused", "retry")]
    engine.tell(Released(attempt))
    end(engine)


def test_many_that_come_back_at_once_are_let_in_within_the_bound(make, clock):
    """No request of them stays parked for its turn, and what runs is not held up by more than the bound."""
    engine = make("bounded", batch_tokens=64)
    engine.protocol.peers = 1
    engine.add("runs", prompt(5), 120)
    attempts = []
    for name in "abcd":
        engine.add(name, prompt(150), 4)
        while name not in engine.binding.remote_prefills.parked_ids():
            engine.turn()
        attempts.append(engine.attempt(name))
    engine.protocol.peers = 0
    for attempt in attempts:
        engine.lost(attempt)
    engine.turn()
    assert not engine.binding.remote_prefills.parked_ids() and not engine.binding.remote_prefills.falling_back
    engine.tell(*map(Released, attempts))
    most = 0
    while not {*"abcd"} <= engine.ended.keys():
        engine.turn()
        most = max(most, sum(one.num_prompt_tokens - one.num_computed_tokens for one in engine.scheduler.running
                             if one.request_id != "runs" and one.num_computed_tokens < one.num_prompt_tokens))
    assert 0 < most <= BOUND and "runs" not in engine.ended
    end(engine)


def test_a_reset_by_an_operator_is_no_attempt_and_no_reason_to_refuse(make, clock):
    engine = make("refuse", attempts=1)
    engine.protocol.peers = 1
    attempt = parked(engine)
    engine.tell(Released(attempt))
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert not refused(engine) and engine.attempt("a") != attempt and engine.status("a") is PARKED
    engine.prefilled("a")
    end(engine)


def test_one_that_waits_for_the_kv_of_an_equal_prompt_is_not_refused_meanwhile(make, clock):
    """It waited as a fallback before: the only prefill engine has failed at it, and now does the other one."""
    engine = make("refuse")
    engine.protocol.peers = 1
    attempt = parked(engine, "a")
    engine.lost(attempt)
    engine.tell(Released(attempt))
    engine.run()
    assert waiting(engine) == ["a"]
    engine.add("b", engine.prompts["a"])
    engine.run()
    assert engine.status("b") is PARKED
    clock.wait(engine, WAIT_S + 1)
    assert not refused(engine)
    engine.prefilled("b")
    end(engine)
    assert engine.ended == {"a": "length", "b": "length"}


@pytest.mark.parametrize("rule", RULES)
def test_an_abort_while_it_waits_leaves_nothing(make, clock, rule):
    engine = make(rule)
    engine.add("full", prompt(BOUND), 100)
    engine.turn()
    engine.add("a", prompt(BOUND), 4)
    engine.turn()
    assert "a" in waiting(engine)
    engine.abort("a", "full")
    assert not waiting(engine)
    engine.run()
    clock.wait(engine, 2 * WAIT_S)
    assert engine.ended == {"a": "aborted", "full": "aborted"}
    end(engine)
    assert ("refused", "peer") not in decisions(engine)


def test_a_hold_that_a_refused_request_names_is_settled(make, clock):
    engine, hold = make("refuse"), Attempt(PEER, "held", 5)
    add(engine, "a", params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args={
        "kv_transfer_params": hold_params(hold)}))
    assert waiting(engine) == ["a"] and not engine.protocol.calls
    clock.wait(engine, WAIT_S + 1)
    assert refused(engine) == ["a"] and engine.protocol.calls == [("drop_hold", hold)]
    end(engine)


@pytest.mark.parametrize("rule", RULES)
def test_a_preempted_request_is_never_refused(make, clock, rule):
    """Its client has the beginning of its answer."""
    engine = make(rule, blocks=20)
    engine.protocol.peers = 1
    engine.add("a", prompt(10 * BLOCK_SIZE - 4), 60)
    engine.run()
    engine.prefilled("a")
    engine.turn()
    engine.protocol.peers = 0
    engine.add("b", prompt(BLOCK_SIZE - 2), 100)
    engine.add("c", prompt(BLOCK_SIZE - 2), 100)
    preempted = False
    while engine.has_work():
        engine.turn()
        preempted = preempted or any(one.num_preemptions for one in engine.scheduler.requests.values())
    assert preempted
    end(engine)
    assert not refused(engine)


def test_kv_that_has_come_and_is_forgotten_is_no_reason_to_refuse(make, clock):
    """A reset of the prefix cache while it was about to be resumed."""
    engine = make("refuse")
    engine.protocol.peers = 1
    parked(engine)
    engine.protocol.peers = 0
    engine.prefilled("a")
    engine.scheduler.has_requests()
    assert engine.scheduler.reset_prefix_cache(True)
    engine.run()
    end(engine)
    assert not refused(engine) and decisions(engine)[1:] == [("local", "retry")]


@pytest.mark.parametrize("rule", RULES)
def test_samples_of_one_request_each_get_an_end(make, clock, rule):
    """A client that asks for n > 1 has n requests with one prompt. Where the first is computed here, the others have it
    as a prefix hit."""
    engine, tokens = make(rule, batch_tokens=64), prompt(BOUND)
    for number in range(3):
        engine.add(f"{number}_r", tokens, 4)
    engine.run()
    clock.wait(engine, WAIT_S + 1)
    assert refused(engine) == ([] if rule == "bounded" else ["0_r", "1_r", "2_r"])
    end(engine)
    assert engine.tokens_computed < 2 * BOUND


def test_priority_decides_who_has_the_room(make, clock):
    engine = make("bounded", policy="priority", batch_tokens=64)
    engine.add("first", prompt(150), 4)
    engine.turn()
    engine.add("late", prompt(150), 4, priority=2)
    engine.turn()
    engine.add("urgent", prompt(150), 4, priority=1)
    order = []
    while engine.has_work():
        engine.turn()
        order += [one.request_id for one in engine.scheduler.running if one.request_id not in order]
    assert order == ["first", "urgent", "late"]
    end(engine)


def test_a_request_that_has_features_or_is_short_is_no_fallback(make):
    engine = make("refuse")
    add(engine, "scores", 100, params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=1))
    add(engine, "short", BLOCK_SIZE)
    assert not refused(engine) and decisions(engine) == [("local", "feature"), ("local", "threshold")]
    end(engine)


@pytest.mark.parametrize("role, is_refused", [(Role.DECODE, True), (Role.PREFILL, False)])
def test_an_engine_that_has_lost_its_peers_refuses_too(make, role, is_refused):
    """Its address, its transfer agents, or its weights are others now. One that an operator has made a prefill engine
    computes what its clients send."""
    engine = make("refuse", fallback_wait_s=0)
    engine.protocol.peers = 2
    engine.protocol.state.hands_over = False
    engine.protocol.state.role = role
    add(engine, "a")
    assert refused(engine) == (["a"] if is_refused else [])
    end(engine)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_its_time_passes_in_a_pause(make, clock, state):
    engine = make("refuse")
    add(engine, "a")
    engine.access.may_sleep = False
    engine.scheduler.set_pause_state(state)
    clock.now += WAIT_S + 1
    assert engine.access.due <= clock.now
    engine.access.wake()
    engine.scheduler.has_requests()
    assert refused(engine) == ["a"]
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    end(engine)


def test_the_log_has_one_line_for_many(make, clock, caplog):
    engine = make("refuse", fallback_wait_s=0)
    for number in range(50):
        add(engine, f"r{number}")
    lines = [one.getMessage() for one in caplog.records if "is refused" in one.getMessage()]
    assert len(lines) == 1 and "request r0 is refused" in lines[0] and "(peer)" in lines[0]
    clock.now += REFUSED_LOG_S
    add(engine, "later")
    lines = [one.getMessage() for one in caplog.records if "is refused" in one.getMessage()]
    assert len(lines) == 2 and lines[1].endswith("; 49 more since the last such line")
    end(engine)


def test_local_is_the_default_and_nobody_waits(model_folder, in_flight):
    engine = Engine(model_folder, in_flight)
    engine.protocol.peers = 0
    add(engine, "a")
    assert engine.binding.remote_prefills.fallbacks is None and decisions(engine) == [("local", "peer")]
    end(engine)


# Real loops.


def slept(loop: Loop) -> bool:
    """Whether the loop makes no steps for a while, or one each `LOOK_S` where it must not seem to have no work."""
    steps = loop.executor.steps
    time.sleep(0.3)
    return loop.executor.steps - steps <= (0 if loop.core.is_running() else 2)


def begin_pause(loop: Loop) -> None:
    """V1 waits for none that computes nothing."""
    loop.core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, 0, "pause_scheduler", ("wait", False))))
    loop.wait(lambda: loop.core.scheduler.pause_state is PauseState.PAUSED_NEW)


@pytest.mark.parametrize("begin", [None, begin_drain, begin_pause])
def test_a_deadline_wakes_a_loop_that_sleeps_drains_or_is_paused(model_folder, begin):
    loop = Loop(model_folder, fallback="refuse", fallback_wait_s=1.5)
    loop.engine.protocol.peers = 0
    loop.add("a", prompt(100))
    loop.wait(lambda: waiting(loop.engine))
    if begin is not None:
        begin(loop)
    loop.wait(loop.sleeps)
    assert slept(loop) and not loop.engine.ended
    loop.wait(lambda: loop.engine.ended)
    assert loop.engine.ended == {"a": "error"} and loop.executor.empty <= 12
    if begin is begin_drain:
        loop.thread.join(60)
        assert not loop.thread.is_alive()
    else:
        loop.stop()
    loop.engine.check_at_rest()


def test_a_loop_that_sleeps_sees_that_a_peer_has_come(model_folder):
    loop = Loop(model_folder, fallback="refuse", fallback_wait_s=60)
    loop.engine.protocol.peers = 0
    loop.add("a", prompt(100))
    loop.wait(lambda: waiting(loop.engine))
    loop.wait(lambda: slept(loop))
    loop.engine.protocol.peers = 1
    loop.wait(lambda: loop.engine.protocol.jobs)
    loop.engine.prefilled("a")
    loop.wait(lambda: loop.engine.ended)
    loop.stop()
    loop.engine.check_answers()
    loop.engine.check_at_rest()


def test_a_rank_refuses_in_a_group_that_rests(model_folder, monkeypatch):
    monkeypatch.setattr(ParallelConfig, "sync_dp_state", staticmethod(
        lambda group, has_unfinished, pending_pause: (has_unfinished, False)))
    loop = Loop(model_folder, DPEngineCoreProc, fallback="refuse", fallback_wait_s=1.0)
    loop.engine.protocol.peers = 0
    loop.core.engines_running = True  # the front end started a wave with the request
    loop.add("a", prompt(100))
    loop.wait(lambda: waiting(loop.engine))
    loop.wait(lambda: not loop.core.engines_running)
    dummies = loop.executor.dummies
    assert slept(loop) and loop.executor.dummies == dummies, "the group rests"
    loop.wait(lambda: loop.engine.ended)
    assert loop.engine.ended == {"a": "error"}
    loop.wait(lambda: not loop.core.engines_running)
    loop.stop()
    loop.engine.check_at_rest()


def test_a_rank_that_shuts_down_while_its_group_rests_answers_the_client(model_folder, monkeypatch):
    monkeypatch.setattr(ParallelConfig, "sync_dp_state", staticmethod(
        lambda group, has_unfinished, pending_pause: (has_unfinished, False)))
    loop = Loop(model_folder, DPEngineCoreProc, fallback="refuse", fallback_wait_s=60)
    loop.engine.protocol.peers = 0
    loop.core.engines_running = True
    loop.add("a", prompt(100))
    loop.wait(lambda: waiting(loop.engine) and not loop.core.engines_running)
    loop.core.vllm_config.shutdown_timeout = 30
    loop.stop()
    loop.take()
    assert loop.engine.ended == {"a": "abort"}
