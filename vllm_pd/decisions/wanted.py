# SPDX-License-Identifier: Apache-2.0
"""How many prefill and decode engines a fleet wants, and whether an engine should change its role. Pure.

Each role has a *pressure*: what its work of the last interval needs, over what its engines have. Above 1 more engines
are wanted. The pressure of a role is that of its worst sign; each sign is scaled so that 1 is where answers begin to
miss a target. The signs of prefill engines: how long a job waits, how busy they are, how many blocks of decode engines
are set aside for prompts that wait. Those of decode engines: ITL, the KV cache, requests that wait for a seat. A TTFT
above its target counts for the role where most of it is spent, if that one makes requests wait.

Hysteresis: one engine more is wanted after `high_intervals` intervals above 1, one less only where the rest would have
stayed below `low` for all of `lower_after_s`. Between the two nothing changes. So the number is always that of the
engines that are there, one more, or one less, and a planner that is started anew needs no memory.

An engine changes its role for one of two reasons. *Shortage*: the role that gains is short of engines, for more than
what has piled up and goes by itself, and the other one would have been well with one engine less all through
`short_look_back_s`, or is at least less short. *Balance*: over all of `look_back_s` the role that gains was needed more
on average than the other one would be at its worst moment with one engine less. After a change there is none for
`cool_down_s`.
"""
import collections
import math
from enum import StrEnum
from typing import NamedTuple

import msgspec

from vllm_pd.protocol.messages import Role

NEVER_S = -math.inf
SHORTEST_WAIT = 0.1  # of the TTFT target: the wait that is always allowed
LARGE_PART = 0.5  # of a TTFT that is too long
MOST_OF_MEAN = 2.0  # a burst counts for no more in a mean


class Sign(StrEnum):
    """What decides a role's pressure, or its wanted number."""
    NOTHING = "nothing"  # no work
    WAIT = "wait"  # jobs wait for a prefill engine
    BUSY = "busy"  # prefill engines are busy
    PARKED = "parked"  # blocks are set aside for prompts that wait for prefill engines
    TTFT = "ttft"  # the first token comes late
    ITL = "itl"  # the next tokens come late
    CACHE = "cache"  # the KV cache is full
    SEATS = "seats"  # requests wait at decode engines
    NO_ENGINE = "no_engine"  # nobody has this role


class WantedRules(msgspec.Struct, frozen=True):
    """What the decisions depend on. The targets are of means over an interval. `busy`, `cache` and `parked`: the shares
    of prefill engines' time, and of the blocks of decode engines, at which the pressure is 1; `itl`: the share of its
    target; `waiting`: requests that wait at decode engines, for each one that runs. Of a change of role: `margin`, how
    many times shorter the role that gains must be, where the other one is short, too; `even`: below it nobody changes
    for balance."""
    ttft_s: float = 2.0
    itl_s: float = 0.05
    cool_down_s: float = 30.0
    lower_after_s: float = 300.0
    high_intervals: int = 2
    low: float = 0.7
    margin: float = 1.2
    even: float = 0.75
    busy: float = 0.85
    itl: float = 0.95
    cache: float = 0.9
    parked: float = 0.4
    waiting: float = 0.1

    @property
    def short_look_back_s(self) -> float:
        """For how long a role must have been well with one engine less that gives one to a role that is short."""
        return 2 * self.cool_down_s

    @property
    def look_back_s(self) -> float:
        """Over what both roles are compared for balance."""
        return 4 * self.cool_down_s


class PrefillReading(msgspec.Struct, frozen=True):
    """The prefill engines over an interval. `present`: all that don't drain; `unread`: those of them of which nothing
    is known. `busy`: the work that came in the interval, over what they can do in it, above 1 where it piles up.
    `wait_s`: how long a job waits until it is computed, `compute_s`: how long it is computed and sent, both means."""
    present: int
    unread: int = 0
    busy: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0


class DecodeReading(msgspec.Struct, frozen=True):
    """The decode engines over an interval. `cache` and `parked`: the shares of their blocks that are in use, and that
    are set aside for prompts that wait. `running` and `waiting`: requests of all of them, parked ones among those that
    run. `itl_s`, `ttft_s`: means over the interval, None without a token. `handover_s`: the part of `ttft_s` from the
    offer of a prompt until its KV has come."""
    present: int
    unread: int = 0
    cache: float = 0.0
    parked: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    itl_s: float | None = None
    ttft_s: float | None = None
    handover_s: float = 0.0


