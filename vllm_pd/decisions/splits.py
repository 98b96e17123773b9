# SPDX-License-Identifier: Apache-2.0
"""How many of a fixed number of engines should prefill, and how many decode. Pure.

No rule is best for all loads: one that follows each shift of the load is late for each of many short ones, and one that
keeps the split that was best in the mean is wrong for all of a long one. So both are computed beside what is done, and
the one that has done better is followed:

- each fixed split (the best of them so far is the *leader*);
- *trackers*: each goes to the split that is best now when what it has lost by not being there exceeds its patience.
  Their patience differs, because what a change costs depends on the load: they pay for their changes in the same way.

All of them are fluid fleets (`vllm_pd.decisions.fluid`) with the demand that was measured. Of each the good requests
are summed up, and fade with HALF_LIFE_S. Another candidate is followed when it leads by MARGIN of that sum, and by what
the change would cost.
"""
import msgspec

from vllm_pd.decisions.demand import Demand, Targets
from vllm_pd.decisions.fluid import FluidFleet, steady_share

HALF_LIFE_S = 1800.0
PATIENCE_S = (5.0, 20.0, 60.0, 180.0)  # of all requests lost
MARGIN = 0.03
LAG_S = 30.0  # a shift is seen so much later than it is computed with
SETTLE_CHANGES = 3.0  # times of a change after which a new split has no more of the old one's queues
TRUST_S = 60.0  # of all requests: so many weigh as much for a candidate's promises as what was seen of it
COST_SHARE = 0.5  # of the requests of a change's time
MAX_ENGINES = 512
MAX_SPLITS = 32  # fixed ones that are computed


class SplitChoice(msgspec.Struct, frozen=True):
    """How many engines are to prefill, and why: the candidate that is followed, in words."""
    prefills: int
    reason: str


class _Trust:
    """How much of what was promised was true."""

    def __init__(self) -> None:
        self._promised = self._kept = 0.0

    def add(self, promised: float, kept: float) -> None:
        """So many good requests were computed, and so many seen."""
        self._promised, self._kept = self._promised + promised, self._kept + kept

    def fade(self, seconds: float) -> None:
        """Time passes."""
        left = 0.5**(seconds / HALF_LIFE_S)
        self._promised, self._kept = self._promised * left, self._kept * left

    def share(self, requests_per_s: float) -> float:
        """What is left of a promise, of 1."""
        doubt = max(requests_per_s, 1e-9) * TRUST_S
        return min(1.0, (self._kept + doubt) / (self._promised + doubt))


class _Candidate:
    """A fluid fleet, what it gained, and how much of what it promises was true while it was followed."""

    def __init__(self, fleet: FluidFleet, name: str, trust: _Trust) -> None:
        self.fleet, self.name = fleet, name
        self.gained = 0.0
        self.trust = trust

    @property
    def prefills(self) -> int:
        """The split that it would have now."""
        return self.fleet.goal

    def receive(self, demand: Demand, shares: dict[int, float], seen: bool) -> None:
        """Add what was good in the demand's time: as it was seen, where this one is followed for long enough, else as
        it is computed and as far as such promises were kept."""
        promised = self.fleet.advance(demand)
        if seen:
            self.trust.add(promised, demand.good)
        good = demand.good if seen else promised * self.trust.share(demand.requests_per_s)
        self.gained = self.gained * 0.5**(demand.seconds / HALF_LIFE_S) + good
        self.follow(demand, shares)

    def follow(self, demand: Demand, shares: dict[int, float]) -> None:
        """Change the split, where this candidate does that."""


class _Tracker(_Candidate):
    """Goes after the demand."""

    def __init__(self, fleet: FluidFleet, patience_s: float, splits: list[int], trust: _Trust) -> None:
        super().__init__(fleet, f"tracker with a patience of {patience_s:g} s", trust)
        self._patience_s, self._splits = patience_s, splits
        self._missed = dict.fromkeys(splits, 0.0)

    def follow(self, demand: Demand, shares: dict[int, float]) -> None:
        here = shares.get(self.fleet.goal, 0.0)
        for split in self._splits:
            self._missed[split] = max(0.0, self._missed[split] + (shares[split] - here) * demand.seconds)
        if max(self._missed.values()) >= self._patience_s:
            self.fleet.change(max(self._splits, key=lambda split: (shares[split], -abs(split - self.fleet.goal))))
            self._missed = dict.fromkeys(self._splits, 0.0)


class SplitPlanner:
    """Chooses the split of `count` engines, of which `prefills` prefill now. `change_s`: how long an engine that
    changes is missing. At least `least_prefills` and `least_decodes` do each. Owned by one caller."""

    def __init__(self, count: int, prefills: int, targets: Targets, change_s: float = 30.0, least_prefills: int = 1,
                 least_decodes: int = 1) -> None:
        if not 2 <= count <= MAX_ENGINES or least_prefills + least_decodes > count:
            raise ValueError(f"count={count} is not possible: have 2 to {MAX_ENGINES} engines, and no more that are "
                             f"needed ({least_prefills} + {least_decodes})")
        self._targets, self._change_s, self._count = targets, change_s, count
        first, last = max(1, least_prefills), count - max(1, least_decodes)
        self._prefills = prefills = min(max(prefills, first), last)
        every = max(1, -(-(last - first + 1) // MAX_SPLITS))
        splits = sorted({*range(first, last + 1, every), last, prefills})
        self._splits = splits

        trackers, fixed = _Trust(), [_Trust() for _ in splits]
        self._trusts = [trackers, *fixed]
        self._candidates = [
            *(_Tracker(FluidFleet(count, prefills, targets, change_s + LAG_S), patience_s, splits, trackers)
              for patience_s in PATIENCE_S),
            *(_Candidate(FluidFleet(count, split, targets, change_s), f"fixed split with {split} prefill engines", one)
              for split, one in zip(splits, fixed, strict=True))]
        self._settled_at = float("-inf")
        self._followed = self._candidates[1]

    def receive(self, demand: Demand) -> SplitChoice:
        """The split to have after this demand."""
        shares = {split: steady_share(demand, split, self._count - split, self._targets) for split in self._splits}
        for candidate in self._candidates:
            candidate.receive(demand, shares, candidate is self._followed and demand.at_s >= self._settled_at)
        for trust in self._trusts:
            trust.fade(demand.seconds)
        best = max(self._candidates, key=lambda one: one.gained)
        cost = COST_SHARE * demand.requests_per_s * self._change_s * (best.prefills != self._prefills)
        if best.gained > self._followed.gained * (1 + MARGIN) + cost:
            if best.prefills != self._prefills:
                self._settled_at = demand.at_s + SETTLE_CHANGES * self._change_s
            self._followed = best
        self._prefills = self._followed.prefills
        return SplitChoice(self._prefills, self._followed.name)

    def gains(self) -> dict[str, float]:
        """The faded sum of good requests of each candidate."""
        return {one.name: one.gained for one in self._candidates}
