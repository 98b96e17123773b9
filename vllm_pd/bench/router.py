# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench router`: what a router adds to each request, and how many it can carry, beside no router at all.

All targets (the bare workers, and each router in front of the same workers) run during the whole measurement. They take
turns in random order, so that other work of the machine hits all of them equally:

1. alone: one request at a time, request by request in turn, to workers that answer at once, in one piece and as a
   stream. What is *added* to a request is its time less the median time of the bare workers' requests of that kind,
   until the end of the answer, and for streams until the first event too. The bare workers' own p99 is the noise.
2. paced: the same, in slices of time, while `streams` clients, who pause between two requests, read streams of workers
   that wait before each token.
3. busy: in slices of time, a closed loop of `clients` and workers that answer at once: requests/s, and the router's CPU
   time for each.

Every answer is compared with what the dummy must have said. A router that ends has errors from then on; the others are
measured to their end. With `--load-cores` and `--router-cores` a router never
competes with what measures it.
"""

import gc
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop

from vllm_pd.bench.checks import require_at_least
from vllm_pd.bench.connection import LoadConnection, LoadError
from vllm_pd.bench.dummy import DummyDelays
from vllm_pd.bench.dummy_client import RequestShape
from vllm_pd.bench.load import LoadSlice, RequestTiming, closed_loop
from vllm_pd.bench.options import RouterLoad
from vllm_pd.bench.report import MS, ShowLine, quantile_grid, summary
from vllm_pd.bench.servers import RouterCommand, Server, Servers, log_to
from vllm_pd.errors import ConfigError

DIRECT = "no router"
GRID = 100  # evenly spaced quantiles that the report keeps of each distribution, for the picture
FIGURES = "p50 p90 p99 mean"
SHOWN_ERRORS = 5


@dataclass(frozen=True)
class RouterBench(RouterLoad):
    """The command line of `vllm-pd bench router`."""
    routers: tuple[RouterCommand, ...] = ()
    workers: int = 2
    first_s: float = 0.02
    gap_s: float = 0.01
    load_cores: tuple[int, ...] = ()
    router_cores: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises ConfigError for numbers that measure nothing."""
        require_at_least([("--workers", self.workers, 1), ("--requests", self.requests, 10),
                          ("--tokens", self.tokens, 2), ("--prompt-tokens", self.prompt_tokens, 1),
                          ("--clients", self.clients, 1), ("--streams", self.streams, 1), ("--rounds", self.rounds, 1),
                          ("--block-size", self.block_size, 0), ("--slice-s", self.slice_s, 0.01)])
        names = [DIRECT, *(router.name for router in self.routers)]
        if len(set(names)) < len(names):
            raise ConfigError("--router", ", ".join(names[1:]), f"give each a name of its own, other than {DIRECT!r}")


@dataclass(frozen=True)
class MeasuredTarget:
    """Where requests go: the URL of a router, or those of all workers."""
    name: str
    urls: tuple[str, ...]
    server: Server | None = None

    def cpu_s(self) -> float:
        """CPU seconds that the router has used so far."""
        return self.server.cpu_s() if self.server else 0.0


@dataclass
class PhaseFigures:
    """All requests of one kind to one target in one phase. `rates`: requests/s of each slice; `cpu_s`: CPU seconds of
    the router."""
    target: str
    phase: str
    kind: str
    timings: list[RequestTiming] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, done: LoadSlice, cpu_s: float) -> None:
        """Adds the times of a slice, in which the router used `cpu_s` seconds of CPU."""
        self.timings += done.timings
        self.rates.append(done.requests_per_s)
        self.cpu_s += cpu_s


def measure(bench: RouterBench, log: Path | None, show: ShowLine = print) -> dict[str, Any]:
    """Runs it all. The report, ready for JSON. Raises PDError when a router does not start."""
    bench.check()
    before = os.sched_getaffinity(0)
    with (log or Path(os.devnull)).open("w") as output, Servers(log_to(output)) as servers:
        workers = tuple(worker.url for worker in servers.dummies(bench.workers, bench.block_size, bench.load_cores))
        targets = [MeasuredTarget(DIRECT, workers)]
        for command in bench.routers:
            server = servers.router(command, workers, Server.routes, bench.router_cores)
            targets.append(MeasuredTarget(command.name, (server.url, ), server))
            show(f"{command.name}: pid {server.child.pid}, {' '.join(command.arguments(server.port, ['...']))}")
        if bench.load_cores:
            os.sched_setaffinity(0, bench.load_cores)
        gc.collect()
        gc.disable()
        try:
            found = uvloop.run(_RouterPhases(bench, targets, show).run())
        finally:
            gc.enable()
            os.sched_setaffinity(0, before)
        memory = {target.name: used for target in targets if target.server and (used := _memory(target.server))}
    return report(bench, found, memory)


def _memory(server: Server) -> int:
    """Resident bytes; 0 where it has ended."""
    try:
        return server.memory_bytes()
    except psutil.Error:
        return 0


