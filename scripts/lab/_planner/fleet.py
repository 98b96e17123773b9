# SPDX-License-Identifier: Apache-2.0
"""A fleet of engines in simulated time, each of which prefills or decodes, and changes between the two.

Prompts wait in one queue, in the order in which they came. A prefill engine computes one at a time. A decode engine has
seats; all its requests get their tokens at the same pace, which is slower the more there are. What has no seat waits.
An engine that changes takes nothing new, finishes what it has, and works again `change_s` after the order at the
earliest. A request is good if its first token and its mean time between tokens meet the targets.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
from _planner.queues import DECODE, ENGINE, NEVER, PREFILL, TOTALS, advance

from vllm_pd.decisions.demand import FleetLook, Targets

LOOK_S = 10.0
REST_S = 600.0  # after the last arrival


@dataclass(frozen=True)
class Machine:
    """One engine: prompt tokens a second, the ITL of r requests `base_s + slope_s * r`, and its seats."""
    tokens_per_s: float = 10_000.0
    base_s: float = 0.020
    slope_s: float = 0.00125
    seats: int = 48
    change_s: float = 30.0


@dataclass
class Run:
    """What became of a load. `good`: for each request. `splits`: (time, prefill engines) of each order."""
    good: numpy.ndarray
    changes: int = 0
    splits: list[tuple[float, int]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Good requests, of all."""
        return float(self.good.mean())


class Fleet:
    """`count` engines, of which the first `prefills` prefill. `plan` gets each look and returns how many are to."""

    def __init__(self, count: int, prefills: int, machine: Machine, targets: Targets,
                 plan: Callable[[FleetLook], int] | None = None) -> None:
        self._machine, self._targets, self._plan = machine, targets, plan
        self._engines = numpy.zeros(count, ENGINE)
        self._engines["job"], self._engines["job_end"], self._engines["end"] = -1, NEVER, NEVER
        self._engines["role"][prefills:] = DECODE
        self._engines["goal"] = self._engines["role"]
        self._seats = numpy.zeros((count, machine.seats, 2))
        self._totals = numpy.zeros(1, TOTALS)
        self._before = self._totals.copy()
        self._prefills = prefills

    def run(self, arrivals: numpy.ndarray) -> Run:
        """`arrivals`: (time, prompt tokens, answer tokens) in order."""
        requests = numpy.zeros((len(arrivals), 4))
        requests[:, :3] = arrivals
        fifo, result = numpy.zeros(len(arrivals), numpy.int64), Run(numpy.zeros(len(arrivals), numpy.bool_))
        result.splits.append((0.0, self._prefills))
        one, end_s = self._machine, float(arrivals[-1, 0])
        now = LOOK_S if self._plan else end_s + REST_S
        while True:
            advance(self._engines, self._seats, requests, fifo, self._totals, result.good, now, one.tokens_per_s,
                    one.base_s, one.slope_s, self._targets.ttft_s, self._targets.itl_s)
            if now > end_s:
                return result
            self._order(now, self._plan(self._look(now)), result)
            now = now + LOOK_S if now + LOOK_S <= end_s else end_s + REST_S

    def _look(self, now: float) -> FleetLook:
        engines, totals = self._engines, self._totals[0]
        added = {name: float(totals[name] - self._before[0][name]) for name in TOTALS.names[4:]}
        self._before = self._totals.copy()
        running = engines["count"][engines["count"] > 0]
        pace_s = self._machine.base_s + self._machine.slope_s * running
        works = engines["role"] == engines["goal"]
        return FleetLook(
            now, added["arrived"], added["prompts"], added["prompt_tokens"], added["answers"], added["answer_tokens"],
            float(running.sum() / (running / pace_s).sum()) if len(running) else 0.0, added["first"], added["late"],
            float(running.sum()), float(totals["next"] - totals["head"]),
            int(numpy.sum(works & (engines["role"] == PREFILL))),
            max(len(running), int(numpy.sum(works & (engines["role"] == DECODE)))), self._machine.tokens_per_s,
            float(totals["arrived_tokens"] - totals["prompt_tokens"]), added["slow"])

    def _order(self, now: float, prefills: int, result: Run) -> None:
        """Engines that change are left to it; those with the fewest requests go first."""
        engines = self._engines
        more = prefills - int(numpy.sum(engines["goal"] == PREFILL))
        old, new = (DECODE, PREFILL) if more > 0 else (PREFILL, DECODE)
        able = [number for number in range(len(engines)) if engines["role"][number] == old == engines["goal"][number]]
        able.sort(key=lambda number: engines["count"][number])
        for number in able[:abs(more)]:
            engines["goal"][number], engines["ready"][number] = new, now + self._machine.change_s
            result.changes += 1
        if able and more:
            result.splits.append((now, int(numpy.sum(engines["goal"] == PREFILL))))
