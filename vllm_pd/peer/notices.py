# SPDX-License-Identifier: Apache-2.0
"""When an engine is to look for the notices of transfers into its blocks, which only it can see. Pure.

While a P writes it looks often, for the transport makes no progress of its own: most often at the beginning, where the
write of a short prompt ends, less often later. While a P computes it looks only in case the message that it writes got
lost.
"""
from typing import NamedTuple

SHORT_WRITE_POLL_S = 0.001
SHORT_WRITE_S = 0.010
WRITING_POLL_S = 0.002
LONG_WRITE_POLL_S = 0.020
LONG_WRITE_S = 2.0
WORKING_POLL_S = 0.100
LONG_WATCH_S = 1.0  # the pauses begin anew, short ones, with each watch


class Watch(NamedTuple):
    """Look now, and go on for `lasts_s` with pauses of at most `pause_s`. `lasts_s` 0: look once."""
    pause_s: float
    lasts_s: float


class Notices:
    """`next_look` is when the engine is next to be asked to look; None where it need not be. `lasting`: the engine can
    go on looking by itself, so it is asked again only when a `Watch` ends."""

    def __init__(self, lasting: bool = False) -> None:
        self.next_look: float | None = None
        self._lasting = lasting

    def look_soon(self, now: float) -> None:
        """A P writes, or has written."""
        self.next_look = now

    def take_due(self, now: float, writing_since: float | None) -> Watch | None:
        """How the engine is to look from now on; None where nothing new is due. To be asked at least at `next_look`.
        `writing_since` is the protocol's."""
        watch = self._watch(now, writing_since)
        due = watch is not None and self.next_look is not None and now >= self.next_look
        if watch is None:
            self.next_look = None
        elif due or self.next_look is None:
            self.next_look = now + max(watch)
        return watch if due else None

    def _watch(self, now: float, writing_since: float | None) -> Watch | None:
        """How to look from `now` on; None where nobody may write."""
        if writing_since is None:
            return None
        age_s = now - writing_since
        if writing_since == float("-inf"):
            return Watch(WORKING_POLL_S, 0.0)
        if age_s < SHORT_WRITE_S:
            return Watch(SHORT_WRITE_POLL_S, SHORT_WRITE_S if self._lasting else 0.0)
        if age_s < LONG_WRITE_S:
            return Watch(WRITING_POLL_S, WORKING_POLL_S if self._lasting else 0.0)
        return Watch(LONG_WRITE_POLL_S, LONG_WATCH_S if self._lasting else 0.0)
