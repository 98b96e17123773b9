# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd planner`: how many prefill and decode engines a fleet wants, as metrics, and engines that change their role.

Each interval it reads the registry and all engines, decides (`vllm_pd.decisions.wanted`), says so in one line, and with
`--flip` orders at most one engine that was started as `kv_both` to act in the other role, as `vllm-pd role` does. It
keeps nothing: a planner that is started again begins with the next reading.

Two planners do not work against each other: one that sees an engine with another role than in its last reading, or is
refused, changes none for a cool-down, and so does one that has just begun. Right before an order it reads the registry
again, and gives no order where any role has changed since.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping

import prometheus_client

from vllm_pd.broker.members import Access, list_members
from vllm_pd.decisions.wanted import WantedDecision, WantedEngines, WantedRole, WantedRules
from vllm_pd.errors import ControlError
from vllm_pd.ops.options import PlannerOptions
from vllm_pd.ops.orders import EngineAddress, Operator
from vllm_pd.ops.pages import api_key, authorization
from vllm_pd.ops.planner_readings import WANTED, choose, read_roles
from vllm_pd.ops.printing import printable
from vllm_pd.ops.top import FleetReading
from vllm_pd.ops.top_readings import REGISTRY_S, FleetReader
from vllm_pd.protocol.messages import Member, Role, SetRole
from vllm_pd.rpc.ports import require_free

logger = logging.getLogger("vllm.pd.planner")

ORDER_S = 5.0
MOST_COOL_DOWNS = 64  # between two orders to an engine that refuses each
ROLE_LABELS = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


class PlannerMetrics:
    """The figures of a planner. docs/operations.md describes each; a test compares the two."""

    def __init__(self) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()
        self.wanted = prometheus_client.Gauge("vllm:pd_wanted_engines", "Engines that the fleet wants, by role.",
                                              ["role"], registry=registry)
        self.present = prometheus_client.Gauge("vllm:pd_present_engines", "Engines that act in the role and don't "
                                               "drain.", ["role"], registry=registry)
        self.unread = prometheus_client.Gauge("vllm:pd_unread_engines", "Of these, those that could not be read.",
                                              ["role"], registry=registry)
        self.pressure = prometheus_client.Gauge("vllm:pd_planner_pressure", "What the work of the role needs, over "
                                                "what its engines have.", ["role"], registry=registry)
        self.decided = prometheus_client.Gauge("vllm:pd_planner_decided_seconds", "When the planner last decided, in "
                                               "seconds since 1970.", registry=registry)
        self.flips = prometheus_client.Counter("vllm:pd_planner_flips_total", "Changes of role that were ordered.",
                                               ["to", "outcome"], registry=registry)
        for label in ROLE_LABELS.values():
            for outcome in ("done", "failed"):
                self.flips.labels(label, outcome)

    def decide(self, decision: WantedDecision) -> None:
        """Show a decision."""
        for label, role in (("prefill", decision.prefill), ("decode", decision.decode)):
            self.wanted.labels(label).set(role.wanted)
            self.present.labels(label).set(role.present)
            self.unread.labels(label).set(role.unread)
            self.pressure.labels(label).set(role.pressure)
        self.decided.set_to_current_time()


