# SPDX-License-Identifier: Apache-2.0
"""Whether an engine can do its part in disaggregation at present, and if not, why. Pure.

A degraded engine serves its clients by itself: answers stay right, latency suffers. So it reports it
(`vllm:pd_degraded`, `/pd/status`, one line of the log), or nobody would notice that nothing is handed over.
"""
from enum import StrEnum

import msgspec


class DegradedReason(StrEnum):
    """Why an engine is degraded; a label of `vllm:pd_degraded`."""
    BROKER = "broker"  # it does not answer
    PEER = "peer"  # there is no engine to work with
    MISMATCH = "mismatch"  # there is one, and it does not fit
    CONTROL = "control"  # the control thread has ended
    WEIGHTS = "weights"  # its weights were replaced
    ADDRESS = "address"  # its machine does not have its address any more
    AGENTS = "agents"  # it is in doubt about its transfer agents, and can make no others


class Degraded(msgspec.Struct, frozen=True):
    """An engine is degraded. `detail` is for a human, and may change while the reason stays."""
    reason: DegradedReason
    detail: str


class DegradedLog:
    """When to log a change. Each reason once, after it has lasted for `after_s`, so that no start or restart of an
    engine is logged; and its end."""

    def __init__(self, after_s: float):
        self._after_s = after_s
        self._reason: DegradedReason | None = None
        self._since = 0.0
        self._logged: DegradedReason | None = None

    def line(self, now: float, degraded: Degraded | None) -> str | None:
        """The line to log now; None where there is nothing to log. To be called at each turn."""
        reason = None if degraded is None else degraded.reason
        if reason != self._reason:
            self._reason, self._since = reason, now
        if reason == self._logged or now - self._since < self._after_s:
            return None
        self._logged = reason
        if degraded is None:
            return "no longer degraded: prompts can be prefilled elsewhere again"
        return f"degraded ({reason}): {degraded.detail}; all prompts are prefilled where they arrive"
