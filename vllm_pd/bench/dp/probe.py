# SPDX-License-Identifier: Apache-2.0
"""Counts from inside what one rank's engine process does: a `worker_extension_cls` of vLLM, the same on any tree.

Its methods become methods of the worker, which lives in the engine's process. `collective_rpc` calls them between two
steps. Nothing is wrapped before `probe_start`.
"""

import gc
import os
import time
from typing import Any

FORWARD, DUMMY = "forward", "dummy"


class StepProbe:
    """Lists each forward pass as (start, end, kind, tokens), in CLOCK_MONOTONIC seconds; counts what DP sends."""

    def probe_start(self) -> None:
        """Starts counting, again with empty lists where it has counted already."""
        if vars(self).get("_probe") is None:
            _wrap(self)
        self._probe = {"steps": [], "collectives": 0, "messages": 0, "cpu": _cpu_s()}
        self._probe_messages = _messages(self)

    def probe_take(self) -> dict:
        """What has happened since `probe_start`: `steps`, `collectives`, `messages`, `cpu` seconds, `pid`. Goes on
        counting.
        """
        counted = _messages(self) - self._probe_messages
        return {**self._probe, "messages": self._probe["messages"] + counted, "cpu": _cpu_s() - self._probe["cpu"],
                "pid": os.getpid()}

    def probe_collective(self) -> int:
        """The number of ranks, by a collective over them."""
        import torch
        from vllm.distributed.parallel_state import get_dp_group
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones, group=get_dp_group().cpu_group)
        return int(ones.item())


def _cpu_s() -> float:
    """CPU time of this process, all threads, in seconds."""
    return time.process_time()


def _messages(worker: Any) -> int:
    """The messages that this rank's step sync has sent, where the tree has one."""
    engine = worker._probe_engine
    sync = vars(engine).get("dp_sync") if engine is not None else None
    return sync.messages if sync is not None else 0


def _wrap(worker: Any) -> None:
    """Wraps the two calls of this worker that run a forward pass, and DP's own messages, to count them."""
    run, dummy = worker.execute_model, worker.execute_dummy_batch
    worker._probe_engine = _engine(worker)

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
    _count_waves(worker)


def _engine(worker: Any) -> Any:
    """The DPEngineCoreProc in this process, to which the worker has no reference. None in a group of one."""
    from vllm.v1.engine.core import DPEngineCoreProc
    return next((each for each in gc.get_objects() if isinstance(each, DPEngineCoreProc)), None)


def _count_waves(worker: Any) -> None:
    """Counts the stop collectives, and the wave messages to and from this rank, in a tree that has them."""
    from vllm.config import ParallelConfig
    from vllm.v1.engine import EngineCoreRequestType

    def counting(key: str, function: Any, counts: Any) -> Any:
        def call(*args: Any) -> Any:
            worker._probe[key] += bool(counts(*args))
            return function(*args)
        return call

    ParallelConfig.has_unfinished_dp = staticmethod(
        counting("collectives", ParallelConfig.has_unfinished_dp, lambda *_: True))
    engine, start = worker._probe_engine, vars(EngineCoreRequestType)["_member_map_"].get("START_DP_WAVE")
    if engine is None or start is None:
        return

    def ends_or_starts(item: Any) -> bool:
        return isinstance(item, tuple) and (item[1].wave_complete is not None or item[1].start_wave is not None)

    engine._handle_client_request = counting("messages", engine._handle_client_request, lambda kind, _: kind == start)
    engine.output_queue.put_nowait = counting("messages", engine.output_queue.put_nowait, ends_or_starts)
