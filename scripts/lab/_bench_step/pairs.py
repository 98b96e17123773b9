# SPDX-License-Identifier: Apache-2.0
"""Pairs of rounds, one on each tree right after the other, and the verdict on all of them.

The ratio of a pair is the median step of tree B over the median step of tree A. Other work on a busy machine hits both
of a pair; CPU time leaves most of the rest out, so the verdict is about CPU time. Processes differ by themselves (where
the loader puts things), so there are several of each.
"""

import random
import statistics
from dataclasses import dataclass

RESAMPLES = 2000


@dataclass(frozen=True)
class StepPair:
    """One round on both trees: the median step of each, in seconds."""

    process: int
    wall_a_s: float
    wall_b_s: float
    cpu_a_s: float
    cpu_b_s: float
    same_decisions: bool

    @classmethod
    def of(cls, process: int, a: dict, b: dict) -> "StepPair":
        """From the answers of the two workers."""
        wall, cpu = ([statistics.median(one[clock]) for one in (a, b)] for clock in ("wall_s", "cpu_s"))
        return cls(process, *wall, *cpu, a["digest"] == b["digest"])

    @property
    def wall_ratio(self) -> float:
        return self.wall_b_s / self.wall_a_s

    @property
    def cpu_ratio(self) -> float:
        return self.cpu_b_s / self.cpu_a_s


@dataclass(frozen=True)
class StepVerdict:
    """On one kind of step. Ratios are B over A; `low` and `high` bound the CPU ratio with 95 % confidence."""

    kind: str
    pairs: int
    step_a_s: float
    step_b_s: float
    wall_ratio: float
    cpu_ratio: float
    low: float
    high: float
    by_process: list[float]
    same_decisions: bool

    def slower_than(self, limit: float) -> bool:
        """Whether B is slower than `limit` times A with that confidence, so not by noise."""
        return self.low > limit


def judge(kind: str, pairs: list[StepPair], seed: int = 0) -> StepVerdict:
    """The verdict on at least one pair."""
    groups = [[pair.cpu_ratio for pair in pairs if pair.process == process]
              for process in sorted({pair.process for pair in pairs})]
    low, high = interval(groups, seed)
    return StepVerdict(kind, len(pairs), low=low, high=high, by_process=[statistics.median(group) for group in groups],
                       same_decisions=all(pair.same_decisions for pair in pairs),
                       step_a_s=statistics.median(pair.cpu_a_s for pair in pairs),
                       step_b_s=statistics.median(pair.cpu_b_s for pair in pairs),
                       wall_ratio=statistics.median(pair.wall_ratio for pair in pairs),
                       cpu_ratio=statistics.median(pair.cpu_ratio for pair in pairs))


def interval(groups: list[list[float]], seed: int) -> tuple[float, float]:
    """The 95 % interval of the median by bootstrap: first processes are drawn again, then rounds within them."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(ratio for group in draw.choices(groups, k=len(groups))
                                       for ratio in draw.choices(group, k=len(group))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
