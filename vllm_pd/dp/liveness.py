# SPDX-License-Identifier: Apache-2.0
"""Who has been silent for too long, while there are steps to run. Pure: the time is passed in.

A process that was stopped itself must not blame the others for it: whoever looks much later than it meant to begins
anew.
"""
from typing import NamedTuple

TOLD_S = 1.0  # processes that are told to end together are all told within that


class Finding(NamedTuple):
    """What is wrong, and with which rank (None: nobody in particular)."""
    rank: int | None
    text: str


class Liveness:
    """Watches `ranks` (others than one's own). In a quiet group nobody is watched."""

    def __init__(self, ranks: list[int], timeout_s: float, stall_s: float):
        self.beat_s = timeout_s / 4
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._heard = dict.fromkeys(ranks, 0.0)
        self._looked: float | None = None
        self._progress = -1
        self._progressed = 0.0

    def quiet(self) -> None:
        """There is nothing to run: forget."""
        self._looked = None

    def heard(self, rank: int, now: float) -> None:
        """The rank is alive."""
        self._heard[rank] = now

    def look(self, now: float, progress: int, steps: bool = True) -> Finding | None:
        """To be called at least every `beat_s` while there is something to do; `progress` is a number that moves as
        long as forwards end, where there are `steps` to run. Returns what is wrong, if anything."""
        late = self._looked is None or now - self._looked > 2 * self.beat_s
        self._looked = now
        if late:
            self._heard = dict.fromkeys(self._heard, now)
        if late or progress != self._progress or not steps:
            self._progress, self._progressed = progress, now
        for rank, heard in self._heard.items():
            if now - heard > self._timeout_s:
                return Finding(rank, f"no answer for {now - heard:.1f} s (timeout_s={self._timeout_s:g})")
        if now - self._progressed > self._stall_s:
            return Finding(None, f"no forward has ended for {now - self._progressed:.0f} s (stall_s={self._stall_s:g}) "
                                 f"although all processes live: look for a rank that is stuck outside of its step loop")
        return None
