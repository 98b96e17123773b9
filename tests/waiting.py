# SPDX-License-Identifier: Apache-2.0
"""Waiting until something holds, up to a deadline that a busy machine keeps too."""
import asyncio
import time
from collections.abc import Callable

WAIT_S = 300.0
PAUSE_S = 0.01


def wait_for(holds: Callable[[], object], what: object = "it does not happen", timeout_s: float = WAIT_S,
             meanwhile: Callable[[], object] = lambda: time.sleep(PAUSE_S)) -> None:
    """Returns once `holds()` is true; until then it calls `meanwhile` again and again. After `timeout_s` it raises
    AssertionError with `what`, or with the result of `what()`."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        _check(deadline_s, what)
        meanwhile()


async def becomes(holds: Callable[[], object], what: object = "it does not happen", timeout_s: float = WAIT_S) -> None:
    """As `wait_for`, in an event loop."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        _check(deadline_s, what)
        await asyncio.sleep(PAUSE_S)


def _check(deadline_s: float, what: object) -> None:
    assert time.monotonic() < deadline_s, what() if callable(what) else what
