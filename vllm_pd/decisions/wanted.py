# SPDX-License-Identifier: Apache-2.0
"""How many prefill and decode engines a fleet wants, for an autoscaler. Pure.

More are wanted at once when two looks in a row ask for them; fewer when none of the looks of `hold_s` asked for as
many.
"""
import math
from collections import deque

import msgspec

from vllm_pd.decisions.demand import Demand, Targets

HELD_LOOKS = 4096
LATE = 0.05  # of first tokens: with more, and no queue, the prompts come in crowds
LATE_FACTOR = 1.25


class WantedBounds(msgspec.Struct, frozen=True):
    """`use`: how busy an engine is to be, of 1. At least `least` of a role and at most `most`."""
    use: float = 0.8
    hold_s: float = 300.0
    least: int = 1
    most: int = 64


class WantedEngines(msgspec.Struct, frozen=True):
    """Of each role."""
    prefills: int
    decodes: int


def engines_now(demand: Demand, targets: Targets, bounds: WantedBounds) -> WantedEngines:
    """What this demand alone asks for: its work, and what waits or runs beyond what it explains, which an engine of
    each role more is to get done within the target. Late first tokens ask for more prefill."""
    backlog_s = max(0.0, demand.waiting - demand.requests_per_s * targets.ttft_s) * demand.prefill_s
    prefill = demand.prefill_engines() + backlog_s / bounds.hold_s
    if demand.late > LATE:
        prefill *= LATE_FACTOR
    decode = max(demand.decode_engines(targets.itl_s), demand.running / demand.seats(targets.itl_s))
    return WantedEngines(_count(prefill / bounds.use, bounds), _count(decode / bounds.use, bounds))


def _count(engines: float, bounds: WantedBounds) -> int:
    return int(min(bounds.most, max(bounds.least, math.ceil(min(engines, float(bounds.most)) - 1e-9))))


class WantedCounter:
    """The wanted engines over time. Owned by one caller."""

    def __init__(self, targets: Targets, bounds: WantedBounds) -> None:
        self._targets, self._bounds = targets, bounds
        self._prefills, self._decodes = _Held(bounds.hold_s), _Held(bounds.hold_s)

    def receive(self, demand: Demand) -> WantedEngines:
        """What is wanted after this demand."""
        now = engines_now(demand, self._targets, self._bounds)
        return WantedEngines(self._prefills.receive(demand.at_s, now.prefills),
                             self._decodes.receive(demand.at_s, now.decodes))


class _Held:
    """One number: what two looks in a row ask for goes up at once, and down when it was not needed for `hold_s`."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._asked: deque[tuple[float, int]] = deque(maxlen=HELD_LOOKS)
        self._last: int | None = None

    def receive(self, at_s: float, asked: int) -> int:
        twice = asked if self._last is None else min(asked, self._last)
        self._last = asked
        while self._asked and self._asked[0][0] < at_s - self._hold_s:
            self._asked.popleft()
        self._asked.append((at_s, twice))
        return max(number for _, number in self._asked)