class Planner:
    """The decisions of one planner, a reading after the other. `order` has an engine change its role, and `roles` reads
    the registry again; both may block for seconds, and raise ControlError. Without `order` it is a dry run. Times are
    seconds of `clock`."""

    def __init__(self, rules: WantedRules, metrics: PlannerMetrics, roles: Callable[[], Mapping[str, Role]],
                 order: Callable[[Member, Role], None] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules, self._metrics = rules, metrics
        self._read_roles, self._order = roles, order
        self._clock = clock
        self._rule = WantedEngines(rules, clock())
        self._before: FleetReading | None = None
        self._roles: dict[str, Role] = {}
        self._refused: dict[str, tuple[int, float]] = {}  # how often an engine has, and until when it is left alone

    def plan(self, reading: FleetReading) -> str:
        """Decide by a reading, and act. Returns the line about it. A broker that does not answer decides nothing."""
        if reading.fault:
            return f"no decision: {reading.fault}"
        before, self._before = self._before, reading
        now = self._clock()
        self._see_roles(now, reading)
        decision = self._rule.decide(now, *read_roles(before, reading))
        self._metrics.decide(decision)
        line = f"prefill: {_describe(decision.prefill)}; decode: {_describe(decision.decode)}"
        return line if decision.flip_to is None else f"{line}; {self._flip(before, reading, decision.flip_to)}"

    def _see_roles(self, now: float, reading: FleetReading) -> None:
        """Another planner, or an operator, may have changed roles."""
        roles = _roles(one.member for one in reading.engines)
        if any(self._roles.get(name, role) is not role for name, role in roles.items()):
            self._rule.role_changed(now)
        self._roles = roles
        self._refused = {name: since for name, since in self._refused.items() if name in roles}

    def _flip(self, before: FleetReading | None, reading: FleetReading, to: Role) -> str:
        now = self._clock()
        avoided = {name for name, (_, until_s) in self._refused.items() if now < until_s}
        member = choose(before, reading, to, avoided)
        if member is None:
            return f"no engine may change to {to.value}"
        change = f"{member.incarnation[:12]} at {member.address} from {member.role.value} to {to.value}"
        if self._order is None:
            self._rule.role_changed(now)
            return f"would flip {change}"
        try:
            if self._read_roles() != self._roles:
                self._rule.role_changed(self._clock())
                return f"not flipped: {change}: roles have changed since the reading"
            self._order(member, to)
        except ControlError as error:
            self._rule.role_changed(self._clock())
            times = self._refused.get(member.incarnation, (0, 0.0))[0] + 1
            self._refused[member.incarnation] = times, self._clock() + self._rules.cool_down_s * min(
                MOST_COOL_DOWNS, 2 ** times)
            self._metrics.flips.labels(ROLE_LABELS[to], "failed").inc()
            return f"not flipped: {change}: {error}"
        self._rule.role_changed(self._clock())
        self._refused.pop(member.incarnation, None)
        self._roles[member.incarnation] = to
        self._metrics.flips.labels(ROLE_LABELS[to], "done").inc()
        return f"flipped {change}"


def _describe(role: WantedRole) -> str:
    unread = f", {role.unread} not read" if role.unread else ""
    return f"{role.present} of {role.wanted} wanted, pressure {role.pressure:.2f} by {role.sign.value}{unread}"


def _roles(members: Iterable[Member]) -> dict[str, Role]:
    return {member.incarnation: member.role for member in members}


def run_planner(broker: str, access: Access, options: PlannerOptions) -> None:
    """Plan until SIGINT or SIGTERM. Raises ConfigError for an option that can't be used or a port in use, ControlError
    where no broker answers at the beginning."""
    options = options.checked()
    headers = authorization(api_key("--api-key", options.api_key))
    require_free("--port", options.host, [options.port])
    list_members(broker, REGISTRY_S, access)  # what is wrong with the options, or the broker, is said at once
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def order(member: Member, role: Role) -> None:
        with Operator(EngineAddress(member.address, member.incarnation), access) as operator:
            operator.tell(SetRole(role), ORDER_S)

    def roles() -> dict[str, Role]:
        return _roles(list_members(broker, REGISTRY_S, access).members)

    metrics = PlannerMetrics()
    rules = WantedRules(ttft_s=options.ttft_target_ms / 1e3, itl_s=options.itl_target_ms / 1e3,
                        cool_down_s=options.cool_down_s, lower_after_s=options.lower_after_s)
    prometheus_client.start_http_server(options.port, options.host, metrics.registry)  # its thread ends with us
    asyncio.run(_plan(Planner(rules, metrics, roles, order if options.flip else None),
                      FleetReader(broker, access, headers, WANTED), options.interval_s))


async def _plan(planner: Planner, reader: FleetReader, interval_s: float) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    while not ended.is_set():
        began_s = time.monotonic()
        reading = await reader.read()
        if ended.is_set():
            return
        logger.info("%s", printable(await asyncio.to_thread(planner.plan, reading)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), max(0.0, began_s + interval_s - time.monotonic()))
