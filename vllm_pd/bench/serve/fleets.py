# SPDX-License-Identifier: Apache-2.0
"""The processes of an arm, started and ended."""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from vllm_pd.bench.serve.arms import ArmPlan
from vllm_pd.bench.serve.drive import EntryPoint
from vllm_pd.bench.servers import Server, Servers, cpu_s
from vllm_pd.errors import PDError
from vllm_pd.ops.launch.plan import EnginePlan, starting_at_once
from vllm_pd.ops.launch.printer import Say
from vllm_pd.ops.launch.up import Fleet

STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class RunningArm:
    """An arm that is ready. `entries`: where requests go, in turn. `behind`: the engines that a router at `entries`
    chooses from. `pids`: of its engines, where they are ours. `engines`: those that hand over prefills to each
    other."""
    entries: tuple[EntryPoint, ...]
    behind: tuple[EntryPoint, ...] = ()
    pids: tuple[int, ...] = ()
    engines: tuple[EnginePlan, ...] = ()

    def cpu_s(self) -> float:
        """CPU seconds that the engines have used. Raises PDError where one has ended."""
        try:
            return sum(map(cpu_s, self.pids))
        except psutil.NoSuchProcess as gone:
            raise PDError(f"an engine has ended in the middle of the load (process {gone.pid})") from None


@contextlib.contextmanager
def running(plan: ArmPlan, say: Say, timeout_s: float) -> Iterator[RunningArm]:
    """Inside the `with` block the arm is ready, after it every process has ended. Raises PDError where it does not
    start, with the last lines of what failed."""
    if plan.fleet is not None:
        with Fleet(plan.fleet, timeout_s=timeout_s, stop_timeout_s=STOP_TIMEOUT_S, say=say) as fleet:
            state = fleet.state()
            decoding = tuple(EntryPoint(engine.url) for engine in plan.engines if engine.role.decodes)
            entries, behind = entry_points(plan.engines) if plan.prefill_first else decoding, ()
            if "router" in state:
                entries, behind = (EntryPoint(state["router"]["url"]), ), decoding
            yield RunningArm(entries, behind, tuple(engine["pid"] for engine in state["engines"]), plan.engines)
        return
    with Servers(say, STOP_TIMEOUT_S) as servers:
        started = _start(servers, plan, timeout_s)
        urls = tuple(engine.url for engine in started)
        entries, behind = entry_points(plan.engines), ()
        if plan.router is not None:
            router = servers.router(plan.router, urls, lambda router: router.knows(len(urls), plan.policy),
                                    port=plan.router_port)
            entries, behind = (EntryPoint(router.url), ), tuple(map(EntryPoint, urls))
        yield RunningArm(entries, behind, tuple(engine.child.pid for engine in started))


def entry_points(engines: Sequence[EnginePlan]) -> tuple[EntryPoint, ...]:
    """Where requests go, in turn: each engine that decodes. With engines that only prefill: each pair of a decode and a
    prefill engine."""
    decode, prefill = ([engine.url for engine in engines if engine.role.decodes is decodes]
                       for decodes in (True, False))
    pairs = zip(itertools.cycle(decode), itertools.cycle(prefill or [""]),
                range(math.lcm(len(decode), len(prefill) or 1)), strict=False)
    return tuple(EntryPoint(url, first) for url, first, _ in pairs)


def _start(servers: Servers, plan: ArmPlan, timeout_s: float) -> list[Server]:
    """Starts the engines, a few at a time because starting needs mostly the CPU, and waits until all are healthy."""
    started: list[Server] = []
    starting: deque[Server] = deque()

    def start(engine: EnginePlan) -> None:
        server = servers.start(engine.name, engine.port, engine.command, env=engine.env, cores=engine.cores)
        started.append(server)
        starting.append(server)

    at_once = starting_at_once(plan.engines)
    for engine in plan.engines:
        if len(starting) == at_once:
            servers.await_ready(starting.popleft(), timeout_s=timeout_s)
        start(engine)
    while starting:
        servers.await_ready(starting.popleft(), timeout_s=timeout_s)
    return started
