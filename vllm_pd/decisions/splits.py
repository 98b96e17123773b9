# SPDX-License-Identifier: Apache-2.0
"""How many of a fixed number of engines should prefill, and how many decode. Pure.

No rule is best for all loads: one that goes after each shift of the load is late for each of many short ones, and one
that keeps the split that was best in the mean is wrong for all of a long one. So candidates are computed beside what is
done, each with a fleet in virtual time (`vllm_pd.decisions.virtual_fleet`) that gets the requests that came:

- each fixed split;
- *trackers*: each goes to the split with the most room for the present demand, once that has been another one for as
  long as its patience.

Of each the good requests are summed up, and fade with HALF_LIFE_S. Another candidate is followed when it leads by
MARGIN of that sum, and more the more often that has happened in the last hour, and by what the change would cost. What
a candidate promises is corrected by what was seen while it was followed and obeyed, and at times at which the real
engines had its split, too. All trackers are believed as much as each other: if changes take longer than in virtual
time, all promise too much.

The length of an answer is known at its end only. So virtual time is DELAY_S behind, and a request has the mean length
of the answers that ended about when its own did. Trackers are given what was known then.
"""
import math
import random
from bisect import bisect_left
from collections import deque

import msgspec

from vllm_pd.decisions.demand import Demand, FleetLook, Targets, bounded
from vllm_pd.decisions.virtual_fleet import VirtualFleet, VirtualRequest

HALF_LIFE_S = 1800.0
PATIENCE_S = (0.0, 30.0, 60.0, 240.0)
ROOM = 1.1  # times as much as here makes another split one to go to
ENOUGH = 1.5  # times the demand: with that much room here no other split is better
MARGIN = 0.1
SWITCHES_S = 3600.0
COST_SHARE = 0.5  # of the requests of a change's time
MOST_TRUST = 2.0
TRUST_S = 60.0  # of all requests: so many weigh as much for what a candidate promises as what was seen of it
SETTLE_CHANGES = 3.0  # times of a change after which a new split has no more of the old one's queues
DELAY_S = 40.0
FIRST_REQUESTS = 20  # before these nothing is chosen
SEEN_LENGTHS = 60  # looks
LEAST_ANSWERS = 3  # of a look whose mean counts
PROMPT_SIGMA, ANSWER_SIGMA = 0.4, 0.5  # lengths are lognormal about the mean of a look
MAX_ENGINES = 64
MAX_SPLITS = 15  # fixed ones that are computed
MAX_ARRIVED = 2000  # requests of a look: more take too long to compute
# Times the target that one prompt may take, and tokens of one answer: a look that says more would fill all fleets for
# hours.
LONGEST_TTFT, MAX_ANSWER = 10.0, 20_000.0


class SplitChoice(msgspec.Struct, frozen=True):
    """How many engines are to prefill, and why: the candidate that is followed, in words."""
    prefills: int
    reason: str


class _Trust:
    """How promises were kept: the good requests that virtual time had, and those that were seen. Both fade."""

    def __init__(self) -> None:
        self._promised = self._kept = 0.0

    def fade(self, left: float) -> None:
        """Time passes."""
        self._promised, self._kept = self._promised * left, self._kept * left

    def see(self, promised: float, kept: float) -> None:
        """Good requests of the same time."""
        self._promised, self._kept = self._promised + promised, self._kept + kept

    def factor(self, doubt: float) -> float:
        """What a promise is worth. `doubt`: requests."""
        promised = self._promised + doubt
        return min(MOST_TRUST, (self._kept + doubt) / promised) if promised > 0 else 1.0


class _Candidate:
    """A fleet in virtual time. `gained`: its good requests, which fade."""

    def __init__(self, fleet: VirtualFleet, name: str, trust: _Trust) -> None:
        self.fleet, self.name, self.trust = fleet, name, trust
        self.gained = 0.0
        self.changed_at = float("-inf")  # when its split was another one

    def value(self, doubt: float) -> float:
        """What it has gained, corrected by how its promises were kept."""
        return self.gained * self.trust.factor(doubt)

    def split(self, demand: Demand, prefills: int) -> int:
        """The one to have, with this demand, where `prefills` engines prefill now."""
        raise NotImplementedError

    def split_now(self, demand: Demand, prefills: int) -> int:
        """As `split`, for the real engines."""
        return self.split(demand, prefills)

    def begin(self) -> None:
        """It is followed from now on."""


class _Fixed(_Candidate):
    """Keeps its split."""

    def __init__(self, fleet: VirtualFleet, prefills: int) -> None:
        super().__init__(fleet, f"fixed split with {prefills} prefill engines", _Trust())
        self._prefills = prefills

    def split(self, demand: Demand, prefills: int) -> int:
        return self._prefills


