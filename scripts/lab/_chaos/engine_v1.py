# SPDX-License-Identifier: Apache-2.0
"""One V1 engine under test: stock vLLM with the plugin, as three processes, driven over a pipe.

The front end (`AsyncLLM`) is this process; EngineCore and the worker are forked from it, because a fork saves their
imports. Nothing of them is changed: what is shown of the scheduler comes by a utility call, as vLLM's own do, and by a
pipe on which EngineCore reports fallbacks. The commands and messages are those of `_chaos.engine`.
"""
import asyncio
import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from _chaos.engine import COUNTERS_S, GAUGES_S
from _chaos.forks import fork_engines, spin_for
from _chaos.looks import counters_of, margin_of, process_counts, watch_fallbacks
from _chaos.looks_v1 import core_counts, count_objects

PR_SET_PDEATHSIG = 1
SPIN_S = 0.001  # vLLM's 1 s is too much for eight engines on two cores
FAILED_TOKENS: list[int] = []  # the answer of a request that ended with an error


def serve(pipe: Connection, model: str, role: str | None, pd: dict, llm: dict, async_output: bool) -> None:
    """Builds the engine and runs it until the pipe is closed or a `stop` comes. `async_output` is V0's."""
    os.setpgid(0, 0)  # the fleet kills and stops groups
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    if role is not None:
        llm = {**llm, "kv_transfer_config": {"kv_connector": "PDConnector", "kv_role": role,
                                             "kv_connector_extra_config": pd}}
    fallbacks, theirs = multiprocessing.Pipe(duplex=False)
    _fork_engines(pipe)
    _watch_engine_core(theirs)

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **llm))
        theirs.close()
        try:
            await V1EngineUnderTest(engine, pipe, fallbacks).run()
        finally:
            engine.shutdown()

    asyncio.run(run())


class V1EngineUnderTest:
    """Owns the connections. The method `op_NAME` carries out the command with that op."""

    def __init__(self, engine, pipe: Connection, fallbacks: Connection) -> None:
        self.engine = engine
        self._pipe, self._fallbacks = pipe, fallbacks
        self._streams: dict[str, asyncio.Task] = {}
        self._ended = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Until a `stop`, or the pipe's end. Raises what ends the engine."""
        incarnation, _ = await self._stats()
        self._send({"ready": incarnation})
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._guarded, self._take_commands)
        loop.add_reader(self._fallbacks.fileno(), self._guarded, self._pass_fallbacks)
        reporting = self._begin(self._report())
        try:
            await self._ended
        finally:
            reporting.cancel()

    # Commands.

    def op_add(self, requests: list, margins: bool = False) -> None:
        """`requests`: [[id, token ids, tokens to generate], ...], greedy. With `margins` an `end` has the answer's
        margin."""
        for request_id, token_ids, max_tokens in requests:
            self._streams[request_id] = self._begin(self._answer(request_id, token_ids, max_tokens, margins))

    def op_abort(self, ids: list) -> None:
        """Aborts requests, as a client that goes away."""
        for request_id in ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.cancel()

    def op_stats(self) -> None:
        """Is answered by a `reply`."""
        self._begin(self._reply())

    def op_counters(self) -> None:
        """Is answered by a `reply` with the counters: those of all tokens that have come."""
        self._send({"reply": counters_of(None)})

    def op_stop(self) -> None:
        """Ends the engine."""
        self._end()

    # Inside.

    async def _answer(self, request_id: str, token_ids: list[int], max_tokens: int, margins: bool) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine.exceptions import EngineGenerateError
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
                                    logprobs=2 if margins else None)
        times: list[float] = []
        tokens, margin = FAILED_TOKENS, []
        try:
            async for output in self.engine.generate({"prompt_token_ids": token_ids}, parameters, request_id):
                times += [time.monotonic()] * (len(output.outputs[0].token_ids) - len(times))
                if output.finished:
                    tokens, margin = list(output.outputs[0].token_ids), margin_of(output.outputs[0].logprobs)
        except EngineGenerateError as error:
            print(f"{request_id} ended with {error!r}", file=sys.stderr)
        self._streams.pop(request_id, None)
        self._send({"end": [request_id, tokens, times or [time.monotonic()], *margin]})

    async def _reply(self) -> None:
        _, stats = await self._stats()
        self._send({"reply": stats})

    async def _stats(self) -> tuple[str, dict]:
        """EngineCore's incarnation, and all counts: its own, the front end's, and those of all processes."""
        incarnation, counts, workers = await self.engine.engine_core.call_utility_async("chaos_counts")
        return incarnation, counts | {"front_requests": len(self.engine.output_processor.request_states)} | (
            process_counts(workers))

    async def _report(self) -> None:
        counters_at = 0.0
        while True:
            await asyncio.sleep(GAUGES_S)
            now, counters = time.monotonic(), counters_of(None)
            gauges = {name: int(counters.get(f"{name}_blocks", 0)) for name in ("parked", "quarantined", "sending")}
            usage = counters_of(None, "vllm:kv_cache_usage_perc").get("vllm:kv_cache_usage_perc", 0.0)
            total = self.engine.vllm_config.cache_config.num_gpu_blocks
            self._send({"gauges": {"time": now, "in_flight": len(self._streams), **gauges,
                                   "free": round((1 - usage) * (total - 1))}})
            if now >= counters_at:
                counters_at = now + COUNTERS_S
                self._send({"counters": counters})

    def _take_commands(self) -> None:
        while self._pipe.poll():
            try:
                command = json.loads(self._pipe.recv_bytes())
            except EOFError:
                self._end()
                return
            operation: Callable = getattr(self, "op_" + command.pop("op"))
            operation(**command)

    def _pass_fallbacks(self) -> None:
        while self._fallbacks.poll():
            self._send({"fallback": json.loads(self._fallbacks.recv_bytes())})

    def _begin(self, coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._end(task.exception())

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._end(error)

    def _end(self, error: BaseException | None = None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _send(self, message: dict) -> None:
        self._pipe.send_bytes(json.dumps(message).encode())


def _fork_engines(pipe: Connection) -> None:
    """From now on vLLM forks its processes from this one. They end with their parent and leave `pipe` to this one."""
    fork_engines()

    def in_child() -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):
            pipe.close()

    os.register_at_fork(after_in_child=in_child)
    spin_for(SPIN_S)


def _watch_engine_core(reports: Connection) -> None:
    """Lets EngineCore answer `chaos_counts` and report fallbacks. To be called before the plugin changes its loop."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    run = EngineCoreProc.run_busy_loop

    @functools.wraps(run)
    def run_busy_loop(core) -> None:
        watch_fallbacks(_binding(core), lambda *fallback: reports.send_bytes(json.dumps(fallback).encode()))
        run(core)

    def chaos_counts(core) -> tuple[str, dict, list[int]]:
        binding = _binding(core)
        workers = core.model_executor.collective_rpc(count_objects)
        counts = core_counts(core.scheduler, binding) | {"worker_objects": sum(objects for _, objects in workers)}
        return "" if binding is None else binding.agent.member.incarnation, counts, [pid for pid, _ in workers]

    EngineCoreProc.run_busy_loop = run_busy_loop
    EngineCore.chaos_counts = chaos_counts


def _binding(core):
    return getattr(core.scheduler, "binding", None)