class Pressure(NamedTuple):
    """How short of engines a role is. `rate`: without what has piled up and goes by itself, which says nothing of how
    many are needed afterwards."""
    all: float
    rate: float
    sign: Sign


class WantedRole(NamedTuple):
    """What is wanted of one role."""
    wanted: int
    present: int
    unread: int
    pressure: float
    sign: Sign


class WantedDecision(NamedTuple):
    """`flip_to`: the role that an engine of the other one should take now; None: no change."""
    prefill: WantedRole
    decode: WantedRole
    flip_to: Role | None = None


def prefill_pressure(prefill: PrefillReading, decode: DecodeReading, rules: WantedRules) -> Pressure:
    """That of the prefill engines."""
    if prefill.present == 0:
        return Pressure(math.inf, math.inf, Sign.NO_ENGINE)
    allowed_s = max(SHORTEST_WAIT * rules.ttft_s, (rules.ttft_s - prefill.compute_s) / 2)
    signs = {Sign.BUSY: prefill.busy / rules.busy, Sign.WAIT: prefill.wait_s / allowed_s,
             Sign.PARKED: decode.parked / rules.parked}
    stays = prefill.wait_s > (1 - prefill.busy) * rules.cool_down_s
    late = 0.0 if decode.ttft_s is None else decode.ttft_s / rules.ttft_s
    if late > 1 and decode.handover_s > LARGE_PART * decode.ttft_s and signs[Sign.WAIT] > LARGE_PART:
        signs[Sign.TTFT] = late
    return _worst(signs, signs[Sign.BUSY], stays)


def decode_pressure(decode: DecodeReading, rules: WantedRules) -> Pressure:
    """That of the decode engines."""
    if decode.present == 0:
        return Pressure(math.inf, math.inf, Sign.NO_ENGINE)
    signs = {Sign.ITL: (decode.itl_s or 0.0) / (rules.itl * rules.itl_s),
             Sign.CACHE: max(0.0, decode.cache - decode.parked) / rules.cache}
    rate = max(signs.values())
    waiting = max(0.0, decode.waiting - decode.present)  # one of each engine may just have come
    if waiting:
        signs[Sign.SEATS] = waiting / max(1.0, decode.running) / rules.waiting
    late = 0.0 if decode.ttft_s is None else decode.ttft_s / rules.ttft_s
    if late > 1 and decode.handover_s < (1 - LARGE_PART) * decode.ttft_s and waiting:
        signs[Sign.TTFT] = late
    return _worst(signs, rate, bool(waiting))


def _worst(signs: dict[Sign, float], rate: float, stays: bool) -> Pressure:
    """`stays`: what has piled up does not go by itself."""
    sign = max(signs, key=signs.get)
    most = signs[sign]
    return Pressure(most, max(rate, min(1.0, most)) if stays else rate, sign if most > 0 else Sign.NOTHING)


class _Seen(NamedTuple):
    """The engines that a role needed in an interval: without what goes by itself, in all, and in all as it counts in a
    mean."""
    at_s: float
    lasting: float
    needed: float
    capped: float