class _Tracker(_Candidate):
    """Goes after the demand: in virtual time and, where it is followed, with the real engines."""

    def __init__(self, fleet: VirtualFleet, patience_s: float, room: "_Room", trust: _Trust) -> None:
        super().__init__(fleet, f"tracker with a patience of {patience_s:g} s", trust)
        self._patience_s, self._room = patience_s, room
        self._missed_s = self._missed_now_s = 0.0

    def begin(self) -> None:
        self._missed_now_s = 0.0

    def split(self, demand: Demand, prefills: int) -> int:
        self._missed_s, split = self._go(demand, prefills, self._missed_s)
        return split

    def split_now(self, demand: Demand, prefills: int) -> int:
        self._missed_now_s, split = self._go(demand, prefills, self._missed_now_s)
        return split

    def _go(self, demand: Demand, prefills: int, missed_s: float) -> tuple[float, int]:
        best = self._room.best(demand, prefills)
        if best == prefills:
            return 0.0, prefills
        missed_s += demand.seconds
        return (0.0, best) if missed_s > self._patience_s else (missed_s, prefills)


class _Room:
    """How much more than the demand a split could do, of the role that has less to spare."""

    def __init__(self, count: int, splits: list[int], targets: Targets) -> None:
        self._count, self._splits, self._itl_s = count, splits, targets.itl_s

    def of(self, demand: Demand, prefills: int) -> float:
        """Times the demand."""
        return min(prefills / max(1e-9, demand.prefill_engines()),
                   (self._count - prefills) / max(1e-9, demand.decode_engines(self._itl_s)))

    def best(self, demand: Demand, prefills: int) -> int:
        """The split with the most; that with `prefills` where it has enough, or about as much."""
        here = self.of(demand, prefills)
        best = max(self._splits, key=lambda split: self.of(demand, split))
        return best if here < ENOUGH and self.of(demand, best) > ROOM * here else prefills


class _Arrivals:
    """Makes requests of looks. `longest_s`: what one prompt takes at most."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._random = random.Random(0)  # the same looks give the same requests
        self._lengths: deque[tuple[float, float]] = deque(maxlen=SEEN_LENGTHS)
        self._waiting_tokens: float | None = None

    def see(self, look: FleetLook) -> None:
        """Note how long the answers are that have ended, and about when they were asked for."""
        if look.answers >= LEAST_ANSWERS and look.itl_s > 0:
            mean = max(1.0, look.answer_tokens / look.answers)
            self._lengths.append((look.at_s - mean * look.itl_s, mean))

    def requests(self, look: FleetLook, demand: Demand) -> list[VirtualRequest]:
        """Those that came in the look's time: at times that were drawn, with the tokens of all divided by chance."""
        count = round(look.arrived)
        before, self._waiting_tokens = self._waiting_tokens, look.waiting_tokens
        grown = 0.0 if before is None else look.waiting_tokens - before
        if count < 1:
            return []
        times = sorted(look.at_s - demand.seconds * self._random.random() for _ in range(count))
        tokens = look.prompt_tokens + grown
        prefill_s = demand.prefill_s * count if look.tokens_per_s <= 0 else max(0.0, tokens) / look.tokens_per_s
        lengths = sorted(self._lengths)
        prompts = self._shares(count, PROMPT_SIGMA)
        answers = (min(MAX_ANSWER, max(1.0, share * _at(lengths, at_s, demand.answer_tokens)))
                   for at_s, share in zip(times, self._shares(count, ANSWER_SIGMA), strict=True))
        return [VirtualRequest(at_s, min(self._longest_s, share * prefill_s / count), answer)
                for at_s, share, answer in zip(times, prompts, answers, strict=True)]

    def _shares(self, count: int, sigma: float) -> list[float]:
        """Lognormal numbers whose mean is 1."""
        drawn = [self._random.lognormvariate(0.0, sigma) for _ in range(count)]
        mean = math.fsum(drawn) / count
        return [one / mean for one in drawn]


