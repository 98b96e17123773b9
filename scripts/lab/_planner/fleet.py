# SPDX-License-Identifier: Apache-2.0
"""A fleet in simulated time to which an autoscaler adds prefill and decode engines, and takes them away.

Prompts wait in one queue, in the order in which they came. A prefill engine computes one at a time. A decode engine has
seats; all its requests get their tokens at the same pace, which is slower the more there are. What has no seat waits.
An engine that is added works after `start_s`; one that goes takes nothing new and finishes what it has. A request is
good if its first token and its mean time between tokens meet the targets.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy

from _planner.queues import DECODE, ENGINE, NEVER, OFF, PREFILL, TOTALS, advance
from vllm_pd.decisions.demand import FleetLook, Targets
from vllm_pd.decisions.wanted import WantedEngines

LOOK_S = 10.0
REST_S = 600.0  # after the last arrival


@dataclass(frozen=True)
class Machine:
    """One engine: prompt tokens a second, the ITL of r requests `base_s + slope_s * r`, and its seats."""
    tokens_per_s: float = 10_000.0
    base_s: float = 0.020
    slope_s: float = 0.00125
    seats: int = 48
    start_s: float = 120.0


@dataclass
class Run:
    """What became of a load. `good`: for each request. `engine_s`: seconds of engines that were there, those that start
    and end included. `orders`: (time, wanted) of each change."""
    good: numpy.ndarray
    engine_s: float = 0.0
    orders: list[tuple[float, WantedEngines]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Good requests, of all."""
        return float(self.good.mean())


class Fleet:
    """Begins with `first`. `plan` gets each look and returns what is wanted; without it nothing changes."""

    def __init__(self, first: WantedEngines, machine: Machine, targets: Targets,
                 plan: Callable[[FleetLook], WantedEngines] | None = None, most: int = 0) -> None:
        """`most`: engines of both roles together, those that end included."""
        self._machine, self._targets, self._plan, self._wanted = machine, targets, plan, first
        count = max(most, first.prefills + first.decodes)
        self._engines = numpy.zeros(count, ENGINE)
        self._engines["job"], self._engines["job_end"], self._engines["end"] = -1, NEVER, NEVER
        self._engines["role"] = OFF
        self._engines["role"][:first.prefills] = PREFILL
        self._engines["role"][first.prefills:first.prefills + first.decodes] = DECODE
        self._engines["goal"] = self._engines["role"]
        self._seats = numpy.zeros((count, machine.seats, 2))
        self._totals = numpy.zeros(1, TOTALS)
        self._before = self._totals.copy()

    def run(self, arrivals: numpy.ndarray) -> Run:
        """`arrivals`: (time, prompt tokens, answer tokens) in order."""
        requests = numpy.zeros((len(arrivals), 4))
        requests[:, :3] = arrivals
        fifo, result = numpy.zeros(len(arrivals), numpy.int64), Run(numpy.zeros(len(arrivals), numpy.bool_))
        one, end_s, before = self._machine, float(arrivals[-1, 0]), 0.0
        now = LOOK_S
        while True:
            advance(self._engines, self._seats, requests, fifo, self._totals, result.good, now, one.tokens_per_s,
                    one.base_s, one.slope_s, self._targets.ttft_s, self._targets.itl_s)
            if now > end_s:
                return result
            there = (self._engines["role"] != OFF) | (self._engines["goal"] != OFF)
            result.engine_s += float(there.sum()) * (now - before)
            if self._plan is not None:
                self._order(now, self._plan(self._look(now)), result)
            before, now = now, now + LOOK_S if now + LOOK_S <= end_s else end_s + REST_S

    def _look(self, now: float) -> FleetLook:
        engines, totals = self._engines, self._totals[0]
        added = {name: float(totals[name] - self._before[0][name]) for name in TOTALS.names[4:]}
        self._before = self._totals.copy()
        running = engines["count"][engines["count"] > 0]
        pace_s = self._machine.base_s + self._machine.slope_s * running
        works = engines["role"] == engines["goal"]
        return FleetLook(
            now, added["arrived"], added["prompt_tokens"], added["answers"], added["answer_tokens"],
            float(running.sum() / (running / pace_s).sum()) if len(running) else 0.0, added["first"], added["late"],
            float(running.sum()), float(totals["next"] - totals["head"]),
            max(len(running), int(numpy.sum(works & (engines["role"] == DECODE)))), self._machine.tokens_per_s,
            float(totals["arrived_tokens"] - totals["prompt_tokens"]), added["slow"])

    def _order(self, now: float, wanted: WantedEngines, result: Run) -> None:
        """Engines that still start are taken back first, then those with the fewest requests."""
        engines = self._engines
        for role, count in ((PREFILL, wanted.prefills), (DECODE, wanted.decodes)):
            more = count - int(numpy.sum(engines["goal"] == role))
            if more > 0:
                able = [number for number in range(len(engines))
                        if engines["role"][number] == OFF == engines["goal"][number]]
                engines["goal"][able[:more]], engines["ready"][able[:more]] = role, now + self._machine.start_s
            elif more < 0:
                able = [number for number in range(len(engines)) if engines["goal"][number] == role]
                able.sort(key=lambda number: (engines["role"][number] != OFF, engines["count"][number]))
                engines["goal"][able[:-more]], engines["ready"][able[:-more]] = OFF, now
        if wanted != self._wanted:
            self._wanted = wanted
            result.orders.append((now, wanted))
