# SPDX-License-Identifier: Apache-2.0
"""A process that owns the front end (`AsyncLLM`) of a data-parallel group and obeys commands from a pipe.

    python -m vllm_pd.bench.dp.driver READ_FD WRITE_FD ENGINE_ARGUMENTS_AS_JSON

It runs in whatever vLLM its PYTHONPATH names, patched or not, and knows nothing of the step sync of either. At the
other end of the pipe is `group.Group`. It builds the engine and sends `{"ready": ...}`. Then it answers each line of
JSON with one, in any order, until the pipe is closed; the engine processes end with it.
"""

import asyncio
import functools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 1 << 26
Ask = Callable[[Any, dict], Awaitable[Any]]  # gets an engine and the line; its result is the answer


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


ASKS: dict[str, Ask] = {"generate": generate, "call": call}


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


class FrontEnd:
    """The front end and the engines behind it.

    The engines are forked from this process, so that they need not import everything again: upstream's CPU platform
    would spawn each, and another process to inspect the model's class. No thread of torch runs here yet.
    """

    stat_loggers: list | None = None

    def __init__(self, arguments: dict, pipes: tuple[int, int]) -> None:
        import vllm.v1.worker.cpu_worker  # noqa: F401  what an engine process needs
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.model_executor.models import ModelRegistry
        from vllm.v1.engine.async_llm import AsyncLLM

        for name in json.loads((Path(arguments["model"]) / "config.json").read_text())["architectures"]:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
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
        self.engines = [AsyncLLM.from_vllm_config(config, disable_log_requests=True,
                                                  disable_log_stats=arguments["disable_log_stats"],
                                                  stat_loggers=self.stat_loggers, **client)
                        for client in self.clients(config)]

    def clients(self, config: Any) -> list[dict]:
        """What makes a client of each front end, as arguments of AsyncLLM: none, where it starts the engines itself."""
        return [{}]

    @property
    def manager(self) -> Any:
        """Upstream's manager of the engine processes."""
        return self.engines[0].engine_core.resources.engine_manager

    @property
    def pids(self) -> dict[str, int]:
        """The engine processes by name; none where they are Ray's."""
        return {process.name: process.pid for process in vars(self.manager).get("processes", [])}

    def close(self) -> None:
        """Ends the front end and all engines."""
        for engine in self.engines:
            engine.shutdown()


async def serve(read_fd: int, write_fd: int, arguments: dict, start: type[FrontEnd] = FrontEnd,
                asks: Mapping[str, Ask] = ASKS) -> None:
    """Answers commands until the pipe is closed."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb"))
    answers = os.fdopen(write_fd, "w", buffering=1)

    def answer(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")

    front_end = start(arguments, (read_fd, write_fd))
    answer({"ready": front_end.pids})

    async def carry_out(ask: dict) -> None:
        try:
            engine = front_end.engines[ask.get("front", 0)]
            answer({"id": ask["id"], "result": await asks[ask["ask"]](engine, ask)})
        except Exception as error:  # any error of the engine is the answer
            answer({"id": ask["id"], "error": f"{type(error).__name__}: {error}"})

    running = set()
    while line := await reader.readline():
        task = asyncio.create_task(carry_out(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    front_end.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