def _at(points: list[tuple[float, float]], x: float, otherwise: float) -> float:
    """On the line through these points; before the first and after the last as there."""
    if not points:
        return otherwise
    number = bisect_left(points, (x, ))
    if number in (0, len(points)):
        return points[min(number, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[number - 1], points[number]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1


class SplitPlanner:
    """Chooses the split of `count` engines, of which `prefills` prefill now. `change_s`: how long an engine that
    changes is missing; `at_once`: how many may. At least `least_prefills` and `least_decodes` do each. Raises
    ValueError for what is not possible. Owned by one caller."""

    def __init__(self, count: int, prefills: int, targets: Targets, change_s: float = 30.0, at_once: int = 1,
                 least_prefills: int = 1, least_decodes: int = 1) -> None:
        first, last = max(1, least_prefills), count - max(1, least_decodes)
        if not 2 <= count <= MAX_ENGINES or first > last:
            raise ValueError(f"count={count} is not possible: have 2 to {MAX_ENGINES} engines, and no more that are "
                             f"needed ({least_prefills} + {least_decodes})")
        self._change_s = change_s
        now = min(max(prefills, first), last)
        every = max(1, -(-(last - first + 1) // MAX_SPLITS))
        splits = sorted({*range(first, last + 1, every), last, now})
        self._room = _Room(count, splits, targets)

        def fleet() -> VirtualFleet:
            return VirtualFleet(count, now, targets, change_s, at_once)

        trackers = _Trust()
        self._fixed = {split: _Fixed(fleet(), split) for split in splits}
        self._candidates: list[_Candidate] = [
            *self._fixed.values(), *(_Tracker(fleet(), patience_s, self._room, trackers) for patience_s in PATIENCE_S)]
        self._trusts = [*(one.trust for one in self._fixed.values()), trackers]
        self._followed: _Candidate = self._fixed[now]
        self._followed_at = float("inf")
        self._chosen = now
        self._has_begun, self._arrived = False, 0.0
        self._arrivals = _Arrivals(LONGEST_TTFT * targets.ttft_s)
        self._kept: deque[tuple[FleetLook, Demand, bool]] = deque()  # and whether the real split was as chosen
        self._settled_at = float("-inf")  # from when on what is seen is due to the split that is chosen
        self._switches: deque[float] = deque(maxlen=64)

    def receive(self, look: FleetLook, demand: Demand, prefills: int) -> SplitChoice | None:
        """The split to have after this look and its demand; None while there is nothing to go by. `prefills`: engines
        that prefill now, those that change counted at their new role."""
        look = bounded(look)
        if look.arrived > MAX_ARRIVED:
            self._chosen = prefills
            return SplitChoice(prefills, f"more than {MAX_ARRIVED} requests in a look: look more often")
        if prefills != self._chosen:
            self._settled_at = look.at_s + SETTLE_CHANGES * self._change_s
        self._arrived += look.arrived
        self._arrivals.see(look)
        self._kept.append((look, demand, prefills == self._chosen))
        while self._kept and self._kept[0][0].at_s <= look.at_s - DELAY_S:
            self._replay(*self._kept.popleft(), demand)
        if not self._has_begun:
            if self._arrived < FIRST_REQUESTS:
                self._chosen = prefills
                return None
            self._has_begun = True
            best = self._room.best(demand, prefills)
            self._follow(self._fixed[min(self._fixed, key=lambda split: abs(split - best))], look.at_s)
        else:
            self._compare(look.at_s, demand)
        if (chosen := self._followed.split_now(demand, prefills)) != self._chosen:
            self._settled_at = look.at_s + SETTLE_CHANGES * self._change_s
        self._chosen = chosen
        return SplitChoice(self._chosen, self._followed.name)

    def gains(self) -> dict[str, float]:
        """The faded sum of good requests of each candidate."""
        return {one.name: one.gained for one in self._candidates}

    def _replay(self, look: FleetLook, demand: Demand, obeyed: bool, latest: Demand) -> None:
        """What the candidates would have done then. The pace of tokens is as known now."""
        requests = self._arrivals.requests(look, demand)
        settle_s = SETTLE_CHANGES * self._change_s
        left = 0.5**(demand.seconds / HALF_LIFE_S)
        for trust in self._trusts:
            trust.fade(left)
        for candidate in self._candidates:
            candidate.gained *= left
            good = candidate.fleet.advance(requests, look.at_s, latest.base_s, latest.slope_s)
            candidate.gained += good
            split = candidate.fleet.prefills
            is_followed = candidate is self._followed and obeyed and look.at_s > self._followed_at + settle_s
            settled_at = max(self._settled_at, candidate.changed_at + settle_s)
            if is_followed or split == self._chosen and look.at_s > settled_at:
                candidate.trust.see(good, demand.good)
            candidate.fleet.want(wanted := candidate.split(demand, split))
            if wanted != split:
                candidate.changed_at = look.at_s

    def _compare(self, now: float, demand: Demand) -> None:
        while self._switches and self._switches[0] <= now - SWITCHES_S:
            self._switches.popleft()
        doubt = demand.requests_per_s * TRUST_S
        values = {one: one.value(doubt) for one in self._candidates}
        best = max(self._candidates, key=values.__getitem__)
        margin = MARGIN * (1 + len(self._switches)) * values[self._followed]
        changes = best.fleet.prefills != self._chosen
        cost = COST_SHARE * demand.requests_per_s * self._change_s * changes
        if best is not self._followed and values[best] - values[self._followed] > margin + cost:
            self._switches.append(now)
            self._follow(best, now)

    def _follow(self, candidate: _Candidate, now: float) -> None:
        self._followed, self._followed_at = candidate, now
        candidate.begin()
