# SPDX-License-Identifier: Apache-2.0
"""How fast prompts that come back from a lost prefill engine are prefilled here.

When a prefill engine dies, every prompt that it had comes back at once, and V0 runs prefills before decodes: the
requests that stream at that moment would get no token until the last of them is computed. So those that came back are
let in batch by batch: after one that took t seconds the others have `t * (1 - share) / share` for themselves. No prompt
waits for ever: with n batches of t seconds the last begins after less than `n * t / share`.
"""


class FallbackPace:
    """One per decode engine. `share` is the part of the time that fallbacks may take while others run, above 0, at
    most 1 (no limit). Times are seconds of the caller's clock."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._began_at: float | None = None
        self._rest_until = float("-inf")

    def may_begin(self, now: float, others_run: bool) -> bool:
        """Whether the next batch may be let in. `others_run`: a running request would have to wait for it."""
        return self._began_at is None and (not others_run or now >= self._rest_until)

    def began(self, now: float) -> None:
        """A batch was let in."""
        self._began_at = now

    def ended(self, now: float) -> None:
        """All of that batch is computed, or gone. Without a batch: no effect."""
        if self._began_at is not None:
            self._rest_until = now + max(0.0, now - self._began_at) * (1 - self._share) / self._share
            self._began_at = None
