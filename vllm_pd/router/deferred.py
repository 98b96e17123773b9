# SPDX-License-Identifier: Apache-2.0
"""Prompts that were sent with only their first blocks known: for each, the way to the others, should they be asked for.

They are asked for when another prompt begins with the same blocks, before the engine's events can have told of them.
"""
import asyncio
import collections
from collections.abc import Awaitable, Callable, Sequence

MAX_OPENINGS = 1000  # each holds a request of 64 KiB at most

Rest = Callable[[], Awaitable[None]]


class DeferredPrompt:
    """One such prompt. `rest` is called once at most, and may not raise."""

    def __init__(self, last_block: int, rest: Rest) -> None:
        self.last_block = last_block
        self.rest = rest
        self.until_s = 0.0
        self.task: asyncio.Task | None = None


class DeferredPrompts:
    """By the last block that is known. Belongs to the router's event loop."""

    def __init__(self) -> None:
        self._opened: collections.OrderedDict[int, DeferredPrompt] = collections.OrderedDict()  # first to go first
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._opened)

    def put(self, opening: DeferredPrompt, until_s: float) -> None:
        """Keep it until then, on the loop's clock, and no longer than there is room. One that begins alike and is there
        already stays."""
        there = self._opened.get(opening.last_block, opening)
        if opening.task is not None or there is not opening and there.until_s > self._loop.time():
            return
        opening.until_s = until_s
        self._opened[opening.last_block] = opening
        self._opened.move_to_end(opening.last_block)
        while len(self._opened) > MAX_OPENINGS:
            self._opened.popitem(last=False)
        if self._timer is None:
            self._timer = self._loop.call_at(until_s, self._expire)

    def go_on(self, hashes: Sequence[int]) -> list[asyncio.Task]:
        """What is under way, or begun hereby, of all those that begin as this prompt does."""
        if not self._opened or self._opened.keys().isdisjoint(hashes):
            return []
        now_s = self._loop.time()
        opened = [self._opened[name] for name in hashes if name in self._opened]
        for opening in opened:
            if opening.task is None and opening.until_s > now_s:
                opening.task = self._loop.create_task(opening.rest())
                opening.task.add_done_callback(lambda _, opening=opening: self._done(opening))
        return [opening.task for opening in opened if opening.task is not None]

    def close(self) -> None:
        """Forget all."""
        self._opened.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _done(self, opening: DeferredPrompt) -> None:
        if self._opened.get(opening.last_block) is opening:
            del self._opened[opening.last_block]

    def _expire(self) -> None:
        self._timer = None
        while self._opened and (first := next(iter(self._opened.values()))).until_s <= self._loop.time():
            self._done(first)
        if self._opened:
            self._timer = self._loop.call_at(first.until_s, self._expire)
