# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd planner`: how many prefill and decode engines a fleet wants, and how those that it has are best divided.
With --flip it has engines change their role.

It reads the engines as `vllm-pd top` does. What it says is on its own /metrics, and one line of its output for each
decision that differs from the one before. An engine that does not answer, or says nonsense, is left out of that look.
It keeps nothing: one that is started again begins with the next reading.
"""
from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping

import prometheus_client
import typer

from vllm_pd.broker.members import Access, list_members
from vllm_pd.decisions.demand import Demand, DemandMeter, FleetLook, Targets
from vllm_pd.decisions.splits import SplitChoice, SplitPlanner
from vllm_pd.decisions.wanted import WantedBounds, WantedCounter, WantedEngines
from vllm_pd.ops.fleet_looks import WANTED, look_at
from vllm_pd.ops.flip_orders import FlipOrders, OrderResult
from vllm_pd.ops.flips import ROLE_WORDS, Flip, FlipBook, FlipBounds, FlipEvent, FlipOutcome, roles_of, serving
from vllm_pd.ops.options import PlannerOptions
from vllm_pd.ops.printing import printable, three_digits
from vllm_pd.ops.top import FleetReading
from vllm_pd.ops.top_readings import REGISTRY_S, FleetReader
from vllm_pd.protocol.messages import Member, Role, StatusReply
from vllm_pd.rpc.ports import require_free

ORDERS_S = 5.0  # after which no further order of a look is given
KEPT_SHAPES = 4  # numbers of engines whose `SplitPlanner` is kept


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
        self.split = gauge("vllm:pd_split_engines", "How the engines that are there are best divided.")
        self.flips = prometheus_client.Counter("vllm:pd_planner_flips", "Changes of role, by what came of them.",
                                               ["to", "outcome"], registry=registry)
        for to in ROLE_WORDS.values():
            for outcome in FlipOutcome:
                self.flips.labels(to, outcome.value)


class FleetPlanner:
    """Turns readings into decisions and figures. Owned by one caller; no I/O. Times are seconds of `clock`."""

    def __init__(self, options: PlannerOptions, families: PlannerFamilies, say: Callable[[str], None],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._families, self._say = families, say
        self._targets = Targets(options.ttft_ms / 1e3, options.itl_ms / 1e3)
        self._meter = DemandMeter(self._targets)
        self._counter = WantedCounter(self._targets, WantedBounds(options.use, options.hold_s, 1, options.most))
        self._divider = FleetDivider(options, self._targets, families, say, clock)
        self._before: FleetReading | None = None
        self._said: WantedEngines | None = None

    def to_ask(self, reading: FleetReading) -> list[Member]:
        """Whose status `receive` needs beside the next reading."""
        return self._divider.to_ask(reading)

    def receive(self, reading: FleetReading, statuses: Mapping[str, StatusReply] | None = None) -> bool:
        """Whether there was anything to decide about. `statuses`: by incarnation, see `to_ask`. Raises nothing for what
        engines say."""
        before, self._before = self._before or reading, reading
        look = look_at(before, reading, self._targets)
        demand = self._meter.receive(look)
        self._divider.see(reading, statuses or {})
        seen = demand is not None and any(one.figures is not None for one in reading.engines)
        self._families.looks.labels("done" if seen else "nothing").inc()
        if seen:
            self._decide(demand)
            self._divider.divide(reading, look, demand)
        return seen

    def take_flips(self) -> list[Flip]:
        """The flips that are to be ordered now, once; `ordered` then says what came of each order, until one fails.
        None in a dry run."""
        return self._divider.take_flips()

    def ordered(self, flip: Flip, result: OrderResult) -> None:
        """What came of the order."""
        self._divider.ordered(flip, result)

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


class FleetDivider:
    """Divides the engines that are there between the roles, for a `FleetPlanner`."""

    def __init__(self, options: PlannerOptions, targets: Targets, families: PlannerFamilies,
                 say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._options, self._targets = options, targets
        self._families, self._say, self._clock = families, say, clock
        self._bounds = FlipBounds(options.cool_down_s, options.flips_per_hour, options.at_once)
        self._book = FlipBook(self._bounds, clock())
        self._splitter: SplitPlanner | None = None
        self._shape: tuple[int, int, int] | None = None  # of the engines: their count and the least numbers
        self._shape_since = -math.inf
        self._splitters: dict[tuple[int, int, int], SplitPlanner] = {}  # the last used one last
        self._flips: list[Flip] = []
        self._said: tuple[object, ...] = ()

    def to_ask(self, reading: FleetReading) -> list[Member]:
        """See `FlipBook.to_ask`."""
        return self._book.to_ask(self._clock(), reading)

    def see(self, reading: FleetReading, statuses: Mapping[str, StatusReply]) -> None:
        """What changes of role have come to an end."""
        for event in self._book.receive(self._clock(), reading, statuses):
            self._note(event)

    def divide(self, reading: FleetReading, look: FleetLook, demand: Demand) -> None:
        """Decide how the engines are best divided, and which of them are to change."""
        count, present = len(serving(reading)), self._book.prefills(reading)
        self._follow(count, present, self._book.fixed(reading))
        self._flips = []
        choice = self._choose(look, demand, count, present)
        if choice is None:
            return
        self._families.split.labels("prefill").set(choice.prefills)
        self._families.split.labels("decode").set(count - choice.prefills)
        found = self._book.choose(self._clock(), reading, choice.prefills)
        flips = [] if isinstance(found, str) else found
        self._flips = flips if self._options.flip else []
        said = count, present, choice.prefills, len(flips) or found
        if said != self._said:
            self._said = said
            self._say(describe_split(choice, count, present, found, self._options.flip))

    def _choose(self, look: FleetLook, demand: Demand, count: int, present: int) -> SplitChoice | None:
        """None where nothing is said."""
        if count and present == count:
            return SplitChoice(count - 1, "no engine decodes")
        if self._splitter is None:
            return None
        return self._splitter.receive(look, demand, self._in_bounds(present))

    def _follow(self, count: int, present: int, fixed: tuple[int, int]) -> None:
        """The `SplitPlanner` of the engines that are there, of which `fixed` (prefill, decode) can't change; none where
        these can't be divided in another way, or for a cool-down after their number has changed: an engine that is
        paused for a while, or ends again and again, is not to end what is known."""
        shape = count, max(1, fixed[0]), max(1, fixed[1])
        now = self._clock()
        if shape != self._shape:
            self._shape, self._shape_since = shape, now if self._splitters else -math.inf
            self._splitter, self._said = None, ()
            self._families.split.clear()
        if self._splitter is None and sum(fixed) < count and now - self._shape_since >= self._options.cool_down_s:
            self._splitter = self._splitters.pop(shape, None) or self._made(shape, present)
            if self._splitter is not None:
                self._splitters[shape] = self._splitter
                if len(self._splitters) > KEPT_SHAPES:
                    self._splitters.pop(next(iter(self._splitters)))

    def _made(self, shape: tuple[int, int, int], present: int) -> SplitPlanner | None:
        try:
            return SplitPlanner(shape[0], self._in_bounds(present), self._targets, self._options.cool_down_s,
                                self._bounds.most_at_once(shape[0]), least_prefills=shape[1], least_decodes=shape[2])
        except ValueError as error:
            if self._said != (str(error), ):
                self._said = (str(error), )
                self._say(f"no split: {error}")
            return None

    def _in_bounds(self, prefills: int) -> int:
        """Engines that act as `kv_both` count as decode engines, so there may be fewer that prefill than must be."""
        count, least, least_decodes = self._shape
        return min(max(prefills, least), max(least, count - least_decodes))

    def take_flips(self) -> list[Flip]:
        """See `FleetPlanner.take_flips`."""
        flips, self._flips = self._flips, []
        return flips

    def ordered(self, flip: Flip, result: OrderResult) -> None:
        """See `FleetPlanner.ordered`."""
        if result.given:
            self._book.ordered(self._clock(), flip, result.problem)
            if result.problem:
                self._say(f"{flip}: {result.problem}")
        else:
            self._book.skipped(self._clock())
            self._note(FlipEvent(flip, FlipOutcome.SKIPPED, result.problem))

    def _note(self, event: FlipEvent) -> None:
        self._families.flips.labels(ROLE_WORDS[event.flip.to], event.outcome.value).inc()
        self._say(f"flip {event.outcome.value}: {event.flip}: {event.text}")


def describe_split(choice: SplitChoice, count: int, present: int, found: list[Flip] | str, flips: bool) -> str:
    """A split, its reason, and what is done for it, on one line. `found`: the flips, or why there is none."""
    parts = [f"split: {choice.prefills} prefill, {count - choice.prefills} decode of {count} engines",
             "as now" if choice.prefills == present else f"now {present} and {count - present}", choice.reason]
    if not isinstance(found, str):
        parts.append(f"{'flips' if flips else 'would flip'} {' and '.join(map(str, found))}")
    elif found:
        parts.append(f"no flip: {found}")
    return "; ".join(parts)


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
    asyncio.run(_plan(FleetReader(broker, access, {}, WANTED), FleetPlanner(options, families, _print),
                      FlipOrders(broker, access), options))


async def _plan(reader: FleetReader, planner: FleetPlanner, orders: FlipOrders, options: PlannerOptions) -> None:
    statuses: dict[str, StatusReply] = {}
    while True:
        reading = await reader.read()
        decided = await asyncio.to_thread(planner.receive, reading, statuses)  # of many engines it takes seconds
        if options.once and decided:
            return
        await _order(planner, orders, roles_of(one.member for one in reading.engines))
        statuses = orders.poll(planner.to_ask(reading))
        await asyncio.sleep(options.interval_s)


async def _order(planner: FleetPlanner, orders: FlipOrders, seen: dict[str, tuple[Role, bool]]) -> None:
    """Give the orders one after the other, until one is not carried out or what was read is too old. The others are
    decided anew."""
    until_s = time.monotonic() + ORDERS_S
    for flip in planner.take_flips():
        if time.monotonic() >= until_s:
            return
        result = await orders.order(flip, seen)
        planner.ordered(flip, result)
        if not result.given or result.problem:
            return
        seen = {**seen, flip.member.incarnation: (flip.to, False)}


def _print(text: str) -> None:
    typer.echo(printable(text))
