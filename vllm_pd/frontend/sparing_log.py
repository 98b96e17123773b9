# SPDX-License-Identifier: Apache-2.0
"""Fewer log lines about clients: uvicorn writes one for each request that is not HTTP, which anybody can send."""
import logging
import time
from collections.abc import Callable

PERIOD_S = 60.0
MALFORMED = "Invalid HTTP request received."  # uvicorn's message


class OncePerPeriod(logging.Filter):
    """Lets records with this message pass once in `PERIOD_S`; that one says how many did not since the last."""

    def __init__(self, message: str, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._message = message
        self._now = now
        self._next_s = float("-inf")
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written. logging calls this."""
        if record.msg != self._message:
            return True
        now_s = self._now()
        if now_s < self._next_s:
            self._dropped += 1
            return False
        if self._dropped:
            record.msg = f"{self._message} ({self._dropped} more since the last such line)"
        self._next_s, self._dropped = now_s + PERIOD_S, 0
        return True


malformed = OncePerPeriod(MALFORMED)  # for uvicorn's logger, of which a process has one
