# SPDX-License-Identifier: Apache-2.0
"""The real loops of EngineCoreProc and DPEngineCoreProc over simulated memory: sleeping, waking, waves, shutdown."""
import collections
import contextlib
import os
import queue
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from vllm.config import ParallelConfig
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc, EngineShutdownState

from tests.v1.simulated import Engine
from tests.v1.test_hazards import prompt
from vllm_pd.protocol.actions import Prefilled, Released
from vllm_pd.protocol.messages import Timings
from vllm_pd.v1 import engine_access
from vllm_pd.v1.engine_access import EngineAccess

WAIT_S = 60.0


class StubExecutor:
    """Computes steps in the simulated memory, and counts them."""

    is_sleeping = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps = self.empty = self.dummies = 0

    def execute_model(self, output, non_block=False):
        self.steps += 1
        self.empty += not output.total_num_scheduled_tokens
        future = Future()
        future.set_result(self.engine.execute(self.engine.capture(output)))
        return future

    def execute_dummy_batch(self):
        self.dummies += 1

    def collective_rpc(self, *arguments, **keywords):
        return []


def make_core(cls, engine: Engine):
    """An engine of this class without processes and sockets."""
    core = cls.__new__(cls)
    core.__dict__.update(
        scheduler=None, model_executor=StubExecutor(engine), input_queue=queue.Queue(), output_queue=queue.Queue(),
        aborts_queue=queue.Queue(), engines_running=False, batch_queue=None, step_fn=core.step,
        _idle_state_callbacks=[], shutdown_state=EngineShutdownState.RUNNING, process_input_queue_block=True,
        publish_dp_lb_stats=False, vllm_config=engine.config, log_stats=False, check_for_draft_tokens=False,
        async_scheduling=False, _weight_version="default", is_pooling_model=False, is_mm_encoder_only=False,
        enable_fault_tolerance=False, request_block_hasher=engine.hasher, mm_receiver_cache=None, has_coordinator=True,
        engine_index=0, current_wave=0, step_counter=0, eep_scaling_state=None, pending_pause=False,
        ignore_start_dp_wave=False, prefill_schedule_interval=1, dp_sync_interval=1, dp_rank=0, dp_group=None,
        reject_new_requests=False,  # of 0.33
        structured_output_manager=SimpleNamespace(grammar_init=lambda request: None))
    return core


