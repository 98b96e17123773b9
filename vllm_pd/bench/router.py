# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench router`: what a router adds to each request, and how many it can carry, beside no router at all.

All targets (the bare workers and every router in front of the same workers) run during the whole measurement and take
turns, in an order drawn anew each time, so that whatever else happens on the machine hits all of them alike:

1. alone: one request at a time, request by request in turn, to workers that answer at once, in one piece and as a
   stream. What is *added* to a request is its time less the median time of the bare workers' requests of that kind,
   until the end of the answer, and for streams until the first event too. The bare workers' own p99 is the noise.
2. paced: the same while `streams` clients, who rest between two requests, read streams of workers that take their time
   for each token, slice by slice.
3. busy: a closed loop of `clients`, workers that answer at once, slice by slice: requests/s, and the router's CPU time
   for each.

Every answer is checked to the letter. With `--load-cores` and `--router-cores` a router never competes with what
measures it.
"""

import asyncio
import gc
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from vllm_pd.bench.dummy import DummyDelays
from vllm_pd.bench.load import LoadConnection, LoadError, LoadSlice, RequestShape, RequestTiming, make_bodies, saturate
from vllm_pd.bench.servers import HOST, RouterCommand, Say, Server, Servers
from vllm_pd.errors import ConfigError, PDError

DIRECT = "no router"
GRID = 100  # quantiles that the report keeps of each distribution
SHOWN_ERRORS = 5


@dataclass(frozen=True)
class RouterBench:
    """The command line of `vllm-pd bench router`."""
    routers: tuple[RouterCommand, ...]
    workers: int = 2
    requests: int = 500
    tokens: int = 16
    prompt_tokens: int = 256
    clients: int = 32
    streams: int = 16
    slice_s: float = 2.0
    rounds: int = 5
    first_s: float = 0.02
    gap_s: float = 0.01
    block_size: int = 0
    seed: int = 0
    load_cores: tuple[int, ...] = ()
    router_cores: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises ConfigError for numbers that measure nothing."""
        for key, value, least in (("--workers", self.workers, 1), ("--requests", self.requests, 10),
                                  ("--tokens", self.tokens, 2), ("--prompt-tokens", self.prompt_tokens, 1),
                                  ("--clients", self.clients, 1), ("--streams", self.streams, 1),
                                  ("--rounds", self.rounds, 1), ("--block-size", self.block_size, 0),
                                  ("--slice-s", self.slice_s, 0.01)):  # fmt: skip
            if value < least:
                raise ConfigError(key, value, f"write at least {least}")
        names = [DIRECT, *(launch.name for launch in self.routers)]
        if len(set(names)) < len(names):
            raise ConfigError("--router", ", ".join(names[1:]), f"give each a name of its own, other than {DIRECT!r}")
        for key, cores in (("--load-cores", self.load_cores), ("--router-cores", self.router_cores)):
            if not set(cores) <= os.sched_getaffinity(0):
                raise ConfigError(key, cores, f"this process may run on {sorted(os.sched_getaffinity(0))}")


def parse_cores(key: str, text: str) -> tuple[int, ...]:
    """Of `0,1`. Raises ConfigError naming `key`."""
    try:
        return tuple(int(core) for core in text.split(",") if text)
    except ValueError:
        raise ConfigError(key, text, "write the numbers of cores, like 0,1") from None


@dataclass(frozen=True)
class MeasuredTarget:
    """Where requests go: the addresses of a router, or of all workers."""
    name: str
    addresses: tuple[tuple[str, int], ...]
    server: Server | None = None


@dataclass
class PhaseFigures:
    """Everything that one target has shown of one kind of request in one phase."""
    target: str
    phase: str
    kind: str
    timings: list[RequestTiming] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, slice_: LoadSlice, cpu_s: float) -> None:
        self.timings += slice_.timings
        self.errors += slice_.errors
        self.rates.append(slice_.requests_per_s)
        self.cpu_s += cpu_s


def measure(bench: RouterBench, log: Path | None, say: Say = print) -> dict[str, Any]:
    """Runs it all. The report, ready for JSON. Raises PDError when a router does not start."""
    bench.check()
    before = os.sched_getaffinity(0)
    with (log or Path(os.devnull)).open("w") as output, Servers(bench.load_cores, bench.router_cores, output) as stage:
        workers = stage.workers(bench.workers, bench.block_size)
        targets = [MeasuredTarget(DIRECT, tuple((HOST, worker.port) for worker in workers))]
        for launch in bench.routers:
            server = stage.router(launch, workers)
            targets.append(MeasuredTarget(launch.name, ((HOST, server.port), ), server))
            say(f"{launch.name}: pid {server.child.pid}, {' '.join(launch.arguments(server.port, ['...']))}")
        if bench.load_cores:
            os.sched_setaffinity(0, bench.load_cores)
        gc.collect()
        gc.disable()
        try:
            tallies = uvloop.run(_RouterPhases(bench, targets, say).phases())
        finally:
            gc.enable()
            os.sched_setaffinity(0, before)
        memory = {target.name: target.server.memory_bytes() for target in targets if target.server}
    return report(bench, tallies, memory)


