# SPDX-License-Identifier: Apache-2.0
"""The planner against every ratio of prefill to decode engines that never changes, for the same requests."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from _planner.fleet import ENGINES, TARGETS, SimulatedFleet, SimulatedPlanner, goodput
from _planner.loads import Phase, draw, lasts_s
from vllm_pd.decisions.wanted import WantedEngines, WantedRules

RULES = WantedRules(ttft_s=TARGETS.ttft_s, itl_s=TARGETS.itl_s)
INTERVAL_S = 10.0
MakeRule = Callable[[], WantedEngines]


@dataclass(frozen=True)
class Compared:
    """One load with one seed. `static`: goodput in requests a second by the number of prefill engines; `planned`: that
    of the planner, which begins with half of them. `trace` as in `SimulatedPlanner`."""
    offered: float
    static: dict[int, float]
    planned: float
    flips: int
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


def compare(phases: Sequence[Phase], seed: int, make: MakeRule = make_rule) -> Compared:
    """The planner and all ratios."""
    planned, planner = plan(phases, seed, make)
    return Compared(len(draw(phases, seed)) / lasts_s(phases),
                    {prefill: static(phases, seed, prefill) for prefill in range(1, ENGINES)}, planned, planner.flips,
                    planner.trace)
