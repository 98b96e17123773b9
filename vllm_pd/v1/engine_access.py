# SPDX-License-Identifier: Apache-2.0
"""EngineCore, as far as the binding touches it: woken from any thread, and given requests in its own.

vLLM hands its engine to nobody. `hand_over_engines` wraps `run_busy_loop` of the engine classes, so that an engine
whose connector is ours passes itself on before its first step, and `preprocess_add_request`, which begins to compile a
grammar: what a request is to sample can't be changed later. Any other engine runs as without the wraps.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc, EngineShutdownState
from vllm.v1.request import Request, RequestStatus

from vllm_pd.v1.held_sampling import spare_sampling
from vllm_pd.v1.lockstep.core import StepSyncCore

try:
    from vllm.utils.watch_dog import get_watch_dog  # of 0.33
except ImportError:
    get_watch_dog = None

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

logger = logging.getLogger("vllm.pd")

END_S = 15.0  # how long an engine that has lost a rank on another node may take to end


def hand_over_engines(connector_class: type) -> None:
    """From now on an engine of this process calls `bind_engine` of a connector of this class, in its own thread, when
    its loop begins, spares the sampling of prompts that it only keeps, and calls `prepared` of it for each request of
    a client, in the thread that reads these. May be called again."""
    if not hasattr(EngineCoreProc.preprocess_add_request, "vllm_pd"):
        EngineCoreProc.preprocess_add_request = _sparing(EngineCoreProc.preprocess_add_request, connector_class)
    for cls in (EngineCoreProc, DPEngineCoreProc):
        run = cls.__dict__["run_busy_loop"]
        if not hasattr(run, "vllm_pd"):
            cls.run_busy_loop = _handing_over(run, connector_class)


def _handing_over(run: Callable[[EngineCoreProc], None], connector_class: type) -> Callable[[EngineCoreProc], None]:
    """V1's loop, with our connector bound before it and shut down after it."""

    @functools.wraps(run)
    def run_busy_loop(engine: EngineCoreProc) -> None:
        connector = engine.scheduler.get_kv_connector()
        if not isinstance(connector, connector_class):
            run(engine)
            return
        connector.bind_engine(engine)
        try:
            run(engine)
        finally:
            connector.shutdown()  # V1 would end the ranks first

    run_busy_loop.vllm_pd = True
    return run_busy_loop


def _sparing(prepare: Callable[[EngineCoreProc, EngineCoreRequest], tuple[Request, int]],
             connector_class: type) -> Callable[[EngineCoreProc, EngineCoreRequest], tuple[Request, int]]:

    @functools.wraps(prepare)
    def preprocess_add_request(engine: EngineCoreProc, request: EngineCoreRequest) -> tuple[Request, int]:
        connector = engine.scheduler.get_kv_connector()
        if not isinstance(connector, connector_class):
            return prepare(engine, request)
        spare_sampling(request)
        made, wave = prepare(engine, request)
        connector.prepared(made)
        return made, wave

    preprocess_add_request.vllm_pd = True
    return preprocess_add_request