class _RouterPhases:
    """The phases of one measurement, all in one event loop."""

    def __init__(self, bench: RouterBench, targets: Sequence[MeasuredTarget], show: ShowLine) -> None:
        self._bench, self._targets, self._show = bench, targets, show
        self._draw = random.Random(bench.seed)
        self._kinds = {kind: RequestShape(bench.tokens, bench.prompt_tokens, stream=kind == "stream")
                       for kind in ("plain", "stream")}
        self._bodies = {kind: shape.bodies(self._draw) for kind, shape in self._kinds.items()}

    async def run(self) -> list[PhaseFigures]:
        """All phases, one after another."""
        bench, found = self._bench, []
        for kind in self._kinds:
            found += await self._alone(kind)
        await self._set_delays(DummyDelays(bench.first_s, bench.gap_s))
        found += await self._slices("paced", "stream", bench.streams, bench.first_s + bench.gap_s * bench.tokens)
        await self._set_delays(DummyDelays())
        for kind in self._kinds:
            found += await self._slices("busy", kind, bench.clients)
        return found

    def _shuffled(self) -> list[MeasuredTarget]:
        return self._draw.sample(self._targets, len(self._targets))

    async def _send(self, kind: str, connection: LoadConnection, name: str) -> RequestTiming:
        return await self._kinds[kind].send(connection, next(self._bodies[kind]), name)

    async def _alone(self, kind: str) -> list[PhaseFigures]:
        """Phase 1 of the module for one kind of requests. Each target has one connection, the bare workers' to the
        first of them; it is made again after an error. A tenth as many requests, 10 at the least, are sent before that
        as a warm-up and not timed."""
        found = {target.name: PhaseFigures(target.name, "alone", kind) for target in self._targets}
        connections: dict[str, LoadConnection] = {}
        warm_up = max(10, self._bench.requests // 10)
        for number in range(-warm_up, self._bench.requests):
            for target in self._shuffled():
                try:
                    if target.name not in connections:
                        connections[target.name] = await LoadConnection.open(target.urls[0])
                    timing = await self._send(kind, connections[target.name], f"alone-{number}")
                    if number >= 0:
                        found[target.name].timings.append(timing)
                except (LoadError, OSError) as error:
                    found[target.name].errors.append(str(error))
                    if target.name in connections:
                        connections.pop(target.name).close()
        for connection in connections.values():
            connection.close()
        self._show(f"alone, {kind}: done")
        return list(found.values())

    async def _slices(self, phase: str, kind: str, clients: int, pause_s: float = 0.0) -> list[PhaseFigures]:
        """Phases 2 and 3 of the module for one kind of requests: slices of a closed loop of `clients`. Before each
        request a client pauses for up to `pause_s`. The first round, of shorter slices, warms up and is not timed."""
        found = {target.name: PhaseFigures(target.name, phase, kind) for target in self._targets}
        for number in range(-1, self._bench.rounds):  # the first one warms up
            for target in self._shuffled():
                for_s = self._bench.slice_s if number >= 0 else self._bench.slice_s / 4
                try:
                    before_s = target.cpu_s()
                    done = await closed_loop(target.urls, lambda *sent: self._send(kind, *sent), clients, for_s,
                                             pause_s, self._draw)
                    found[target.name].errors += done.errors
                    if number >= 0:
                        found[target.name].add(done, target.cpu_s() - before_s)
                except (OSError, psutil.Error) as error:  # the router has ended
                    found[target.name].errors.append(str(error))
        self._show(f"{phase}, {kind}: done")
        return list(found.values())

    async def _set_delays(self, delays: DummyDelays) -> None:
        for url in self._targets[0].urls:
            with await LoadConnection.open(url) as connection:
                (await connection.exchange("POST", "/dummy", msgspec.json.encode(delays))).required()


def report(bench: RouterBench, found: Sequence[PhaseFigures], memory: dict[str, int]) -> dict[str, Any]:
    """One entry for each target, phase and kind; times in milliseconds. `added_grid_ms` are evenly spaced quantiles
    of what is added until the end of the answer, for the picture."""
    bare = {(figures.phase, figures.kind): figures for figures in found if figures.target == DIRECT}
    routers = [{"name": router.name, "command": router.shown()} for router in bench.routers]
    return {"settings": {**asdict(bench), "routers": routers},
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": memory,
            "entries": [_entry(figures, bare[figures.phase, figures.kind]) for figures in found]}


def _entry(figures: PhaseFigures, bare: PhaseFigures) -> dict[str, Any]:
    """One entry of the report. `bare`: the bare workers' figures of the same phase and kind, whose median is subtracted
    to get what is added. Only counts where either has no timings."""
    found: dict[str, Any] = {"router": figures.target, "phase": figures.phase, "kind": figures.kind,
                             "requests": len(figures.timings), "errors": len(figures.errors),
                             "first_errors": figures.errors[:SHOWN_ERRORS]}
    if not figures.timings or not bare.timings:
        return found
    for key in ("total", "first"):
        times_s, bare_s = ([getattr(timing, f"{key}_s") for timing in each.timings] for each in (figures, bare))
        bare_median_s = statistics.median(bare_s)
        added_s = [time_s - bare_median_s for time_s in times_s]
        found[f"{key}_ms"] = summary(times_s, FIGURES, MS)
        found[f"{key}_added_ms"] = summary(added_s, FIGURES, MS)
        if key == "total":
            found["added_grid_ms"] = quantile_grid(added_s, GRID, MS)
    if figures.rates:
        found["requests_per_s"] = {"median": statistics.median(figures.rates), "min": min(figures.rates),
                                   "max": max(figures.rates)}
        found["router_cpu_ms_per_request"] = MS * figures.cpu_s / len(figures.timings)
    return found
