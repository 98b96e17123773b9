# SPDX-License-Identifier: Apache-2.0
"""Whether an engine can do its part in disaggregation at present, and if not, why. Pure.

A degraded engine serves its clients by itself: answers stay right, time suffers. So it must say so (`vllm:pd_degraded`,
`/pd/status`, one line of the log), or nobody notices that nothing is handed over.
"""
from enum import StrEnum

import msgspec


class Cause(StrEnum):
    """Why an engine is degraded; a label of `vllm:pd_degraded`."""
    BROKER = "broker"  # it does not answer
    PEER = "peer"  # nobody is there for this engine to work with
    MISMATCH = "mismatch"  # somebody is, and does not fit
    CONTROL = "control"  # the control thread has ended


class Degraded(msgspec.Struct, frozen=True):
    """An engine is degraded. `detail` is for a human, and may change while the cause stays."""
    cause: Cause
    detail: str


class DegradedLog:
    """What the log is told: each cause once, after it has lasted for `patience_s`, as it does not at every start and
    restart of somebody; and its end."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._cause: Cause | None = None
        self._since = 0.0
        self._told: Cause | None = None

    def line(self, now: float, degraded: Degraded | None) -> str | None:
        """What is to be logged now, if anything. To be asked now and then."""
        cause = None if degraded is None else degraded.cause
        if cause != self._cause:
            self._cause, self._since = cause, now
        if cause == self._told or now - self._since < self._patience_s:
            return None
        self._told = cause
        if degraded is None:
            return "no longer degraded: prompts can be prefilled elsewhere again"
        return f"degraded ({cause}): {degraded.detail}; all prompts are prefilled where they arrive"
