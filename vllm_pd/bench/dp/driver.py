# SPDX-License-Identifier: Apache-2.0
"""A process that owns the front end (`AsyncLLM`) of a data-parallel group and obeys commands from a pipe.

    python -m vllm_pd.bench.dp.driver READ_FD WRITE_FD ENGINE_ARGUMENTS_AS_JSON

It runs in whatever vLLM its PYTHONPATH names, patched or not, and knows nothing of the step sync of either. At the
other end of the pipe is `group.Group`. It builds the engine and sends `{"ready": ...}`. Then it answers each line of
JSON with one, in any order, until the pipe is closed; the engine processes end with it. It may have several front ends,
as there are several API servers; `front` in a line names one.
"""

import asyncio
import contextlib
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm_pd.bench.dp.ray_cluster import cluster, find

MAX_LINE_BYTES = 1 << 26


async def generate(engine: Any, ask: dict) -> dict:
    """Sends one request. Its `tokens`, and CLOCK_MONOTONIC seconds: when it was `sent`, the `times` at which tokens
    came, the `first` of them, and when it `ended`."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind[ask.get("kind", "DELTA")]
    params = SamplingParams(output_kind=kind, temperature=0.0, detokenize=False, **ask["params"])
    tokens: list[int] = []
    sent = time.monotonic()
    times: list[float] = []
    prompt = TokensPrompt(prompt_token_ids=ask["prompt"])
    adapter = LoRARequest(*ask["adapter"]) if ask.get("adapter") else None
    stream = engine.generate(prompt, params, ask["request"], lora_request=adapter, data_parallel_rank=ask.get("rank"))
    async for output in stream:
        times.append(time.monotonic())
        tokens += output.outputs[0].token_ids
        if ask.get("abort_after") and len(tokens) >= ask["abort_after"]:
            await engine.abort(ask["request"])
            break
    return {"tokens": tokens, "sent": sent, "times": times, "first": times[0] if times else None,
            "ended": time.monotonic()}


async def call(engine: Any, ask: dict) -> list:
    """The answers of the engine cores of `ranks` to a utility call. Raises TimeoutError after `patience_s`, if
    given."""
    client = engine.engine_core
    ranks = [rank.to_bytes(2, "little") for rank in ask["ranks"]]
    numbers = vars(client).get("call_numbers")  # of a front end of several ranks, in a tree that has the step sync
    together = numbers is not None and len(ranks) == len(client.core_engines)
    number = next(numbers) << 16 if together else 0
    calls = [client._call_utility_async(ask["method"], *ask["args"], engine=rank,
                                        **{"call_id": number | index} if together else {})
             for index, rank in enumerate(ranks)]
    return await asyncio.wait_for(asyncio.gather(*calls), ask.get("patience_s"))


async def health(engine: Any, ask: dict) -> bool:
    """As /health does: raises where an engine is dead."""
    await engine.check_health()
    return True


async def in_flight(engine: Any, ask: dict) -> list[str]:
    """The requests that this front end takes to be at some engine."""
    return sorted(engine.engine_core.reqs_in_flight)


async def counts(engine: Any, ask: dict) -> list:
    """The [waiting, running] counts by which this front end balances."""
    return [list(pair) for pair in engine.engine_core.lb_engines]


async def chosen(engine: Any, ask: dict) -> dict:
    """The rank that each request in flight was sent to."""
    return {key: int.from_bytes(rank, "little") for key, rank in engine.engine_core.reqs_in_flight.items()}


async def finished(engine: Any, ask: dict) -> list[int]:
    """How many requests of this front end each rank has finished. Wants `disable_log_stats=False`."""
    return [next(each for each in loggers if isinstance(each, FinishedCounter)).finished
            for loggers in engine.stat_loggers]


def stop_every(steps: int) -> None:
    """In a tree with waves: looks for the end of a wave at its first step and then at every `steps`-th, instead of at
    every 32nd. For engines that are forked later."""
    from vllm.config import ParallelConfig
    from vllm.v1.engine.core import DPEngineCoreProc

    def has_global_unfinished_reqs(self: Any, local_unfinished: bool) -> bool:
        step = vars(self).get("stop_step", 0) + 1  # of this wave, which has equally many on all ranks
        going = step > 1 and step % steps > 0 or ParallelConfig.has_unfinished_dp(self.dp_group, local_unfinished)
        self.stop_step = step if going else 0
        return going

    DPEngineCoreProc._has_global_unfinished_reqs = has_global_unfinished_reqs


class FinishedCounter:
    """Counts the requests that one rank has finished, in place of one of vLLM's statistics loggers."""

    def __init__(self, config: Any, engine_index: int = 0) -> None:
        self.finished = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        self.finished += len(iteration_stats.finished_requests) if iteration_stats else 0

    def log(self) -> None:
        """Part of the interface; logs nothing."""

    def log_engine_initialized(self) -> None:
        """Part of the interface; logs nothing."""


