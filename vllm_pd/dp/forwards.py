# SPDX-License-Identifier: Apache-2.0
"""The forward passes of an engine loop that may have several in flight, as its group counts them."""
from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm_pd.dp.interface import GroupMember


class Forwards:
    """Those of one rank. For the engine loop's thread only. True: some are in flight."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member
        self._unfinished: deque[Future] = deque()

    def __bool__(self) -> bool:
        return bool(self._unfinished)

    def run(self, most: int | None, run: Callable[..., Any], *args: Any) -> Any:
        """Run a forward pass of this rank's own: `run(*args)`. Returns its result, which may be a future. `most`: see
        `GroupMember.before_step`. Raises GroupFailed."""
        self._member.before_step(True, most)
        result = run(*args)
        if isinstance(result, Future):
            self._unfinished.append(result)
            self.count_ended()
        else:
            self._member.after_step()
        return result

    def count_ended(self) -> None:
        """Report each forward pass that has ended to the group, in the order in which they were begun."""
        while self._unfinished and self._unfinished[0].done():
            self._unfinished.popleft()
            self._member.after_step()

    def wait(self) -> None:
        """Wait for the forward passes in flight. All ranks have agreed to run them, so they end."""
        for future in self._unfinished:
            with contextlib.suppress(Exception):  # who takes the result gets it, too; or the executor was shut down
                future.result()  # some executors read an answer nowhere else
        self.count_ended()