class _RouterPhases:
    """The phases of one measurement, all in one event loop."""

    def __init__(self, bench: RouterBench, targets: Sequence[MeasuredTarget], say: Say) -> None:
        self._bench, self._targets, self._say = bench, targets, say
        self._draw = random.Random(bench.seed)
        shape = RequestShape(bench.tokens, bench.prompt_tokens)
        self._kinds = {"plain": shape, "stream": RequestShape(bench.tokens, bench.prompt_tokens, stream=True)}
        self._bodies = {kind: make_bodies(shape, "dummy", self._draw) for kind, shape in self._kinds.items()}

    async def phases(self) -> list[PhaseFigures]:
        bench, tallies = self._bench, []
        for kind in self._kinds:
            tallies += await self._alone(kind)
        await self._set_delays(DummyDelays(bench.first_s, bench.gap_s))
        tallies += await self._slices("paced", "stream", bench.streams, bench.first_s + bench.gap_s * bench.tokens)
        await self._set_delays(DummyDelays())
        for kind in self._kinds:
            tallies += await self._slices("busy", kind, bench.clients)
        return tallies

    async def _alone(self, kind: str) -> list[PhaseFigures]:
        shape, bodies = self._kinds[kind], self._bodies[kind]
        tallies = {target.name: PhaseFigures(target.name, "alone", kind) for target in self._targets}
        lines = {target.name: await LoadConnection.open(*target.addresses[0]) for target in self._targets}
        warm_up = max(10, self._bench.requests // 10)
        for number in range(-warm_up, self._bench.requests):
            for target in self._draw.sample(self._targets, len(self._targets)):
                try:
                    timing = await lines[target.name].ask(shape, next(bodies), f"alone-{number}")
                    if number >= 0:
                        tallies[target.name].timings.append(timing)
                except LoadError as error:
                    tallies[target.name].errors.append(str(error))
                    lines[target.name].close()
                    lines[target.name] = await LoadConnection.open(*target.addresses[0])
        for line in lines.values():
            line.close()
        self._say(f"alone, {kind}: done")
        return list(tallies.values())

    async def _slices(self, phase: str, kind: str, clients: int, pause_s: float = 0.0) -> list[PhaseFigures]:
        tallies = {target.name: PhaseFigures(target.name, phase, kind) for target in self._targets}
        for number in range(-1, self._bench.rounds):  # the first one warms up
            for target in self._draw.sample(self._targets, len(self._targets)):
                before_s = target.server.cpu_s() if target.server else 0.0
                found = await saturate(target.addresses, self._kinds[kind], self._bodies[kind], clients,
                                       self._bench.slice_s if number >= 0 else self._bench.slice_s / 4, pause_s,
                                       self._draw)
                cpu_s = target.server.cpu_s() - before_s if target.server else 0.0
                if number >= 0:
                    tallies[target.name].add(found, cpu_s)
                else:
                    tallies[target.name].errors += found.errors
        self._say(f"{phase}, {kind}: done")
        return list(tallies.values())

    async def _set_delays(self, delays: DummyDelays) -> None:
        for host, port in self._targets[0].addresses:
            await _post(host, port, "/dummy", msgspec.json.encode(delays))


async def _post(host: str, port: int, path: str, body: bytes) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                 .encode() + body)
    async with asyncio.timeout(10.0):
        reply = await reader.read()
    writer.close()
    if not reply.startswith(b"HTTP/1.1 200 "):
        raise PDError(f"a worker does not take its delays: {reply[:200]!r}")


def report(bench: RouterBench, tallies: Sequence[PhaseFigures], memory: dict[str, int]) -> dict[str, Any]:
    """One entry for each target, phase and kind; times in milliseconds. `added_grid_ms` are evenly spaced quantiles
    of what is added until the end of the answer, for the picture."""
    bare = {(tally.phase, tally.kind): tally for tally in tallies if tally.target == DIRECT}
    routers = [{"name": launch.name, "command": launch.shown()} for launch in bench.routers]
    return {"settings": {**asdict(bench), "routers": routers},
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": memory,
            "entries": [_entry(tally, bare[tally.phase, tally.kind]) for tally in tallies]}


def _entry(tally: PhaseFigures, bare: PhaseFigures) -> dict[str, Any]:
    found: dict[str, Any] = {"router": tally.target, "phase": tally.phase, "kind": tally.kind,
                             "requests": len(tally.timings), "errors": len(tally.errors),
                             "first_errors": tally.errors[:SHOWN_ERRORS]}
    if not tally.timings or not bare.timings:
        return found
    for key, times_s, bare_s in (
            ("total", [each.total_s for each in tally.timings], [each.total_s for each in bare.timings]),
            ("first", [each.first_s for each in tally.timings], [each.first_s for each in bare.timings])):
        middle_s = statistics.median(bare_s)
        found[f"{key}_ms"] = quantiles(times_s)
        found[f"{key}_added_ms"] = quantiles([time_s - middle_s for time_s in times_s])
        if key == "total":
            ordered = sorted(time_s - middle_s for time_s in times_s)
            found["added_grid_ms"] = [round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * number // GRID)], 4)
                                      for number in range(GRID + 1)]
    if tally.rates:
        found["requests_per_s"] = {"median": statistics.median(tally.rates), "min": min(tally.rates),
                                   "max": max(tally.rates)}
        found["router_cpu_ms_per_request"] = 1e3 * tally.cpu_s / len(tally.timings)
    return found


def quantiles(times_s: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile (nearest rank) and mean, in milliseconds."""
    ordered = sorted(times_s)

    def rank(percent: int) -> float:
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    found = {"p50": rank(50), "p90": rank(90), "p99": rank(99), "mean": statistics.fmean(ordered)}
    return {name: round(1e3 * value, 4) for name, value in found.items()}
