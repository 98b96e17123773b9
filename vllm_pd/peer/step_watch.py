# SPDX-License-Identifier: Apache-2.0
"""Whether the engine's step loop still asks for its events. Pure.

The control thread renews leases and sends heartbeats by itself, also for an engine that hangs in a step: a device that
does not answer, a rank that is stopped. An engine that has something to do asks between two steps. One that sleeps, or
whose steps have nothing to do with its peers, asks once it is woken.
"""

# A step lasts less: on a CPU a long prompt that is computed whole takes some tens of seconds.
HUNG_S = 60.0


class StepWatch:
    """`hangs`: for `HUNG_S` there was something open, and the engine has not asked for events. In the middle of this
    time it was woken, so that `check` after a pause of this whole process takes no engine for one that hangs."""

    def __init__(self) -> None:
        self.hangs = False
        self._open_since: float | None = None  # and the engine has not asked since
        self._woken_at: float | None = None

    def asked(self) -> None:
        """The engine has asked for events."""
        self.hangs = False
        self._open_since = self._woken_at = None

    def check(self, now: float, is_open: bool) -> bool:
        """`is_open`: there are events, or jobs of peers. Returns whether the engine is to be woken."""
        if not is_open:
            self.asked()
        elif self._open_since is None:
            self._open_since = now
        elif self._woken_at is None:
            if now - self._open_since >= HUNG_S / 2:
                self._woken_at = now
                return True
        else:
            self.hangs = now - self._woken_at >= HUNG_S / 2
        return False
