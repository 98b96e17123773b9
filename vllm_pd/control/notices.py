# SPDX-License-Identifier: Apache-2.0
"""When an engine is to look for the notices of transfers into its blocks, which only it can see. Pure.

While a P writes it looks often, for the transport makes no progress of its own: most often at the beginning, where the
write of a short prompt ends, less often later. While a P computes it looks only in case the message that it writes got
lost.
"""
SHORT_WRITE_POLL_S = 0.001
SHORT_WRITE_S = 0.010
WRITING_POLL_S = 0.002
LONG_WRITE_POLL_S = 0.020
LONG_WRITE_S = 2.0
WORKING_POLL_S = 0.100


class Notices:
    """`next_look` is when the engine is next to be woken for a look; None where it need not be."""

    def __init__(self) -> None:
        self.next_look: float | None = None

    def look_soon(self, now: float) -> None:
        """A P writes, or has written."""
        self.next_look = now

    def are_due(self, now: float, writing_since: float | None) -> bool:
        """Whether the engine is to look now. To be asked at least at `next_look`; `writing_since` is the protocol's."""
        after = _next_look(now, writing_since)
        if after is None or self.next_look is None:
            self.next_look = after
            return False
        if now < self.next_look:
            return False
        self.next_look = after
        return True


def _next_look(now: float, writing_since: float | None) -> float | None:
    """When to look after a look at `now`; None where nobody may write."""
    if writing_since is None:
        return None
    if writing_since == float("-inf"):
        return now + WORKING_POLL_S
    if now - writing_since < SHORT_WRITE_S:
        return now + SHORT_WRITE_POLL_S
    return now + (WRITING_POLL_S if now - writing_since < LONG_WRITE_S else LONG_WRITE_POLL_S)
