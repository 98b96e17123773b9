# SPDX-License-Identifier: Apache-2.0
"""Where V0's block allocator says which blocks have become prefix hits and which have ceased to be.

A block is *registered* when it is full, which is before its KV exists; it is *computed* once the step is scheduled that
fills it, or the peer that filled it is done; and it may be announced when that step is over. The allocator calls
`registered`, `computed`, `removed` and `cleared`, the scheduler `begin_step`, all in the engine's own thread, where
none of them waits for anything: what happens is written into a dictionary, the *ledger*, and a bounded queue, from
which another thread takes it with `take`. Where that thread falls too far behind, the queue is thrown away and counted,
and `take` has it compare notes with the ledger instead.

So the ledger is never larger than the block pool, and nothing is lost for good. Both rest on what CPython does in one
piece: appending to and taking from a deque, and copying a dictionary's values into a list.
"""
from __future__ import annotations

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
    """What besides its tokens a block's hash is made of. `private`: no other request can ever have it."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra: int | None = None
    private: bool = False


@dataclass(slots=True, eq=False)
class HeldBlock:
    """A block that is a prefix hit. `token_ids` belongs to the allocator and does not change any more. `step` is the
    one that computes it."""
    block_hash: int
    parent_hash: int | None
    token_ids: list[int]
    salt: Salt | None
    extra_hash: int | None
    order: int
    step: int = 0


class Cleared(Enum):
    """The one event that concerns no block."""
    ALL = "all"


Op = HeldBlock | int | Cleared  # stored, removed, cleared


class BlockSink:
    """Of one allocator. `wake` is called in the engine's thread when there is something to take; it must not block.
    `explain` is asked there what an extra hash stands for, until it knows."""

    def __init__(self, wake: Callable[[], None] = lambda: None, explain: Callable[[int], Salt | None] | None = None,
                 max_queued: int = MAX_QUEUED) -> None:
        self.dropped = 0  # changes that were taken out of the queue again
        self._wake = wake
        self._explain = explain
        self._max_queued = max_queued
        self._ledger: dict[int, HeldBlock] = {}
        self._registered: dict[int, HeldBlock] = {}  # by block id
        self._salts: dict[int, Salt] = {}
        self._queue: deque[Op] = deque()
        self._overflown = False
        self._kept: Op | None = None  # taken from the queue too early; the other thread's
        self._step = 0
        self._order = 0

    # The engine's thread.

    def registered(self, block: PrefixCachingBlock) -> None:
        """This block is full and has a hash."""
        previous = block.prev_block
        if previous is None:
            parent_hash = None
        else:
            parent_hash = previous.content_hash
            if parent_hash is None:
                self._registered.pop(block.block_id, None)
                return  # its hash says nothing of what comes before it
        self._order += 1
        self._registered[block.block_id] = HeldBlock(block.content_hash, parent_hash, block.token_ids, None,
                                                block.extra_hash, self._order)

    def computed(self, block_ids: Iterable[int]) -> None:
        """The KV of these registered blocks is there when the present step is over."""
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
        """The block with this hash gives its memory away."""
        self._registered.pop(block_id, None)
        if self._ledger.pop(block_hash, None) is not None:
            self._put(block_hash)

    def cleared(self) -> None:
        """No block has a hash any more."""
        self._registered.clear()
        self._ledger.clear()
        self._put(Cleared.ALL)

    def begin_step(self) -> None:
        """What was computed up to now is in memory; what is computed from here on belongs to a new step."""
        self._step += 1
        if self._queue:
            self._wake()

    def _put(self, op: Op) -> None:
        if len(self._queue) >= self._max_queued:
            self.dropped += len(self._queue)
            self._overflown = True
            self._queue.clear()
        self._queue.append(op)

    def _salt(self, extra_hash: int) -> Salt:
        salt = self._salts.get(extra_hash)
        if salt is None:
            salt = self._explain(extra_hash) if self._explain is not None else None
            if salt is None:
                return Salt(extra=extra_hash)  # somebody may know it another time
            if len(self._salts) >= MAX_SALTS:
                self._salts.clear()
            self._salts[extra_hash] = salt
        return salt

    # The other thread.

    def lose(self) -> None:
        """Have the next `take` give everything."""
        self._overflown = True

    def take(self, is_at_rest: Callable[[], bool]) -> tuple[list[Op], list[HeldBlock] | None]:
        """(changes in their order, None), or (changes, all blocks) where some changes were thrown away: what is held is
        the second then, after which the changes are to be gone through all the same.

        Blocks of a step that may be running are left for the next time, unless the engine `is_at_rest`. That must be
        false from the moment when blocks are computed until they are in memory, and is looked up after the queue.
        """
        everything = None
        if self._overflown:
            self._overflown = False
            self._kept = None
            blocks = list(self._ledger.values())
            at_rest = is_at_rest()
            everything = [block for block in blocks if at_rest or block.step < self._step]
            if len(everything) < len(blocks):
                self._overflown = True  # the rest comes another time
        ops: list[Op] = []
        count = len(self._queue)
        at_rest = is_at_rest()
        while True:
            op, self._kept = self._kept, None
            if op is None:
                if not count:
                    return ops, everything
                count -= 1
                try:
                    op = self._queue.popleft()
                except IndexError:  # thrown away just now
                    return ops, everything
            if isinstance(op, HeldBlock) and op.step >= self._step and not at_rest:
                self._kept = op
                return ops, everything
            ops.append(op)