ASKS = {"generate": generate, "call": call, "health": health, "counts": counts, "in_flight": in_flight,
        "chosen": chosen, "finished": finished}


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


class FrontEnds:
    """The front ends, `front_ends` in the arguments or one, and the engines behind them.

    The engines are forked from this process, so that they need not import everything again: upstream's CPU platform
    would spawn each, and another process to inspect the model's class. No thread of torch runs here yet.
    """

    def __init__(self, arguments: dict, pipes: tuple[int, int]) -> None:
        import vllm.v1.worker.cpu_worker  # noqa: F401  what an engine process needs
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.model_executor.models import ModelRegistry
        from vllm.v1.engine.async_llm import AsyncLLM

        for name in json.loads((Path(arguments["model"]) / "config.json").read_text())["architectures"]:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        front_ends = arguments.pop("front_ends", 1)
        quiet = arguments["disable_log_stats"]
        meet_at = arguments.pop("ranks_meet_at")
        if steps := arguments.pop("stop_every", 0):
            stop_every(steps)
        config = AsyncEngineArgs(**arguments).create_engine_config()
        # The kernel could give upstream's own choice to any connection before the ranks listen there.
        config.parallel_config.data_parallel_master_port = meet_at
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(["all"] * config.parallel_config.world_size)
        # Else the other end would not see that this process has ended while an engine lives on.
        os.register_at_fork(after_in_child=functools.partial(_close, list(pipes)))
        clients: list = [{}] if front_ends == 1 else self._launched(config, not quiet, front_ends)
        self.engines = [AsyncLLM.from_vllm_config(config, disable_log_requests=True, disable_log_stats=quiet,
                                                  stat_loggers=None if quiet else [FinishedCounter], **client)
                        for client in clients]
        if front_ends == 1:
            self._managed = self.engines[0].engine_core.resources.engine_manager

    def _launched(self, config: Any, log_stats: bool, front_ends: int) -> list[dict]:
        """Starts engines and coordinator as `vllm serve --api-server-count` does. The client arguments of each front
        end.
        """
        from vllm.v1.engine.utils import launch_core_engines
        from vllm.v1.executor.abstract import Executor

        with launch_core_engines(config, Executor.get_class(config), log_stats, front_ends) as launched:
            self._managed, self._coordinator, addresses = launched
        counts_at = self._coordinator.get_stats_publish_address()
        return [{"client_index": number, "client_addresses": {"input_address": each, "output_address": its_output,
                                                              "stats_update_address": counts_at}}
                for number, (each, its_output) in enumerate(zip(addresses.inputs, addresses.outputs, strict=True))]

    @property
    def pids(self) -> dict[str, int]:
        """The engine processes by name; none where they are Ray's."""
        return {process.name: process.pid for process in vars(self._managed).get("processes", [])}

    def close(self) -> None:
        """Ends all front ends and engines."""
        for engine in self.engines:
            engine.shutdown()
        if len(self.engines) > 1:
            self._managed.close()
            self._coordinator.close()


async def serve(read_fd: int, write_fd: int, arguments: dict) -> None:
    """Answers commands until the pipe is closed."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb"))
    answers = os.fdopen(write_fd, "w", buffering=1)

    def answer(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")

    fronts = FrontEnds(arguments, (read_fd, write_fd))
    answer({"ready": fronts.pids})

    async def carry_out(ask: dict) -> None:
        try:
            engine = fronts.engines[ask.get("front", 0)]
            answer({"id": ask["id"], "result": await ASKS[ask["ask"]](engine, ask)})
        except Exception as error:  # any error of the engine is the answer
            answer({"id": ask["id"], "error": f"{type(error).__name__}: {error}"})

    running = set()
    while line := await reader.readline():
        task = asyncio.create_task(carry_out(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    fronts.close()


def main() -> None:
    read_fd, write_fd = int(sys.argv[1]), int(sys.argv[2])
    arguments = json.loads(sys.argv[3])
    with contextlib.ExitStack() as stack:
        if arguments.get("data_parallel_backend") == "ray":
            find()
            stack.enter_context(cluster(arguments["data_parallel_size"]))
        asyncio.run(serve(read_fd, write_fd, arguments))


if __name__ == "__main__":
    main()
