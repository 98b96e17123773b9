# SPDX-License-Identifier: Apache-2.0
"""Takes the changes of V0's prefix cache from the block allocator, and passes them to the thread that announces them.

Life of a block: it is *registered* when it is full, which is before its KV exists. It is *computed* when the step that
fills it is scheduled, or when the peer that fills it is done. It may be announced when that step is over.

The allocator calls `registered`, `computed`, `removed` and `cleared`, the scheduler calls `begin_step`, all in the
engine's own thread; none of them waits. Changes go into a dictionary of all held blocks, the *ledger*, and into a
bounded queue. The announcing thread takes them with `take`. If it falls too far behind, the queue is discarded and
counted, and `take` returns the whole ledger instead. So nothing is lost for good, and the ledger is never larger than
the block pool.

Both threads use these containers without a lock. That relies on operations that CPython does atomically: appending to
and popping from a deque, and copying a dictionary's values into a list.
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.core.block.prefix_caching_block import PrefixCachingBlock

MAX_QUEUED = 65536
MAX_SALTS = 4096


@dataclass(frozen=True)
class Salt:
    """What a block's hash depends on besides its tokens. `private`: no other request can have the same."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra: int | None = None
    private: bool = False


@dataclass(slots=True, eq=False)
class HeldBlock:
    """A full block. `token_ids` belongs to the allocator and does not change any more. `order` is the order of
    registration, `step` the number of the step that computes the block."""
    block_hash: int
    parent_hash: int | None
    token_ids: list[int]
    salt: Salt | None
    extra_hash: int | None
    order: int
    step: int = 0


class Cleared(Enum):
    """The change that removes all blocks."""
    ALL = "all"


Change = HeldBlock | int | Cleared  # stored, removed (its hash), cleared


class BlockSink:
    """The changes of one allocator. `wake` is called in the engine's thread when there are changes to take; it must not
    block. `explain`, called there too, returns what an extra hash stands for, or None while it does not know."""

    def __init__(self, wake: Callable[[], None] = lambda: None, explain: Callable[[int], Salt | None] | None = None,
                 max_queued: int = MAX_QUEUED) -> None:
        self.dropped = 0  # changes that were discarded
        self._wake = wake
        self._explain = explain
        self._max_queued = max_queued
        self._ledger: dict[int, HeldBlock] = {}
        self._registered: dict[int, HeldBlock] = {}  # by block id
        self._salts: dict[int, Salt] = {}
        self._queue: deque[Change] = deque()
        self._overflown = False
        self._postponed: deque[Change] = deque()  # too early; before the queue; used by the announcing thread only
        self._step = 0
        self._order = 0

    # Called in the engine's thread.

    def registered(self, block: PrefixCachingBlock) -> None:
        """The block is full and has a hash."""
        previous = block.prev_block
        if previous is None:
            parent_hash = None
        else:
            parent_hash = previous.content_hash
            if parent_hash is None:
                self._registered.pop(block.block_id, None)
                return  # without its parent's hash the block can't be matched to a prompt
        self._order += 1
        self._registered[block.block_id] = HeldBlock(block.content_hash, parent_hash, block.token_ids, None,
                                                block.extra_hash, self._order)

    def computed(self, block_ids: Iterable[int]) -> None:
        """The KV of these registered blocks exists when the current step is over."""
        blocks = [block for block_id in block_ids if (block := self._registered.pop(block_id, None)) is not None]
        if len(blocks) > 1:
            blocks.sort(key=lambda block: block.order)  # parents come before their children
        for block in blocks:
            if block.extra_hash is not None:
                block.salt = self._salt(block.extra_hash)
                if block.salt.private:
                    continue
            block.step = self._step
            self._ledger[block.block_hash] = block
            self._put(block)

    def removed(self, block_hash: int, block_id: int) -> None:
        """The block with this hash was evicted."""
        self._registered.pop(block_id, None)
        if self._ledger.pop(block_hash, None) is not None:
            self._put(block_hash)

    def cleared(self) -> None:
        """No block has a hash any more."""
        self._registered.clear()
        self._ledger.clear()
        self._put(Cleared.ALL)

    def begin_step(self) -> None:
        """The current step is over: the KV of its blocks is in memory. A new step begins."""
        self._step += 1
        if self._queue:
            self._wake()

    def _put(self, change: Change) -> None:
        if len(self._queue) >= self._max_queued:
            self.dropped += len(self._queue)
            self._overflown = True
            self._queue.clear()
        self._queue.append(change)

    def _salt(self, extra_hash: int) -> Salt:
        salt = self._salts.get(extra_hash)
        if salt is None:
            salt = self._explain(extra_hash) if self._explain is not None else None
            if salt is None:
                return Salt(extra=extra_hash)  # not stored, as `explain` may know it later
            if len(self._salts) >= MAX_SALTS:
                self._salts.clear()
            self._salts[extra_hash] = salt
        return salt

    # Called in the announcing thread.

    def resync(self) -> None:
        """Have the next `take` return all blocks."""
        self._overflown = True

    def take(self, is_at_rest: Callable[[], bool]) -> tuple[list[Change], list[HeldBlock] | None]:
        """Returns (changes in their order, None). Where changes were discarded it returns (changes, all blocks): first
        replace what is known by all blocks, then apply the changes as well.

        Blocks of a step that may still be running are left for the next call, unless the engine `is_at_rest`.
        `is_at_rest` must return False from the moment when blocks are computed until they are in memory; it is called
        after the queue was read.
        """
        all_blocks = None
        if self._overflown:
            self._overflown = False
            blocks = list(self._ledger.values())
            step = math.inf if is_at_rest() else self._step
            all_blocks = [block for block in blocks if block.step < step]
            self._postponed = deque(block for block in blocks if block.step >= step)
        changes: list[Change] = []
        count = len(self._postponed) + len(self._queue)
        at_rest = is_at_rest()
        for _ in range(count):
            try:
                change = (self._postponed or self._queue).popleft()
            except IndexError:  # the engine's thread has just discarded the queue
                break
            if isinstance(change, HeldBlock) and change.step >= self._step and not at_rest:
                self._postponed.appendleft(change)
                break
            changes.append(change)
        return changes, all_blocks
