# SPDX-License-Identifier: Apache-2.0
"""The planner against every ratio of prefill to decode engines that never changes, for the same requests."""
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from _planner.fleet import ENGINES, TARGETS, SimulatedFleet, SimulatedPlanner, goodput
from _planner.loads import Phase, draw, lasts_s
from vllm_pd.decisions.wanted import WantedEngines, WantedRules

RULES = WantedRules(ttft_s=TARGETS.ttft_s, itl_s=TARGETS.itl_s)
INTERVAL_S = 10.0
LEAST, LEAST_WHERE_LOAD_SHIFTS = 0.95, 1.1  # of the best fixed ratio in hindsight
MakeRule = Callable[[], WantedEngines]


@dataclass(frozen=True)
class Compared:
    """One load with one seed. `static`: goodput in requests a second by the number of prefill engines; `planned`: that
    of the planner, which begins with half of them. `changed_s` and `trace` as in `SimulatedPlanner`."""
    offered: float
    static: dict[int, float]
    planned: float
    changed_s: list[float]
    trace: list[tuple[float, int, float, float]]

    @property
    def best(self) -> int:
        """The prefill engines of the best ratio, in hindsight."""
        return max(self.static, key=self.static.get)

    @property
    def ratio(self) -> float:
        """The planner's goodput over that of the best ratio."""
        return self.planned / self.static[self.best]


def make_rule() -> WantedEngines:
    """The rule as `vllm-pd planner` has it."""
    return WantedEngines(RULES, 0.0)


def plan(phases: Sequence[Phase], seed: int, make: MakeRule = make_rule) -> tuple[float, SimulatedPlanner]:
    """The goodput of a fleet with a planner, and that planner."""
    requests, planner = draw(phases, seed), SimulatedPlanner(make(), INTERVAL_S)
    SimulatedFleet(ENGINES // 2).run(requests, planner)
    return goodput(requests, lasts_s(phases), TARGETS), planner


def static(phases: Sequence[Phase], seed: int, prefill: int) -> float:
    """The goodput with so many prefill engines all the time."""
    requests = draw(phases, seed)
    SimulatedFleet(prefill).run(requests)
    return goodput(requests, lasts_s(phases), TARGETS)


def compare(phases: Sequence[Phase], seed: int, make: MakeRule = make_rule,
            ratios: Sequence[int] = range(1, ENGINES)) -> Compared:
    """The planner and the fixed ratios with so many prefill engines."""
    planned, planner = plan(phases, seed, make)
    return Compared(len(draw(phases, seed)) / lasts_s(phases),
                    {prefill: static(phases, seed, prefill) for prefill in ratios}, planned,
                    planner.changed_s, planner.trace)


def faults(found: Compared, shifts: bool) -> list[str]:
    """What is wrong with a planner by one comparison. `shifts`: no fixed ratio can be right for this load."""
    wrong = []
    if found.ratio < LEAST:
        wrong.append(f"goodput: {found.ratio:.3f} of the best fixed ratio")
    if shifts and found.ratio < LEAST_WHERE_LOAD_SHIFTS:
        wrong.append(f"shifts: {found.ratio:.3f} of the best fixed ratio, where none is right")
    if any(later - earlier < RULES.cool_down_s for earlier, later in itertools.pairwise(found.changed_s)):
        wrong.append(f"cool-down: {len(found.changed_s)} changes, two within {RULES.cool_down_s:g} s")
    return wrong
