# SPDX-License-Identifier: Apache-2.0
"""Which requests wait for blocks of other hosts, pure: each for `wait_s` at most, whatever the hosts do."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_pd.store.beyond.fetches import BlockFetches

GRACE_S = 1.0  # a request that V1 has no room to look at is not waited with for longer


class WaitAnswer(Enum):
    """What a request is to do."""
    WAIT = "wait"  # ask again
    LOOK = "look"  # blocks may have come: look at the store anew, and go on with what is there
    GO_ON = "go on"


@dataclass
class _Wait:
    until_s: float
    fetch: int | None  # None: it waits no more
    is_joined: bool  # the fetch is another request's


class RequestWaits:
    """The requests of one engine. Its caller locks it together with `fetches`."""

    def __init__(self, fetches: BlockFetches, wait_s: float) -> None:
        self._fetches, self._wait_s = fetches, wait_s
        self._waits: dict[str, _Wait] = {}

    def __len__(self) -> int:
        return sum(wait.fetch is not None for wait in self._waits.values())

    def any_at(self, now: float) -> bool:
        """Whether any request waits, or has until a moment ago and is to be asked for once more."""
        return any(wait.fetch is not None and now < wait.until_s + GRACE_S for wait in self._waits.values())

    def needs_names(self, now: float, request_id: str) -> bool:
        """Whether `ask` is going to call `find_absent`."""
        wait = self._waits.get(request_id)
        return wait is None or (wait.fetch is not None and wait.is_joined and now < wait.until_s
                                and not self._fetches.is_open(wait.fetch))

    def ask(self, now: float, request_id: str, find_absent: Callable[[], Sequence[bytes]]) -> WaitAnswer:
        """Whether the request waits. `find_absent`: the names of the blocks that it lacks, if it is to be known. A
        request that has waited for its own fetch, or for so long, does not wait again."""
        wait = self._waits.get(request_id)
        if wait is None:
            self._waits[request_id] = wait = _Wait(now + self._wait_s, None, False)
            return self._begin(now, wait, find_absent, WaitAnswer.GO_ON)
        if wait.fetch is None:
            return WaitAnswer.GO_ON
        if now < wait.until_s and self._fetches.is_open(wait.fetch):
            return WaitAnswer.WAIT
        self._fetches.leave(now, wait.fetch)
        wait.fetch = None
        if wait.is_joined and now < wait.until_s:
            return self._begin(now, wait, find_absent, WaitAnswer.LOOK)
        return WaitAnswer.LOOK

    def end(self, now: float, request_id: str) -> None:
        """The request has ended."""
        wait = self._waits.pop(request_id, None)
        if wait is not None and wait.fetch is not None:
            self._fetches.leave(now, wait.fetch)

    def end_all(self, now: float) -> None:
        """No request waits any more."""
        for request_id in list(self._waits):
            self.end(now, request_id)

    def _begin(self, now: float, wait: _Wait, find_absent: Callable[[], Sequence[bytes]],
               otherwise: WaitAnswer) -> WaitAnswer:
        names = find_absent()
        wait.fetch, wait.is_joined = self._fetches.begin(now, names) if names else (None, False)
        return otherwise if wait.fetch is None else WaitAnswer.WAIT
