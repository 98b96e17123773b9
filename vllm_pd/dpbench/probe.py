# SPDX-License-Identifier: Apache-2.0
"""What one rank's engine process does, counted from inside: vLLM's `worker_extension_cls`, the same on any tree.

Its methods become methods of the worker, which lives in the engine's own process, and are called by `collective_rpc` between two
steps. Nothing is wrapped before `probe_start`.
"""

import os
import time
from typing import Any

FORWARD, DUMMY = "forward", "dummy"


class StepProbe:
    """Lists each forward pass as (start, end, kind, tokens), CLOCK_MONOTONIC seconds, and counts what DP itself sends."""

    def probe_start(self) -> None:
        """Begin, or begin anew, with empty lists."""
        if vars(self).get("_probe") is None:
            _wrap(self)
        self._probe = {"steps": [], "collectives": 0, "messages": 0, "cpu": _cpu_s()}

    def probe_take(self) -> dict:
        """What has happened since `probe_start`; goes on counting."""
        return {**self._probe, "cpu": _cpu_s() - self._probe["cpu"], "pid": os.getpid()}


def _cpu_s() -> float:
    """CPU time of this process, all threads, in seconds."""
    return time.process_time()


def _wrap(worker: Any) -> None:
    """Put a note-taker around the two calls of this worker that run a forward pass, and around DP's own messages."""
    run, dummy = worker.execute_model, worker.execute_dummy_batch

    def noted(kind: str, tokens: int, function: Any, *args: Any) -> Any:
        began = time.monotonic()
        result = function(*args)
        worker._probe["steps"].append((began, time.monotonic(), kind, tokens))
        return result

    def execute_model(scheduler_output: Any) -> Any:
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens == 0:  # reports finished requests, runs nothing
            return run(scheduler_output)
        return noted(FORWARD, tokens, run, scheduler_output)

    worker.execute_model = execute_model
    worker.execute_dummy_batch = lambda: noted(DUMMY, 0, dummy)
    _count_upstream(worker)


def _count_upstream(worker: Any) -> None:
    """Count the stop collective and the wave messages of a tree that has them."""
    from vllm.config import ParallelConfig
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import DPEngineCoreProc

    def counting(key: str, function: Any, counts: Any) -> Any:
        def call(*args: Any) -> Any:
            worker._probe[key] += bool(counts(*args))
            return function(*args)
        return call  # fmt: skip

    ParallelConfig.has_unfinished_dp = staticmethod(
        counting("collectives", ParallelConfig.has_unfinished_dp, lambda *_: True))  # fmt: skip
    own = {getattr(EngineCoreRequestType, name, None) for name in ("START_DP_WAVE", "DP_STEP")} - {None}
    DPEngineCoreProc._handle_client_request = counting(
        "messages", DPEngineCoreProc._handle_client_request, lambda _, kind, __: kind in own)  # fmt: skip