class Loop:
    """A core whose loop runs in a thread, with the protocol as a peer's side."""

    def __init__(self, folder, cls=EngineCoreProc, **settings) -> None:
        def access(engine: Engine) -> EngineAccess:
            self.core = make_core(cls, engine)
            self.core.scheduler = engine.scheduler
            return EngineAccess(self.core)

        self.engine = Engine(folder, access=access, **settings)
        self.core.scheduler = self.engine.scheduler
        self.executor = self.core.model_executor
        self.waves: list = []
        self.answers: dict[int, list] = collections.defaultdict(list)  # by the number of a call: what failed, or None
        self.error = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.core.run_busy_loop()
        except SystemExit:
            pass
        except BaseException as error:
            self.error = error

    def add(self, request_id: str, token_ids: list[int], tokens: int = 4, wave: int | None = None):
        """As a client does: through the queue. `wave`: the last one that its front end knows."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request
        self.engine.prompts[request_id], self.engine.wanted[request_id] = token_ids, tokens
        request = Request(request_id, list(token_ids), SamplingParams(max_tokens=tokens, temperature=0,
                          ignore_eos=True), None, block_hasher=self.engine.hasher)
        wave = self.core.current_wave if wave is None else wave
        self.core.input_queue.put_nowait((EngineCoreRequestType.ADD, (request, wave)))

    def wait(self, holds) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert self.error is None, self.error
            assert time.monotonic() < deadline
            self.take()
            time.sleep(0.0005)

    def take(self) -> None:
        while not self.core.output_queue.empty():
            client, outputs = self.core.output_queue.get_nowait()
            if client == -1:
                self.waves.append(outputs)
            elif outputs.utility_output is not None:
                self.answers[outputs.utility_output.call_id].append(outputs.utility_output.failure_message)
            else:
                self.engine.deliver({client: outputs})

    def call(self, number: int, method: str, *arguments, client: int = 0) -> None:
        """As a front end does: through the queue."""
        self.core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (client, number, method, arguments)))

    def sleeps(self) -> bool:
        """Whether the loop waits in its queue, as far as it can be seen from here."""
        steps = self.executor.steps
        time.sleep(0.02)
        return self.executor.steps == steps and self.core.input_queue.empty()

    def stop(self) -> None:
        self.core.shutdown_state = EngineShutdownState.REQUESTED
        self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive() and self.error is None


@pytest.fixture
def loop(model_folder):
    loop = Loop(model_folder)
    yield loop
    if loop.thread.is_alive():
        loop.stop()


def park(loop: Loop, request_id: str = "a"):
    loop.add(request_id, prompt(100))
    loop.wait(lambda: any(attempt.request_id == request_id for attempt in list(loop.engine.protocol.jobs)))
    return loop.engine.attempt(request_id)


def test_b94_a_parked_request_costs_no_step_and_its_word_wakes_the_engine(loop):
    park(loop)
    loop.wait(loop.sleeps)
    steps = loop.executor.steps
    assert steps <= 3
    time.sleep(0.2)
    assert loop.executor.steps == steps
    loop.engine.prefilled("a")
    loop.wait(lambda: "a" in loop.engine.ended)
    loop.wait(loop.sleeps)
    loop.stop()
    loop.engine.check_answers()
    loop.engine.check_at_rest()


def test_v1s_watchdog_does_not_count_a_wait_within_a_step(model_folder, monkeypatch):
    calls, core = [], make_core(EngineCoreProc, Engine(model_folder))

    @contextlib.contextmanager
    def disable():
        calls.append("off")
        core.input_queue.put((EngineCoreRequestType.WAKEUP, None))  # without it the wait would not end
        yield
        calls.append("on")

    monkeypatch.setattr("vllm_pd.v1.engine_access.get_watch_dog", lambda: SimpleNamespace(disable=disable))
    EngineAccess(core).await_input()
    assert calls == ["off", "on"]


def test_hazard_9_no_word_is_lost_between_the_look_and_the_sleep(loop):
    for number in range(300):
        name = f"r{number}"
        park(loop, name)
        loop.engine.prefilled(name)
        loop.wait(lambda name=name: name in loop.engine.ended)
    loop.stop()
    loop.engine.check_answers()
    loop.engine.check_at_rest()


def test_hazard_6_a_fence_that_comes_down_wakes_an_idle_engine(loop):
    attempt = park(loop)
    loop.core.input_queue.put_nowait((EngineCoreRequestType.ABORT, ["a"]))
    loop.wait(lambda: not loop.engine.scheduler.requests)
    assert len(loop.engine.binding.fence) == 1
    loop.engine.tell(Released(attempt))
    loop.wait(lambda: not len(loop.engine.binding.fence))


def test_b96_hazard_10_a_drain_waits_for_parked_requests(loop):
    loop.core.vllm_config.shutdown_timeout = 30
    attempt = park(loop)
    loop.wait(loop.sleeps)
    loop.core.shutdown_state = EngineShutdownState.REQUESTED
    loop.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    time.sleep(0.05)
    assert loop.thread.is_alive()
    loop.engine.write(attempt)
    loop.engine.tell(Prefilled(attempt, Timings()))
    loop.thread.join(WAIT_S)
    loop.take()
    loop.engine.check_answers()


def begin_drain(loop: Loop) -> None:
    loop.core.vllm_config.shutdown_timeout = 30
    loop.core.shutdown_state = EngineShutdownState.REQUESTED
    loop.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    loop.wait(lambda: loop.core.shutdown_state is EngineShutdownState.SHUTTING_DOWN)


def begin_pause(loop: Loop) -> None:
    loop.core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, 0, "pause_scheduler", ("wait", False))))
    loop.wait(lambda: loop.core._idle_state_callbacks)


@pytest.mark.parametrize("begin", [begin_drain, begin_pause])
def test_b94_b96_an_engine_that_drains_or_is_paused_rests_while_it_waits_for_peers(loop, begin):
    """And is woken by a client that leaves, by a fence, and by the KV."""
    first, second = park(loop), park(loop, "b")
    begin(loop)
    loop.wait(loop.sleeps)
    steps = loop.executor.steps
    time.sleep(0.2)
    assert loop.executor.steps == steps
    loop.core.input_queue.put_nowait((EngineCoreRequestType.ABORT, ["a"]))
    loop.wait(lambda: "a" not in loop.engine.scheduler.requests)
    loop.engine.ended["a"] = "aborted"
    loop.engine.tell(Released(first))
    loop.wait(lambda: loop.engine.binding.fence.attempts() == [second])
    loop.wait(loop.sleeps)
    assert not loop.core._idle_state_callbacks if begin is begin_drain else loop.core._idle_state_callbacks
    loop.engine.prefilled("b")
    loop.wait(lambda: "b" in loop.engine.ended)
    loop.wait(lambda: not loop.core._idle_state_callbacks)
    loop.stop()
    loop.engine.check_answers()
    loop.engine.check_at_rest()


def test_b96_a_reset_in_an_engine_that_always_has_requests_processes_the_steps_in_flight():
    """B96: as with a load from the store that hangs. Each call adds a step to those in flight, which is empty."""
    first, calls = object(), []
    core = SimpleNamespace(batch_queue=collections.deque([(first, )]), collective_rpc=None)

    def step():
        calls.append(len(calls))
        assert len(calls) < 100, "no end in sight"
        core.batch_queue.appendleft((object(), ))
        if len(core.batch_queue) == 3:  # the queue is full
            core.batch_queue.pop()

    core._process_engine_step = step
    EngineAccess(core).finish_steps(lambda: len(calls) < 1)
    assert (first, ) not in core.batch_queue and len(calls) < 5


def test_b96_an_abort_at_the_end_leaves_nothing(loop):
    attempt = park(loop)
    loop.core.vllm_config.shutdown_timeout = 0
    loop.core.shutdown_state = EngineShutdownState.REQUESTED
    loop.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    loop.thread.join(WAIT_S)
    assert attempt in loop.engine.protocol.aborted and not loop.engine.scheduler.requests


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_b96_pause_and_resume_with_a_parked_request(loop, mode):
    attempt = park(loop)
    done = collections.deque()

    def call(name, *arguments):
        loop.core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, len(done), name, arguments)))

    loop.core.structured_output_manager = None
    call("pause_scheduler", mode, False)
    if mode == "abort":
        loop.wait(lambda: not loop.engine.scheduler.requests)
        loop.engine.ended["a"] = "aborted"
        loop.engine.tell(Released(attempt))
    else:
        time.sleep(0.05)
        loop.engine.prefilled("a")
    if mode == "wait":
        loop.wait(lambda: "a" in loop.engine.ended)
    time.sleep(0.05)
    assert mode != "keep" or "a" not in loop.engine.ended
    call("resume_scheduler")
    loop.wait(lambda: "a" in loop.engine.ended)
    loop.wait(loop.sleeps)
    loop.stop()
    loop.engine.check_answers()
    loop.engine.check_at_rest()


def test_b97_a_job_goes_through_the_engine_and_its_output_nowhere(model_folder):
    loop = Loop(model_folder, role="kv_producer")
    one = prompt(100)
    attempt = loop.engine.job(one)
    loop.wait(lambda: any(request.key == str(attempt) for request in loop.engine.transfer.requests))
    loop.engine.check_sent(attempt, one)
    loop.engine.transfer.end(str(attempt))
    loop.wait(lambda: not len(loop.engine.binding.fence))
    loop.wait(loop.sleeps)
    loop.stop()
    assert not loop.engine.outputs
    loop.engine.check_at_rest()


def test_b94_ranks_of_a_group_make_no_dummy_forward_for_a_parked_request(model_folder, monkeypatch):
    """The other ranks are this test: they join a collective only after a wave was started."""
    collectives = []

    def sync(group, has_unfinished, pending_pause):
        collectives.append(has_unfinished)
        return has_unfinished, False

    monkeypatch.setattr(ParallelConfig, "sync_dp_state", staticmethod(sync))
    loop = Loop(model_folder, DPEngineCoreProc)
    loop.core.engines_running = True  # the front end started a wave with the request
    park(loop)
    loop.wait(lambda: not loop.core.engines_running)
    loop.wait(loop.sleeps)
    dummies, before = loop.executor.dummies, len(collectives)
    time.sleep(0.1)
    assert (loop.executor.dummies, len(collectives)) == (dummies, before), "the group idles"
    loop.take()
    assert [one.start_wave for one in loop.waves if one.start_wave is not None] == []
    wave = loop.core.current_wave
    loop.engine.prefilled("a")
    loop.wait(lambda: "a" in loop.engine.ended and not loop.core.engines_running)
    assert [one.start_wave for one in loop.waves if one.start_wave is not None][0] == wave
    assert loop.core.scheduler.requests == {}
    loop.wait(loop.sleeps)
    loop.stop()
    loop.engine.check_answers()
    assert loop.engine.ended["a"] == "length"


class Executor:
    """As far as a rank on another node that is gone concerns it."""

    def __init__(self) -> None:
        self.is_failed, self.calls = False, []
        self.failure_callback = lambda: self.calls.append(("callback", self.is_failed))

    def shutdown(self) -> None:
        self.calls.append(("shutdown", self.is_failed))
        self.shutting_down = True


def end_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "vllm-pd-rank-lost":
            thread.join(60)


def test_b21_a_rank_on_another_node_is_lost(caplog):
    """B21: the engine ends as by the end of a process of the executor, once, and who says so does not wait."""
    executor = Executor()
    access = EngineAccess(SimpleNamespace(model_executor=executor))
    access.close()  # it ends in time
    for _ in range(2):
        access.rank_lost("rank 1 on node 1 is gone")
        end_threads()
    assert executor.calls == [("shutdown", True), ("callback", True)] and executor.failure_callback is None
    assert "rank 1 on node 1 is gone: this engine ends" in caplog.text


@pytest.mark.parametrize("ends", [True, False])
def test_b21_an_engine_that_waits_for_the_rank_that_is_lost(monkeypatch, ends):
    """B21: where it waits for an answer of that rank it sees no failure. Then its process ends."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(engine_access, "END_S", 60.0 if ends else 0.05)
    access = EngineAccess(SimpleNamespace(model_executor=Executor()))
    access.rank_lost("rank 1 on node 1 is gone")
    if ends:
        access.close()
    end_threads()
    assert ended == ([] if ends else [1])


@pytest.mark.parametrize("attribute", ["is_failed", "shutting_down"])
def test_an_executor_that_ends_anyhow_is_left_alone(attribute):
    executor = Executor()
    setattr(executor, attribute, True)
    EngineAccess(SimpleNamespace(model_executor=executor)).rank_lost("rank 1 is gone")
    end_threads()
    assert executor.calls == []
