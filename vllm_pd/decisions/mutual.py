# SPDX-License-Identifier: Apache-2.0
"""How engines avoid waiting for each other in a circle.

An engine that both decodes and prefills holds seats and blocks for its own parked requests, which wait for jobs at
other engines. A peer's job that waits here for those seats or blocks, or behind a request that does, waits for another
engine, which may have jobs that wait in the same way. So a job never waits for what is parked: it is given back, and
its owner tries another engine or computes the prompt itself. What is left to wait for ends by itself: running requests
and transfers.
"""
from __future__ import annotations

from collections.abc import Collection

from vllm_pd.protocol.messages import Attempt

BLOCKED_S = 1.0  # while something runs, which may end and make room


class JobPatience:
    """How long the peers' jobs of one engine may wait for their first step. Pure."""

    def __init__(self) -> None:
        self._since: dict[Attempt, float] = {}  # jobs that were passed over, and when they first were

    def scheduled(self, now: float, passed_over: Collection[Attempt]) -> None:
        """A step was scheduled. `passed_over`: the jobs that go on waiting, where it began no prompt and requests of
        this engine are parked, or their blocks are quarantined; otherwise none."""
        self._since = {attempt: self._since.get(attempt, now) for attempt in passed_over}

    def take_over(self, now: float, moving: bool, waiting: Collection[Attempt]) -> list[Attempt]:
        """The jobs of `waiting` to give back now, each once; never one that no step has tried. `moving`: a request
        runs here, or a transfer does."""
        self._since = {attempt: since for attempt, since in self._since.items() if attempt in waiting}
        over = [attempt for attempt, since in self._since.items() if not moving or now >= since + BLOCKED_S]
        for attempt in over:
            del self._since[attempt]
        return over

    def next_look(self) -> float | None:
        """When the next job has waited long enough, whatever moves then."""
        return min(self._since.values()) + BLOCKED_S if self._since else None
