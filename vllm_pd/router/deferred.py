# SPDX-License-Identifier: Apache-2.0
"""Deferred prompts: requests that were placed after tokenising only their first blocks.

Why: to tokenise a prompt of 10,000 new tokens takes 12 ms, its first three blocks 0.1 ms. Where no worker holds even
those first blocks, none holds what follows them, so the rest can't change the choice. This keeps what the router adds
with the policy `kv` below twice what the fastest comparable router adds, which is the goal (docs/router.md, "Measured":
1.6 and 1.4 times; 2.1 to 2.3 times when every prompt was tokenised whole).

The rest is needed only if another prompt with the same first blocks comes before the worker's KV events have reported
the blocks of the first one. Then the deferred prompt is finished: all of it is tokenised and expected on its worker,
so that the second prompt sees the true overlap. `Placer` does that; here the deferred prompts wait, for the time in
which blocks are expected, `MAX_DEFERRED` of them at most.
"""
import asyncio
import collections
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

MAX_DEFERRED = 1000  # each holds a request of 64 KiB at most

Finish = Callable[[], Awaitable[None]]


@dataclass(eq=False)
class DeferredPrompt:
    """One such prompt. `last_block` names the last of its blocks that are known. `finish` tokenises the rest; it is
    called at most once, in `task`, and must not raise."""
    last_block: int
    finish: Finish
    until_s: float = 0.0
    task: asyncio.Task | None = None


class DeferredPrompts:
    """The deferred prompts of a router, by their last known block. Belongs to the router's event loop."""

    def __init__(self) -> None:
        self._by_block: collections.OrderedDict[int, DeferredPrompt] = collections.OrderedDict()  # by age
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._by_block)

    def add(self, prompt: DeferredPrompt, until_s: float) -> None:
        """Keep it until `until_s` on the loop's clock; beyond MAX_DEFERRED the oldest is dropped. Where another one
        with the same last block is kept already, that one stays and this one is ignored."""
        kept = self._by_block.get(prompt.last_block, prompt)
        if prompt.task is not None or kept is not prompt and kept.until_s > self._loop.time():
            return
        prompt.until_s = until_s
        self._by_block[prompt.last_block] = prompt
        self._by_block.move_to_end(prompt.last_block)
        while len(self._by_block) > MAX_DEFERRED:
            self._by_block.popitem(last=False)
        if self._timer is None:
            self._timer = self._loop.call_at(until_s, self._expire)

    def finish_matching(self, hashes: Sequence[int]) -> list[asyncio.Task]:
        """Finish each deferred prompt whose last known block is among `hashes`, the blocks of another prompt. Returns
        the tasks that do it, those that had begun before included."""
        if not self._by_block or self._by_block.keys().isdisjoint(hashes):
            return []
        now_s = self._loop.time()
        matching = [self._by_block[name] for name in hashes if name in self._by_block]
        for prompt in matching:
            if prompt.task is None and prompt.until_s > now_s:
                prompt.task = self._loop.create_task(prompt.finish())
                prompt.task.add_done_callback(lambda _, prompt=prompt: self._remove(prompt))
        return [prompt.task for prompt in matching if prompt.task is not None]

    def close(self) -> None:
        """Forget all."""
        self._by_block.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _remove(self, prompt: DeferredPrompt) -> None:
        if self._by_block.get(prompt.last_block) is prompt:
            del self._by_block[prompt.last_block]

    def _expire(self) -> None:
        self._timer = None
        while self._by_block and (oldest := next(iter(self._by_block.values()))).until_s <= self._loop.time():
            self._remove(oldest)
        if self._by_block:
            self._timer = self._loop.call_at(oldest.until_s, self._expire)
