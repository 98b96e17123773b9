# SPDX-License-Identifier: Apache-2.0
"""Find ranks that are silent for too long while there is something to do. Pure: the caller passes the time in.

Do not blame other ranks right after this process was suspended: if a check comes much later than planned, all times
start again.
"""
from typing import NamedTuple

SHUTDOWN_SPREAD_S = 1.0  # a signal to end reaches all processes of a group within that time


class LivenessFailure(NamedTuple):
    """What is wrong, and with which rank. `rank` is None if no single rank is to blame."""
    rank: int | None
    text: str


class GroupLiveness:
    """Watches `ranks`, which do not include this process's own. It watches nobody while the group is quiet."""

    def __init__(self, ranks: list[int], timeout_s: float, stall_s: float):
        self.beat_s = timeout_s / 4
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._heard = dict.fromkeys(ranks, 0.0)
        self._checked: float | None = None
        self._progress = -1
        self._progressed = 0.0

    def reset(self) -> None:
        """There is nothing to do: forget all times."""
        self._checked = None

    def heard(self, rank: int, now: float) -> None:
        """That rank gave a sign of life at `now`."""
        self._heard[rank] = now

    def check(self, now: float, progress: int, steps: bool = True) -> LivenessFailure | None:
        """Return what is wrong, if anything. Call this at least every `beat_s` while there is something to do.

        `now` is in seconds. `progress` is any number that changes whenever a forward ends. `steps`: there are forwards
        to run, so `progress` must change.
        """
        late = self._checked is None or now - self._checked > 2 * self.beat_s
        self._checked = now
        if late:
            self._heard = dict.fromkeys(self._heard, now)
        if late or progress != self._progress or not steps:
            self._progress, self._progressed = progress, now
        for rank, heard in self._heard.items():
            if now - heard > self._timeout_s:
                return LivenessFailure(rank, f"no answer for {now - heard:.1f} s (timeout_s={self._timeout_s:g})")
        stalled_s = now - self._progressed
        if stalled_s > self._stall_s:
            return LivenessFailure(None, f"no forward has ended for {stalled_s:.0f} s (stall_s={self._stall_s:g}), "
                                         f"although all processes are alive: find the rank that is stuck outside of "
                                         f"its step loop")
        return None
