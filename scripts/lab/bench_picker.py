#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The prefix hits of the endpoint picker behind Envoy, beside the router's, on the same trace.

For each seed a trace of conversations (`vllm_pd.bench.simulation.trace`) is sent through `vllm-pd router` and through a
real Envoy with `vllm-pd picker`, before the same engines with a prefix cache and no model, which are emptied before.
First one request at a time, then with several open, then by round robin, which shows what there is to lose. The order
is the same for both (`_picker.replay`). Speeds are not measured: all of it is one process beside Envoy.
"""
import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _picker.engine import CachingEngine
from _picker.envoy import EnvoyBodyMode
from _picker.replay import ReplayFigures, ReplaySettings, through_picker, through_router

from vllm_pd.bench.simulation.trace import Arrival, TraceConfig, make
from vllm_pd.errors import PDError
from vllm_pd.router.policy import Policy

BLOCK_SIZE = 16
ALLOWED = 0.01  # of the router's hit rate


def variants(count: int) -> dict[str, ReplaySettings]:
    """What is compared, by name. `count`: how many requests are open at a time where there are several."""
    return {"kv, one at a time": ReplaySettings(),
            f"kv, {count} open": ReplaySettings(open=count),
            f"kv, {count} open, buffered": ReplaySettings(open=count, mode=EnvoyBodyMode.BUFFERED),
            f"round-robin, {count} open": ReplaySettings(Policy.ROUND_ROBIN, count)}


async def compare(trace: Sequence[Arrival], settings: ReplaySettings, count: int, pool_blocks: int,
                  folder: Path) -> tuple[ReplayFigures, ReplayFigures]:
    """The figures of router and picker."""
    engines = [CachingEngine(BLOCK_SIZE, pool_blocks) for _ in range(count)]
    for engine in engines:
        await engine.start()
    try:
        return (await through_router(trace, engines, settings),
                await through_picker(trace, engines, settings, folder))
    finally:
        for engine in engines:
            await engine.close()


def as_json(figures: ReplayFigures) -> dict[str, Any]:
    return dataclasses.asdict(figures) | {"hit_rate": figures.hit_rate}


async def measure(args: argparse.Namespace, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs it all: the report, ready for JSON. Raises PDError."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            trace = make(TraceConfig(seed=seed, conversations=args.conversations))
            for name, settings in variants(args.open).items():
                router, picker = await compare(trace, dataclasses.replace(settings, seed=seed), args.engines,
                                               args.pool_blocks, Path(folder))
                runs.append({"seed": seed, "variant": name, "router": as_json(router), "picker": as_json(picker),
                             "difference": picker.hit_rate / router.hit_rate - 1})
                show(f"seed {seed}, {name}: {router.requests} requests, router {router.hit_rate:.2%}, picker "
                     f"{picker.hit_rate:.2%}, {router.failed + picker.failed} failed")
    mean = {name: {side: sum(run[side]["hit_blocks"] for run in runs if run["variant"] == name)
                   / sum(run[side]["prompt_blocks"] for run in runs if run["variant"] == name)
                   for side in ("router", "picker")} for name in variants(args.open)}
    return {"settings": {"engines": args.engines, "pool_blocks": args.pool_blocks, "block_size": BLOCK_SIZE,
                         "conversations": args.conversations, "seeds": args.seeds, "open": args.open},
            "hit_rate": mean, "runs": runs}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--pool-blocks", type=int, default=1500, help="of each engine's cache")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3, help="how many traces")
    parser.add_argument("--open", type=int, default=8, help="how many requests are open at a time where several are")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    try:
        report = asyncio.run(measure(args))
    except PDError as error:
        print(f"bench_picker.py: {error}", file=sys.stderr)
        return 1
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    worst = max(abs(rates["picker"] / rates["router"] - 1) for rates in report["hit_rate"].values())
    failed = sum(run[side]["failed"] for run in report["runs"] for side in ("router", "picker"))
    print(f"largest difference of a mean hit rate: {worst:.2%} of the router's; failed requests: {failed}")
    return 0 if worst <= ALLOWED and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
