# SPDX-License-Identifier: Apache-2.0
"""The driver of a group with what only tests need: more asks, several front ends, Ray.

`front_ends` in the arguments is their number, as there may be several API servers; `front` in a line names one.
`environment` has variables of the environment, for the engines too.
"""

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from ray_cluster import cluster, find

from vllm_pd.bench.dp.driver import ASKS, FrontEnd, serve

CLIENTS: dict[str, asyncio.Task] = {}  # of `given_up`, by request


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


async def prefill(engine: Any, ask: dict) -> dict:
    """Sends one request of one token to an engine with a KV connector. Its `tokens`, and the `kv` of its answer: the
    `kv_transfer_params` for the engine that decodes."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    remote = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
              "remote_host": None, "remote_port": None}  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True,
                            extra_args={"kv_transfer_params": remote})
    prompt = TokensPrompt(prompt_token_ids=ask["prompt"])
    async for output in engine.generate(prompt, params, ask["request"], data_parallel_rank=ask["rank"]):
        answer = {"tokens": list(output.outputs[0].token_ids), "kv": output.kv_transfer_params}
    return answer


async def given_up(engine: Any, ask: dict) -> bool:
    """Sends one request as `generate`, whose client goes away at `go_away`. Whether it was still waiting then."""
    client = asyncio.create_task(ASKS["generate"](engine, ask))
    CLIENTS[ask["request"]] = client
    await asyncio.wait([client])
    return client.cancelled()


async def go_away(engine: Any, ask: dict) -> bool:
    """Ends the client of that request of `given_up`. Whether it was still waiting."""
    return CLIENTS.pop(ask["request"]).cancel()


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


class FrontEnds(FrontEnd):
    """One or more front ends and the engines behind them."""

    def __init__(self, arguments: dict, pipes: tuple[int, int]) -> None:
        self._count = arguments.pop("front_ends", 1)
        os.environ.update(arguments.pop("environment", {}))
        if connector := arguments.get("kv_transfer_config"):
            from vllm.config import KVTransferConfig
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        self.stat_loggers = None if arguments["disable_log_stats"] else [FinishedCounter]
        super().__init__(arguments, pipes)

    def clients(self, config: Any) -> list[dict]:
        """Starts engines and coordinator as `vllm serve --api-server-count` does, where there are several."""
        from vllm.v1.engine.utils import launch_core_engines
        from vllm.v1.executor.abstract import Executor

        if self._count == 1:
            return [{}]
        with launch_core_engines(config, Executor.get_class(config), self.stat_loggers is not None,
                                 self._count) as launched:
            self._managed, self._coordinator, addresses = launched
        counts_at = self._coordinator.get_stats_publish_address()
        return [{"client_index": number, "client_addresses": {"input_address": each, "output_address": its_output,
                                                              "stats_update_address": counts_at}}
                for number, (each, its_output) in enumerate(zip(addresses.inputs, addresses.outputs, strict=True))]

    @property
    def manager(self) -> Any:
        return super().manager if self._count == 1 else self._managed

    def close(self) -> None:
        super().close()
        if self._count > 1:
            self._managed.close()
            self._coordinator.close()


def main() -> None:
    read_fd, write_fd, arguments = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    with contextlib.ExitStack() as stack:
        if arguments.get("data_parallel_backend") == "ray":
            find()
            stack.enter_context(cluster(arguments["data_parallel_size"]))
        asks = ASKS | {"health": health, "counts": counts, "in_flight": in_flight, "chosen": chosen,
                       "finished": finished, "prefill": prefill, "given_up": given_up, "go_away": go_away}
        asyncio.run(serve(read_fd, write_fd, arguments, FrontEnds, asks))


if __name__ == "__main__":
    main()
