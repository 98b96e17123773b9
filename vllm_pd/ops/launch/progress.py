# SPDX-License-Identifier: Apache-2.0
"""How long a start is waited for. A process that prints lines makes progress, perhaps on a slow machine, and gets more
time than one that prints none."""

QUIET_S = 60.0  # a start that prints nothing for so long makes no progress
LONGEST_START = 4  # times what a start was given: a process may print lines for ever


class StartProgress:
    """Whether a start that began at `began_s` and was given `timeout_s` is still to be waited for, by the lines that
    its processes have printed: for longer, while a line comes in each QUIET_S or `timeout_s`, whichever is shorter, but
    no more than LONGEST_START times `timeout_s`. Times are in seconds of one clock. `limit_s`: the one that counts."""

    def __init__(self, began_s: float, timeout_s: float) -> None:
        self._began_s, self._timeout_s = began_s, timeout_s
        self._printed, self._last_s, self._now_s = 0, began_s, began_s
        self.limit_s = timeout_s

    def see(self, printed: int, now_s: float) -> None:
        """By now there are so many lines."""
        self._now_s = now_s
        if printed != self._printed:
            self._printed, self._last_s = printed, now_s
        moves = self._printed > 0 and now_s - self._last_s < min(QUIET_S, self._timeout_s)
        self.limit_s = self._timeout_s * (LONGEST_START if moves else 1)

    @property
    def waited_s(self) -> float:
        """Since it began."""
        return self._now_s - self._began_s

    @property
    def has_stopped(self) -> bool:
        """Whether it is to be given up."""
        return self.waited_s > self.limit_s
