# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd planner`: how many prefill and decode engines a fleet wants.

It reads the engines as `vllm-pd top` does, and changes nothing. What it says is on its own /metrics, and one line of
its output for each decision that differs from the one before. An engine that does not answer, or says nonsense, is left
out of that look.
"""
from __future__ import annotations

import asyncio
from collections.abc import Callable

import prometheus_client
import typer

from vllm_pd.broker.members import Access, list_members
from vllm_pd.decisions.demand import Demand, DemandMeter, Targets
from vllm_pd.decisions.wanted import WantedBounds, WantedCounter, WantedEngines
from vllm_pd.ops.fleet_looks import WANTED, look_at
from vllm_pd.ops.options import PlannerOptions
from vllm_pd.ops.printing import printable, three_digits
from vllm_pd.ops.top import FleetReading
from vllm_pd.ops.top_readings import REGISTRY_S, FleetReader
from vllm_pd.rpc.ports import require_free


class PlannerFamilies:
    """The figures on /metrics of a planner, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()

        def gauge(name: str, text: str) -> prometheus_client.Gauge:
            return prometheus_client.Gauge(name, text, ["role"], registry=registry)

        self.wanted = gauge("vllm:pd_wanted_engines", "How many engines of each role the fleet wants.")
        self.offered = gauge("vllm:pd_offered_engines", "The work that comes, in engines that would always be busy.")
        self.looks = prometheus_client.Counter("vllm:pd_planner_looks", "Looks at the fleet: done, or nothing to see.",
                                               ["outcome"], registry=registry)
        for outcome in ("done", "nothing"):
            self.looks.labels(outcome)


class FleetPlanner:
    """Turns readings into decisions and figures. Owned by one caller; no I/O."""

    def __init__(self, options: PlannerOptions, families: PlannerFamilies, say: Callable[[str], None]) -> None:
        self._families, self._say = families, say
        self._targets = Targets(options.ttft_ms / 1e3, options.itl_ms / 1e3)
        self._meter = DemandMeter(self._targets)
        self._counter = WantedCounter(self._targets, WantedBounds(options.use, options.hold_s, 1, options.most))
        self._before: FleetReading | None = None
        self._said: WantedEngines | None = None

    def receive(self, reading: FleetReading) -> bool:
        """Whether there was anything to decide about. Raises nothing for what engines say."""
        before, self._before = self._before or reading, reading
        demand = self._meter.receive(look_at(before, reading, self._targets))
        seen = demand is not None and any(one.figures is not None for one in reading.engines)
        self._families.looks.labels("done" if seen else "nothing").inc()
        if seen:
            self._decide(demand)
        return seen

    def _decide(self, demand: Demand) -> None:
        wanted = self._counter.receive(demand)
        prefill, decode = demand.prefill_engines(), demand.decode_engines(self._targets.itl_s)
        for family, prefills, decodes in ((self._families.wanted, wanted.prefills, wanted.decodes),
                                          (self._families.offered, prefill, decode)):
            family.labels("prefill").set(prefills)
            family.labels("decode").set(decodes)
        if wanted != self._said:
            self._said = wanted
            self._say(describe(demand, wanted, self._targets))


def describe(demand: Demand, wanted: WantedEngines, targets: Targets) -> str:
    """A decision and its reason on one line."""
    return (f"wanted: {wanted.prefills} prefill, {wanted.decodes} decode; "
            f"{three_digits(demand.requests_per_s)} requests/s are the work of {three_digits(demand.prefill_engines())}"
            f" prefill and {three_digits(demand.decode_engines(targets.itl_s))} decode engines, "
            f"{demand.late:.0%} late, {demand.waiting:.0f} wait")


def plan_fleet(broker: str, access: Access, options: PlannerOptions) -> None:
    """Until Ctrl-C, or once. Raises ConfigError for what can't be used, and ControlError where the first question finds
    no broker."""
    options = options.checked()
    list_members(broker, REGISTRY_S, access)  # what is wrong with the options, or the broker, is said at once
    families = PlannerFamilies()
    if not options.once:
        require_free("--port", options.host, [options.port])
        prometheus_client.start_http_server(options.port, options.host, families.registry)
    asyncio.run(_plan(FleetReader(broker, access, {}, WANTED), FleetPlanner(options, families, _print), options))


async def _plan(reader: FleetReader, planner: FleetPlanner, options: PlannerOptions) -> None:
    while True:
        decided = planner.receive(await reader.read())
        if options.once and decided:
            return
        await asyncio.sleep(options.interval_s)


def _print(text: str) -> None:
    typer.echo(printable(text))
