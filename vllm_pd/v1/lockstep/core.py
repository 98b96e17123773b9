# SPDX-License-Identifier: Apache-2.0
"""vLLM's `DPEngineCoreProc` with the step sync in the place of waves.

No engine is made as one: vLLM makes its own, which becomes this between its process group and its model (`adopt`). What
front ends and the coordinator say of waves changes nothing here: they stay as they are.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc, EngineShutdownState

from vllm_pd.errors import ConfigError
from vllm_pd.v1.lockstep.options import STEP_SYNC
from vllm_pd.v1.lockstep.sync import StepSync

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_pd.dp.utility import UtilityRequest
    from vllm_pd.v1.lockstep.options import StepSyncOptions

_PAUSE = "pause_scheduler"
_OURS = -1  # the front end of a call that is this rank's own
LOOK_S = 0.02  # how often a rank that stays for the others looks whether it still must


def adopt(engine: DPEngineCoreProc, config: VllmConfig, options: StepSyncOptions) -> None:
    """Join this rank's engine to the step sync of its group; from then on it is a StepSyncCore. Raises GroupFailed, and
    ConfigError for ranks that differ."""
    if not engine.has_coordinator:
        raise ConfigError(STEP_SYNC, True, "remove it: with a front end in each rank's own program (offline) ranks are "
                          "tried with waves only")
    engine.__class__ = StepSyncCore
    engine._paused = []
    engine.step_sync = StepSync(engine, config, options)


class StepSyncCore(DPEngineCoreProc):
    """The engine core of a rank whose group counts its steps."""

    step_sync: StepSync
    _paused: list[UtilityRequest]  # the pauses that this rank has come to the end of; the last part is the callback

    @property
    def engines_running(self) -> bool:
        """In the place of the flag of waves: whether other ranks wait for something of this one. `has_work` reads it,
        so the loop does not block then."""
        return self.step_sync.due

    @engines_running.setter
    def engines_running(self, running: bool) -> None:
        """Nobody says so: it follows from the steps that were requested."""

    @property
    def step_counter(self) -> int:
        """In statistics: the number of forward passes, which orders those of all ranks."""
        return self.step_sync.forwards

    @step_counter.setter
    def step_counter(self, steps: int) -> None:
        """It is counted where passes begin."""

    def has_work(self) -> bool:
        """V1's; and a rank that is to end stays while others have work."""
        if super().has_work():
            return True
        if self.shutdown_state is not EngineShutdownState.SHUTTING_DOWN:
            return False
        self._end_pauses("the server shuts down")
        return self.step_sync.stay(self.vllm_config.shutdown_timeout)

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        """V1's without waves: a request may come to any rank, and no other has to know."""
        EngineCoreProc.add_request(self, request, request_wave)

    def run_busy_loop(self) -> None:
        """V1's loop of an engine alone: `_process_engine_step` does what a group needs beside it."""
        self.model_executor.execute_model = functools.partial(self._execute, self.model_executor.execute_model)
        EngineCoreProc.run_busy_loop(self)  # as it is now: the connector is handed over there

    def shutdown(self) -> None:
        """V1's, after this rank has left its group."""
        self.step_sync.close()
        super().shutdown()

    def resume_scheduler(self) -> None:
        """V1's of an engine alone: this comes after the same forward pass on all ranks. A pause that some rank has not
        come to yet is given up."""
        self._end_pauses("resumed before all data-parallel ranks had paused")
        super(DPEngineCoreProc, self).resume_scheduler()

    def reinitialize_distributed(self, *arguments: Any, **keywords: Any) -> str:
        """Refused: a group of the step sync has a fixed size."""
        raise RuntimeError(f"{STEP_SYNC}: the number of ranks can't change")

    def _handle_shutdown(self) -> bool:
        if not self.is_running():
            self.step_sync.member.expect_end()
        return super()._handle_shutdown()

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type is EngineCoreRequestType.START_DP_WAVE:
            return
        if request_type is EngineCoreRequestType.UTILITY and self.is_running() and self.step_sync.hold(request):
            return
        self.step_sync.is_called = True
        try:
            EngineCoreProc._handle_client_request(self, request_type, request)
        finally:
            self.step_sync.is_called = False

    def _pause_complete(self) -> bool:
        """False: it is complete when all ranks have come to their ends."""
        return False

    def _end_pauses(self, reason: str) -> None:
        """No pause that some rank has not come to yet is waited for any more."""
        for callback in list(self._idle_state_callbacks):
            held = next((paused for paused in self._paused if paused[-1] is callback), None)
            if held is None or self.step_sync.calls.withdraw(held):
                self._paused = [paused for paused in self._paused if paused is not held]
                self._idle_state_callbacks.remove(callback)
                callback.keywords["future"].set_exception(RuntimeError(reason))

    def _notify_idle_state_callbacks(self) -> None:
        """This rank has no work any more. A pause that waits for that is complete when all ranks have none."""
        for callback in self._idle_state_callbacks:
            if not any(callback is paused[-1] for paused in self._paused):
                self._paused.append((_OURS, 0, _PAUSE, callback))
                self.step_sync.rest(self._paused[-1])

    def _process_engine_step(self) -> bool:
        if self.step_sync.makes_calls:  # a call has steps in flight processed, and begins none
            return EngineCoreProc._process_engine_step(self)
        with self.step_sync.step(self._make):
            executed = EngineCoreProc._process_engine_step(self)
        if not executed:
            self.step_sync.keep_up(self.execute_dummy_batch)
            if not self.is_running() and not super().has_work():
                self._look_again()
        return executed

    def _execute(self, run: Callable[..., Any], output: SchedulerOutput, non_block: bool = False) -> Any:
        """The executor's `execute_model`. A step without tokens makes no forward pass."""
        run = functools.partial(run, non_block=non_block)
        return self.step_sync.forward(run, output) if output.total_num_scheduled_tokens else run(output)

    def _make(self, request: UtilityRequest) -> None:
        """Make a call that all ranks make now."""
        if request[0] != _OURS:
            EngineCoreProc._handle_client_request(self, EngineCoreRequestType.UTILITY, request)
        elif request in self._paused:
            self._paused.remove(request)
            self._idle_state_callbacks.remove(request[-1])
            request[-1](self)

    def _look_again(self) -> None:
        """Wait, a little at most, for what this rank stays for."""
        with self.input_queue.not_empty:
            self.input_queue.not_empty.wait_for(lambda: self.input_queue.queue, LOOK_S)
