# SPDX-License-Identifier: Apache-2.0
"""Which engines may change their role now, for `vllm-pd planner --flip`, and when such a change is over. Pure.

Life of a flip: `FlipBook.choose` names engines and their new role; the caller gives orders and says what came of each
(`ordered`). A flip is then open until the registry has the engine in the new role and nothing of the old role is open
at the engine, or until it has failed. A limited number is open at a time, all to the same role. None is begun in the
cool-down after any change of a role, also one that an operator or another planner has made.

An engine can change if it was started as `kv_both`. It says so itself (`changes_role` in its status), so each is asked
once. One that acts as `kv_both` has clients: it counts as a decode engine, and is the first to become a prefill engine.
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from vllm_pd.ops.scrape import MetricsSnapshot
from vllm_pd.ops.top import FleetReading, MemberReading, degraded_reason
from vllm_pd.peer.degraded import DegradedReason
from vllm_pd.protocol.messages import Member, Role, StatusReply

HOUR_S = 3600.0
LATE_S = 300.0
MOST_COOL_DOWNS = 64  # that an engine is left alone which fails to change again and again
ASKED_AT_ONCE = 16
ASK_AGAIN_S = 10.0  # an engine that has not answered
CHANGES_ROLE = "changes_role"  # the gauge of `EngineState`
ROLE_WORDS = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


class FlipBounds(msgspec.Struct, frozen=True):
    """No flip for `cool_down_s` after any change of a role, at most `per_hour`, and `at_once` of them open; 0: half of
    the engines. One that is open for `late_s` is said to be late, and holds up no others any more."""
    cool_down_s: float = 30.0
    per_hour: int = 240
    at_once: int = 0
    late_s: float = LATE_S

    def most_at_once(self, engines: int) -> int:
        """How many of so many may change at a time."""
        return self.at_once or max(1, engines // 2)


class Flip(msgspec.Struct, frozen=True):
    """This engine, as the registry has it, is to act as `to`: PREFILL or DECODE."""
    member: Member
    to: Role

    def __str__(self) -> str:
        return (f"{self.member.incarnation[:12]} at {self.member.http or self.member.address} from "
                f"{self.member.role.value} to {self.to.value}")


class FlipOutcome(StrEnum):
    """What has come of a flip. Each has one, and one that is LATE another one later."""
    DONE = "done"
    SKIPPED = "skipped"  # not ordered: the registry had changed
    FAILED = "failed"  # the engine refused, or does not show the new role
    LOST = "lost"  # the engine has left, or somebody else has changed its role
    LATE = "late"  # something of the old role is still open


class FlipEvent(NamedTuple):
    """For the log and the counters."""
    flip: Flip
    outcome: FlipOutcome
    text: str


class _OpenFlip:
    """A flip that was ordered at `at_s`. `problem`: why the order may not have been carried out. `shown`: the registry
    has had the new role."""

    def __init__(self, flip: Flip, at_s: float, problem: str) -> None:
        self.flip, self.at_s, self.problem = flip, at_s, problem
        self.shown = self.late = False
        self.drains_since: float | None = None  # a prefill engine that is paused or hangs is listed so for a while


def acts_as(member: Member) -> Role:
    """The role that counts: DECODE for one that has clients."""
    return Role.DECODE if member.role.decodes else Role.PREFILL


def roles_of(members: Iterable[Member]) -> dict[str, tuple[Role, bool]]:
    """By incarnation: the role, and whether it drains."""
    return {member.incarnation: (member.role, member.draining) for member in members}


def serving(reading: FleetReading) -> list[MemberReading]:
    """The engines that do not drain."""
    return [one for one in reading.engines if not one.member.draining]


def is_over(status: StatusReply, to: Role) -> bool:
    """Whether the engine acts as `to` and has nothing open of its other role: no request of a client; or no job, but
    those whose writes are unproven, which last as long as their decode engine. An engine of an older release does not
    say which of its requests are clients'."""
    gauges = status.gauges
    if to is Role.DECODE:
        left = gauges.get("prefill_jobs", 0) - gauges.get("unproven_jobs", 0)
    else:
        left = gauges.get("clients", gauges.get("running", 0) + gauges.get("waiting", 0))
    return status.member.role is to and left <= 0