class _RoleHistory:
    """What was seen of one role, and the hysteresis of its wanted number."""

    def __init__(self, rules: WantedRules) -> None:
        self._rules = rules
        self._last: collections.deque[_Seen] = collections.deque()
        self._present: int | None = None
        self._high = 0
        self._low_since_s: float | None = None
        self._raised_s = NEVER_S
        self._more = 0

    def see(self, now: float, present: int, unread: int, pressure: Pressure) -> None:
        """An interval that has ended. A role that nobody has needs one engine; one of which an engine was not read may
        have needed them all. The time before the first reading counts for nothing."""
        while self._last and self._last[0].at_s < now - self._rules.look_back_s:
            self._last.popleft()
        if not present:
            self._last.append(_Seen(now, 1.0, 1.0, 1.0))
        elif self._last or unread < present:
            needed = max(pressure.all, 1.0) if unread else pressure.all
            self._last.append(_Seen(now, pressure.rate * present, needed * present,
                                    min(pressure.all, MOST_OF_MEAN) * present))

    def most(self, since_s: float) -> float:
        """The engines that were needed since then, at most."""
        return max((seen.needed for seen in self._last if seen.at_s >= since_s), default=math.inf)

    def mean(self) -> float:
        """The engines that were needed in all of `look_back_s`, on average."""
        return sum(seen.capped for seen in self._last) / max(1, len(self._last))

    def lasting(self) -> float:
        """The engines that are needed for long: by each of the last intervals at least as many."""
        last = list(self._last)[-self._rules.high_intervals:]
        return min(seen.lasting for seen in last) if len(last) == self._rules.high_intervals else 0.0

    def wanted(self, now: float, present: int, unread: int, pressure: float) -> int:
        """The number that is wanted, 1 at least. Where an engine was not read the others may all be idle, and none less
        is wanted."""
        rules = self._rules
        if present != self._present:  # another fleet: what was seen of the last one says nothing
            self._present, self._high, self._low_since_s, self._more = present, 0, None, 0
        left = math.inf if unread or present <= 1 else pressure * present / (present - 1)
        self._high = self._high + 1 if pressure > 1 else 0
        self._low_since_s = None if left >= rules.low else now if self._low_since_s is None else self._low_since_s
        if self._high >= rules.high_intervals or present == 0:
            self._more, self._raised_s = 1, now
        elif self._low_since_s is not None and now - self._low_since_s >= rules.lower_after_s:
            self._more = -1
        elif (self._more > 0 and pressure < rules.low and not unread and now - self._raised_s >= rules.lower_after_s
              or self._more < 0 and left > 1):
            self._more = 0
        return max(1, present + self._more)


class WantedEngines:
    """The decisions of one planner, an interval after the other. Times are seconds of the caller's clock, on which it
    begins at `now`: no engine changes its role before a cool-down is over, as if one had changed right before."""

    def __init__(self, rules: WantedRules, now: float) -> None:
        self.rules = rules
        self._prefill, self._decode = _RoleHistory(rules), _RoleHistory(rules)
        self._rests_until_s = now + rules.cool_down_s

    def role_changed(self, now: float) -> None:
        """An engine has changed its role, or refused to, whoever asked for it: none is to change for a cool-down."""
        self._rests_until_s = now + self.rules.cool_down_s

    def decide(self, now: float, prefill: PrefillReading, decode: DecodeReading) -> WantedDecision:
        """The decision for the interval that ends now."""
        of_prefill = prefill_pressure(prefill, decode, self.rules)
        of_decode = decode_pressure(decode, self.rules)
        self._prefill.see(now, prefill.present, prefill.unread, of_prefill)
        self._decode.see(now, decode.present, decode.unread, of_decode)
        found = WantedDecision(
            WantedRole(self._prefill.wanted(now, prefill.present, prefill.unread, of_prefill.all), prefill.present,
                       prefill.unread, of_prefill.all, of_prefill.sign),
            WantedRole(self._decode.wanted(now, decode.present, decode.unread, of_decode.all), decode.present,
                       decode.unread, of_decode.all, of_decode.sign))
        if now < self._rests_until_s:
            return found
        if self._worth_it(now, found.prefill, self._prefill, found.decode, self._decode):
            return found._replace(flip_to=Role.PREFILL)
        if self._worth_it(now, found.decode, self._decode, found.prefill, self._prefill):
            return found._replace(flip_to=Role.DECODE)
        return found

    def _worth_it(self, now: float, gains: WantedRole, gaining: _RoleHistory, gives: WantedRole,
                  giving: _RoleHistory) -> bool:
        """Whether an engine of the role that gives should take the other one. A role of which an engine was not read
        gives none: that one may be the busiest."""
        rules = self.rules
        if gives.present <= 1 or gives.unread:
            return False
        if gains.present == 0:
            return True
        short = gaining.lasting() / gains.present
        left = giving.most(now - rules.short_look_back_s) / (gives.present - 1)
        if short >= 1 and (left <= 1 or short >= rules.margin * left):
            return True
        short, left = gaining.mean() / gains.present, giving.most(now - rules.look_back_s) / (gives.present - 1)
        return short >= rules.even and short >= rules.margin * left