class EngineAccess:
    """One engine. `wake` may be called in any thread, all else in the engine's own."""

    def __init__(self, engine: EngineCoreProc) -> None:
        self._engine = engine
        self._woken = threading.Event()
        self._timer: threading.Timer | None = None
        self._due: float | None = None
        self._closed = threading.Event()
        self._has_waves = isinstance(engine, DPEngineCoreProc) and not isinstance(engine, StepSyncCore)
        if self._has_waves:
            engine.execute_dummy_batch = functools.partial(self._run_dummy, engine.execute_dummy_batch)

    def wake(self) -> None:
        """Have the engine look for updates: now if it sleeps, else before its next step."""
        if not self._woken.is_set():  # one that is set has its wake-up in the queue, or is looked at after this call
            self._woken.set()
            self._engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def take_wake(self) -> bool:
        """Whether `wake` was called since the last time. To be asked before the look."""
        if not self._woken.is_set():
            return False
        self._woken.clear()
        return True

    def wake_at(self, when: float | None) -> None:
        """Also wake the engine at that time of the monotonic clock; None: at none. The last call counts."""
        if when == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = when
        if when is not None:
            self._timer = threading.Timer(max(0.0, when - time.monotonic()), self.wake)
            self._timer.daemon = True
            self._timer.start()

    @property
    def may_sleep(self) -> bool:
        """Whether the engine may stop stepping although requests wait for peers. Not where the end of all requests is
        waited for: by a shutdown that drains, or by a pause."""
        engine = self._engine
        return (engine.is_running() and not engine._idle_state_callbacks
                and engine.scheduler.pause_state is PauseState.UNPAUSED
                and (not isinstance(engine, DPEngineCoreProc) or engine.has_coordinator))

    def await_input(self) -> None:
        """Wait as the engine does when it has no work, where it must not seem to have none: a shutdown drains, or a
        pause waits for the requests. A lockstep group and an engine with a step in flight go on at once, as does one
        whose loop is yet to see that it is to shut down."""
        engine = self._engine
        if (isinstance(engine, DPEngineCoreProc) or engine.batch_queue
                or engine.shutdown_state is EngineShutdownState.REQUESTED):
            return
        inputs = engine.input_queue
        with (contextlib.nullcontext() if get_watch_dog is None else get_watch_dog().disable(),
              inputs.not_empty):  # what wakes a sleeping engine wakes this one: all of it goes through that queue
            inputs.not_empty.wait_for(lambda: inputs.queue or self._woken.is_set())

    @property
    def takes_requests(self) -> bool:
        """Whether a request that is added now would be scheduled."""
        return self._engine.is_running() and self._engine.scheduler.pause_state is PauseState.UNPAUSED

    def add(self, request: EngineCoreRequest) -> Request:
        """Add a request of our own, at once, and return it as the scheduler knows it. Not by `preprocess_add_request`:
        that keeps media in a cache that is what the front end has in its own, and belongs to another thread."""
        made = Request.from_engine_core_request(request, self._engine.request_block_hasher)
        self._engine.scheduler.add_request(made)
        return made

    def start_wave(self) -> None:
        """A step is about to run that the other ranks of a lockstep group do not know of, or one that they have begun
        is to be joined: start a wave, as the engine does for a late request. No effect in any other engine, nor where
        the group counts its steps."""
        engine: Any = self._engine
        if self._group_rests:
            engine.engines_running = True
            engine.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=engine.current_wave)))

    def end_parked(self, others: Callable[[], list[str]] = list) -> None:
        """If this rank shuts down while its lockstep group rests, abort what waits for KV, and `others`, and answer the
        clients. The other ranks may have ended: they do so once they have no requests. Without them no forward pass is
        possible."""
        engine = self._engine
        if not engine.is_running() and self._group_rests:
            parked = [*(request.request_id for request in engine.scheduler.kv_holding_waiting), *others()]
            engine._send_abort_outputs(engine.scheduler.finish_requests(parked, RequestStatus.FINISHED_ABORTED))

    def refuse(self, request_ids: list[str]) -> None:
        """End these requests, of which no step has computed anything, with an error for their clients."""
        engine = self._engine
        for request in engine.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ERROR):
            engine._send_error_outputs_to_client([request.request_id], request.client_index)

    @property
    def _group_rests(self) -> bool:
        engine = self._engine
        return self._has_waves and engine.has_coordinator and not engine.engines_running

    def _run_dummy(self, run: Callable[[], None]) -> None:
        """The loop makes a dummy forward pass, after a step without tokens. If an update came during that step, the
        group may rest: the other ranks must be started, to join the pass."""
        self.start_wave()
        run()

    def finish_steps(self, needs_step: Callable[[], bool] = lambda: False) -> None:
        """Process the outputs of all steps in flight, and make steps while they are needed. To be called while the
        scheduler is paused, which schedules nothing."""
        while needs_step():
            self._engine._process_engine_step()
        queue = self._engine.batch_queue
        newest = queue[0] if queue else None  # an engine that has requests adds further ones, which are empty
        while newest is not None and newest in queue:
            self._engine._process_engine_step()

    def publish(self, stats: SchedulerStats, front_end: int = 0) -> None:
        """Send these statistics to that front end, without a step."""
        self._engine.output_queue.put_nowait((front_end, EngineCoreOutputs(scheduler_stats=stats)))

    def rank_lost(self, what: str) -> None:
        """A rank on another node is gone: end this engine, as the executor does when it sees the end of one of its own
        processes. Where it waits for an answer of that rank, its process ends after END_S. In any thread; does not
        block."""
        logger.error("%s: this engine ends", what)
        threading.Thread(target=self._fail_executor, name="vllm-pd-rank-lost", daemon=True).start()

    def _fail_executor(self) -> None:
        executor = self._engine.model_executor
        if executor.is_failed or getattr(executor, "shutting_down", False):
            return  # it has seen an end, too, or the engine ends anyhow
        executor.is_failed = True
        executor.shutdown()
        callback, executor.failure_callback = executor.failure_callback, None
        if callback is not None:
            callback()
        if not self._closed.wait(END_S):
            logger.error("the engine still waits for that rank: its process ends")
            os._exit(1)

    def close(self) -> None:
        """Cancel the timers."""
        self.wake_at(None)
        self._closed.set()