class FlipBook:
    """What is known of the engines and of their changes. Owned by one caller; times are seconds of one clock. One that
    has just begun knows no changes before it, so it waits for a cool-down."""

    def __init__(self, bounds: FlipBounds, now_s: float) -> None:
        self._bounds = bounds
        self._quiet_until_s = now_s + bounds.cool_down_s
        self._roles: dict[str, Role] = {}
        self._can_change: dict[str, bool] = {}
        self._asked: dict[str, float] = {}  # when each was asked last
        self._failed: dict[str, tuple[int, float]] = {}  # how often in a row, and until when it is left alone
        self._orders: deque[float] = deque(maxlen=bounds.per_hour)
        self._open: dict[str, _OpenFlip] = {}  # by incarnation

    def to_ask(self, now_s: float, reading: FleetReading) -> list[Member]:
        """Whose status `receive` needs at the next reading: the engines that change, once the registry shows their new
        role, and those of which it is not known whether they can change."""
        changing = sorted((one.member for one in reading.engines
                           if self._changes(one.member) and self._open[one.member.incarnation].shown),
                          key=lambda member: self._asked.get(member.incarnation, -math.inf))[:ASKED_AT_ONCE]
        unknown = [one.member for one in serving(reading) if one.member.incarnation not in self._can_change
                   and now_s >= self._asked.get(one.member.incarnation, -math.inf) + ASK_AGAIN_S][:ASKED_AT_ONCE]
        self._asked |= {member.incarnation: now_s for member in changing + unknown}
        return changing + unknown

    def receive(self, now_s: float, reading: FleetReading, statuses: Mapping[str, StatusReply]) -> list[FlipEvent]:
        """Learn from a reading, and from the statuses that have come since the last one. Returns what has become of
        open flips."""
        if reading.fault:
            return []
        self._see_changes(now_s, reading)
        for one in reading.engines:
            self._see_whether_it_can_change(one, statuses.get(one.member.incarnation))
        members = {one.member.incarnation: one.member for one in reading.engines}
        return [event for name, flip in list(self._open.items())
                for event in self._see_open(now_s, flip, members.get(name), statuses.get(name))]

    def fixed(self, reading: FleetReading) -> tuple[int, int]:
        """How many (prefill, decode) engines can't change, as far as is known."""
        found = [acts_as(one.member) for one in serving(reading) if not self._may_change(one.member)]
        return found.count(Role.PREFILL), found.count(Role.DECODE)

    def prefills(self, reading: FleetReading) -> int:
        """How many engines prefill; those that change count at their new role."""
        return sum(self._will_act_as(one.member) is Role.PREFILL for one in serving(reading))

    def choose(self, now_s: float, reading: FleetReading, wanted: int) -> list[Flip] | str:
        """The flips that bring the number of prefill engines nearer to `wanted`, at least one; else why there is none,
        empty where none is needed."""
        present = self.prefills(reading)
        if wanted == present:
            return ""
        to = Role.PREFILL if wanted > present else Role.DECODE
        engines = serving(reading)
        if why := self._why_none(now_s, reading, to):
            return why
        lacking = not any(self._will_act_as(one.member) is to for one in engines)
        well = [one for one in engines if self._will_act_as(one.member) is not to and _is_well(one, lacking)]
        is_last = len(well) == 1 and lacking and to is Role.DECODE  # clients come before prefills
        if len(well) < 2 and not is_last:
            return f"only one engine that {'prefills' if to is Role.DECODE else 'decodes'} is well"
        able = [one for one in well if self._may_change(one.member) and not self._changes(one.member)
                and now_s >= self._failed.get(one.member.incarnation, (0, -math.inf))[1]]
        count = min(abs(wanted - present), max(1, len(well) - 1), self._room(len(engines)), self._orders_left(now_s))
        return [Flip(one.member, to) for one in sorted(able, key=_burden)[:count]] or \
            "none of these engines may change now"

    def ordered(self, now_s: float, flip: Flip, problem: str = "") -> None:
        """The order was given. `problem`: why it may not have been carried out."""
        self._quiet_until_s = now_s + self._bounds.cool_down_s
        self._orders.append(now_s)
        self._open[flip.member.incarnation] = _OpenFlip(flip, now_s, problem)

    def skipped(self, now_s: float) -> None:
        """The order was not given, because the registry has changed since the reading."""
        self._quiet_until_s = now_s + self._bounds.cool_down_s

    def _may_change(self, member: Member) -> bool:
        return self._can_change.get(member.incarnation, False)

    def _changes(self, member: Member) -> bool:
        return member.incarnation in self._open

    def _will_act_as(self, member: Member) -> Role:
        return self._open[member.incarnation].flip.to if self._changes(member) else acts_as(member)

    def _room(self, engines: int) -> int:
        return self._bounds.most_at_once(engines) - len(self._in_time())

    def _in_time(self) -> list[Flip]:
        return [one.flip for one in self._open.values() if not one.late]

    def _orders_left(self, now_s: float) -> int:
        return self._bounds.per_hour - sum(now_s < at_s + HOUR_S for at_s in self._orders)

    def _see_changes(self, now_s: float, reading: FleetReading) -> None:
        """A role that we have not changed was changed by an operator, or another planner."""
        roles = {one.member.incarnation: one.member.role for one in reading.engines}
        for one in reading.engines:
            role, name = one.member.role, one.member.incarnation
            is_ours = self._changes(one.member) and role is self._open[name].flip.to
            if self._roles.get(name, role) is not role and not is_ours:
                self._quiet_until_s = now_s + self._bounds.cool_down_s
        self._roles = roles
        self._can_change = {name: value for name, value in self._can_change.items() if name in roles}
        self._failed = {name: value for name, value in self._failed.items() if name in roles}
        self._asked = {name: value for name, value in self._asked.items() if name in roles}

    def _see_whether_it_can_change(self, one: MemberReading, status: StatusReply | None) -> None:
        """Of several ranks of one server none does: their front end gives clients' requests to all of them. An engine
        of an older release does not say it."""
        name = one.member.incarnation
        if not one.member.http or _ranks(one.figures) > 1:
            self._can_change[name] = False
        elif status is not None:
            self._can_change[name] = bool(status.gauges.get(CHANGES_ROLE, status.member.role is Role.BOTH))

    def _see_open(self, now_s: float, flip: _OpenFlip, member: Member | None,
                  status: StatusReply | None) -> list[FlipEvent]:
        """`member`: the engine as the registry has it; None where it has left."""
        to = flip.flip.to
        if member is None:
            return [self._end(flip, FlipOutcome.LOST, "it has left")]
        flip.drains_since = None if not member.draining else now_s if flip.drains_since is None else flip.drains_since
        if member.draining and now_s - flip.drains_since >= self._bounds.cool_down_s:
            return [self._end(flip, FlipOutcome.LOST, "it drains")]
        flip.shown = flip.shown or member.role is to
        if member.role is not to and (flip.shown or member.role is not flip.flip.member.role):
            return [self._end(flip, FlipOutcome.LOST, f"somebody has made it {member.role.value}")]
        if not flip.shown:
            return self._see_failure(now_s, flip)
        if status is not None and is_over(status, to):  # asked after the registry had shown it: see `to_ask`
            self._failed.pop(member.incarnation, None)
            return [self._end(flip, FlipOutcome.DONE, f"over {now_s - flip.at_s:.0f} s after the order")]
        if not flip.late and now_s - flip.at_s >= self._bounds.late_s:
            flip.late = True
            return [FlipEvent(flip.flip, FlipOutcome.LATE, f"not over after {now_s - flip.at_s:.0f} s, something of "
                              "its old role is open; others may change meanwhile")]
        return []

    def _see_failure(self, now_s: float, flip: _OpenFlip) -> list[FlipEvent]:
        """An order without an answer may still be carried out, so its end is waited for."""
        if now_s - flip.at_s < self._bounds.cool_down_s:
            return []
        name = flip.flip.member.incarnation
        times = min(self._failed.get(name, (0, 0.0))[0] + 1, MOST_COOL_DOWNS)
        self._failed[name] = times, now_s + self._bounds.cool_down_s * min(MOST_COOL_DOWNS, 2**times)
        return [self._end(flip, FlipOutcome.FAILED, flip.problem or "the registry does not show the new role")]

    def _end(self, flip: _OpenFlip, outcome: FlipOutcome, text: str) -> FlipEvent:
        del self._open[flip.flip.member.incarnation]
        return FlipEvent(flip.flip, outcome, text)

    def _why_none(self, now_s: float, reading: FleetReading, to: Role) -> str:
        """Why no flip to this role may begin now, whichever it is; empty where one may."""
        if reading.fault:
            return "the broker does not answer"
        unread = [one.member.http for one in serving(reading) if one.member.http and one.figures is None]
        if unread:
            return f"{min(unread)} was not read"
        others = [flip for flip in self._in_time() if flip.to is not to]
        if others or self._room(len(serving(reading))) < 1:
            return f"{(others or self._in_time())[0]} is not over"
        if now_s < self._quiet_until_s:
            return "the cool-down is not over"
        if self._orders_left(now_s) < 1:
            return "there were as many flips in this hour as there may be"
        return ""


def _ranks(figures: MetricsSnapshot | None) -> int:
    return 0 if figures is None else len(figures.by("vllm:num_requests_running", "engine"))


def _is_well(one: MemberReading, lacking: bool) -> bool:
    """Whether it was read and is not degraded; for nobody to work with only where a flip gives it somebody."""
    if one.figures is None or one.fault or one.figures.value("vllm:pd_control_dead"):
        return False
    reason = degraded_reason(one.figures)
    return not reason or lacking and reason == DegradedReason.PEER.value


def _burden(one: MemberReading) -> tuple[bool, float, float, str]:
    """First those that act as both, then what has least to do."""
    requests = sum(one.figures.value(f"vllm:num_requests_{which}") for which in ("running", "waiting"))
    member = one.member
    return (member.role is not Role.BOTH, requests if math.isfinite(requests) else math.inf, member.load.job_tokens,
            member.incarnation)
