# SPDX-License-Identifier: Apache-2.0
"""A fleet of a fixed number of engines in simulated time, which change between prefill and decode."""
from __future__ import annotations

from collections.abc import Callable

import numpy

from _planner.fleet import Fleet, Machine, Run
from _planner.queues import DECODE, PREFILL
from vllm_pd.decisions.demand import FleetLook, Targets
from vllm_pd.decisions.wanted import WantedEngines


class SplitFleet(Fleet):
    """`plan` gets each look, and how many engines prefill, those that change at their new role; it returns how many are
    to. At most `at_once` change at a time, each for `change_s` and the end of what it has at least."""

    def __init__(self, first: WantedEngines, machine: Machine, targets: Targets,
                 plan: Callable[[FleetLook, int], int] | None, change_s: float, at_once: int) -> None:
        super().__init__(first, machine, targets, self._ask if plan is not None else None)
        self._choose, self._change_s, self._at_once = plan, change_s, at_once

    def _ask(self, look: FleetLook) -> WantedEngines:
        prefills = self._choose(look, int(numpy.sum(self._engines["goal"] == PREFILL)))
        return WantedEngines(prefills, len(self._engines) - prefills)

    def _order(self, now: float, wanted: WantedEngines, result: Run) -> None:
        """Those with the fewest requests change first."""
        engines = self._engines
        more = wanted.prefills - int(numpy.sum(engines["goal"] == PREFILL))
        old, new = (DECODE, PREFILL) if more > 0 else (PREFILL, DECODE)
        able = [number for number in range(len(engines)) if engines["role"][number] == old == engines["goal"][number]]
        able.sort(key=lambda number: engines["count"][number])
        room = self._at_once - int(numpy.sum(engines["role"] != engines["goal"]))
        for number in able[:max(0, min(abs(more), room))]:
            engines["goal"][number], engines["ready"][number] = new, now + self._change_s
            result.orders.append((now, WantedEngines(int(numpy.sum(engines["goal"] == PREFILL)),
                                                     int(numpy.sum(engines["goal"] == DECODE)))))
