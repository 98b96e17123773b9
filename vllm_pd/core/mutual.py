# SPDX-License-Identifier: Apache-2.0
"""Why no two engines, and no ring of them, wait for each other.

An engine that both decodes and prefills holds seats and blocks for its own parked requests, which wait for jobs at
other engines. A peer's job that waits here for those seats or blocks, or behind a request that does, waits for another
engine, which may have jobs that wait in the same way. So a job never waits for what is parked: it is given back, and
its owner tries another engine or computes the prompt itself. What is left to wait for ends by itself: running requests
and transfers.
"""

BLOCKED_S = 1.0  # while something runs, which may end and make room


class JobPatience:
    """How long the peers' jobs of one engine may wait for their first step. Pure."""

    def __init__(self) -> None:
        self._blocked_since: float | None = None

    def scheduled(self, now: float, blocked: bool) -> None:
        """A step was scheduled. `blocked`: it began no prompt although a job waits, and requests of this engine are
        parked, or their blocks are quarantined."""
        if not blocked:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now

    def is_over(self, now: float, moving: bool) -> bool:
        """Whether the jobs that wait are to be given back. `moving`: a request runs here, or a transfer does."""
        since = self._blocked_since
        return since is not None and (not moving or now - since >= BLOCKED_S)
