# SPDX-License-Identifier: Apache-2.0
"""CPU time that the router needs to place one request among many workers that all hold its first block.

    python scripts/lab/bench_placing.py [--workers 1000] [--requests 200]
"""
import argparse
import asyncio
import json
import random
import statistics
import time

from vllm_pd.events.messages import EngineLoad
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.placing import Placer
from vllm_pd.router.policy import Policy, RoutingPolicyConfig
from vllm_pd.router.tokens import TokenPool
from vllm_pd.router.workers import Workers, WorkerSource

BLOCK = 16
PROMPT = range(200)


async def measure(count: int, requests: int) -> str:
    """A line with the figures for `count` workers."""
    options, metrics = RouterOptions(port=1).checked(), RouterMetrics()
    workers, pool = Workers(metrics, options.max_in_flight), TokenPool(options)
    load = EngineLoad(running=3, used_blocks=100, total_blocks=1000, queued_prefill_tokens=500)
    placer = Placer(options, RoutingPolicyConfig(policy=Policy.KV), workers, pool, metrics, lambda url: (load, 0.05),
                    random.Random(1))
    for number in range(count):
        worker = workers.add(f"http://10.0.{number // 250}.{number % 250}:8000", WorkerSource.STATIC)
        worker.models = worker.base_models = frozenset({"m"})
        worker.probe_passed()
        placer.families.join(worker).index(BLOCK).stored(worker.url, [1], None, list(PROMPT[:BLOCK]), BLOCK)
    body = json.dumps({"model": "m", "prompt": list(PROMPT)}).encode()
    times_s, chars = [], 0
    for _ in range(requests):
        began_s = time.process_time()
        _, choice = placer.place(await placer.plan([], body, True), ())
        times_s.append(time.process_time() - began_s)
        chars = len(choice.header())
    placer.close()
    pool.close()
    return (f"{count} workers: {1000 * statistics.median(times_s):.2f} ms of CPU (median), {1000 * min(times_s):.2f} "
            f"(best); explained in {chars} characters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=200)
    given = parser.parse_args()
    print(asyncio.run(measure(given.workers, given.requests)))


if __name__ == "__main__":
    main()
