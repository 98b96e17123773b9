# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock stands still while the process does.

Where a test, what it tests and what that talks to share one loop, a machine that is busy with others holds up all of
them at once; but the clock goes on, and every limit that runs is over before anybody could keep it. In this loop it
goes on by `STEP_S` at most for each turn, however long that took, and by no more than it meant to wait before it.
"""
import asyncio
import selectors
import time

STEP_S = 0.01  # a turn seldom takes a tenth of it


class _Watched(selectors.DefaultSelector):
    """Tells the clock how long it was to wait."""

    def __init__(self, clock: "_Clock") -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list:
        self._clock.advance(STEP_S)
        try:
            return super().select(timeout)
        finally:
            self._clock.advance(max(0.0, timeout or 0.0) + STEP_S)


class _Clock:
    """Seconds, of which some do not count."""

    def __init__(self) -> None:
        self._counted_s = self._seen_s = time.monotonic()

    def advance(self, most_s: float) -> None:
        """What has passed since the last call counts, but no more than `most_s`."""
        now = time.monotonic()
        self._counted_s += min(now - self._seen_s, most_s)
        self._seen_s = now

    def time(self) -> float:
        return self._counted_s + min(time.monotonic() - self._seen_s, STEP_S)


class SteadyLoop(asyncio.SelectorEventLoop):
    """See above."""

    def __init__(self) -> None:
        self._steady = _Clock()
        super().__init__(_Watched(self._steady))

    def time(self) -> float:
        return self._steady.time()
