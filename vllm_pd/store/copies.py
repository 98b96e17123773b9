# SPDX-License-Identifier: Apache-2.0
"""How blocks get from a cache into the store and back: `HostCopies` for a cache in host memory, `DeviceCopies` for one
on a device.

From a device a block takes three copies. `gather`, in the stream of the steps, right behind the step that has filled
it: device to device, which takes microseconds, so that later steps, whatever they write, come after it. `copy_out`, in
a stream of its own and after the gather: to pinned host memory. Then `put`, in a thread of ours, to the store. Both
buffers have the same rows, used in turn; a row is used again when its block has been put. No block waits for a row: the
scheduler names no more blocks than it believes there are rows left (`StorePlan.begin_step`), and what does not fit is
left out.

To a device: a thread copies the block to pinned memory and checks it there, then `copy_in` copies it to its place in
the cache, in a stream of its own. The gather is launched before the step's tokens are sampled, so it is over when
EngineCore has the step's output, and so before it gives a block of the step to anybody else, a load or a peer that
writes. A load waits for the last gather all the same: it costs nothing.
"""
from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

    from vllm_pd.store.blocks import BlockKey
    from vllm_pd.store.loads import BlockLoad
    from vllm_pd.store.store import BlockStore

logger = logging.getLogger("vllm.pd")


class CacheBlock(NamedTuple):
    """A block by its name in the store, and its number in the cache."""
    key: BlockKey
    block_id: int


class BlockCopies(Protocol):
    """`rows`: how many blocks may be between cache and store; None: `put` stores them itself. `ended`: of all blocks
    that were put, how many are stored or left out; 0 without rows. To be read only."""
    rows: int | None
    ended: int

    def put(self, blocks: Sequence[CacheBlock]) -> None:
        """Store these blocks, in this order. Called after the step that filled them was launched, in its thread."""

    def load(self, block: CacheBlock, load: BlockLoad) -> bool:
        """Bring a block into the cache while the load is entered. Returns whether it was there and right. Called in one
        thread, which may wait for a disk."""

    def close(self, timeout_s: float) -> bool:
        """Store what was put. Returns False if that has not ended after `timeout_s`. Idempotent."""


class HostCopies:
    """Of a cache in host memory: in the thread of the steps, before the next one."""

    rows = None

    def __init__(self, store: BlockStore, parts: Sequence[np.ndarray]) -> None:
        """`parts`: bytes [block, byte] of each layer."""
        self.ended = 0
        self._store = store
        self._parts = parts

    def put(self, blocks: Sequence[CacheBlock]) -> None:
        """See `BlockCopies`."""
        for block in blocks:
            self._store.put(block.key, self._rows(block))

    def load(self, block: CacheBlock, load: BlockLoad) -> bool:
        """See `BlockCopies`."""
        return self._store.get(block.key, self._rows(block), load)

    def close(self, timeout_s: float) -> bool:
        """See `BlockCopies`."""
        return True

    def _rows(self, block: CacheBlock) -> list[np.ndarray]:
        return [part[block.block_id] for part in self._parts]


class Event(Protocol):
    """A point in the work of a stream."""


class DeviceCache(Protocol):
    """A cache on a device and the buffers beside it, each of `rows` rows of a block: one on the device, one in pinned
    memory; and one block of pinned memory more, for loads. No call waits but `wait`."""
    rows: int

    def use(self) -> None:
        """The calling thread is going to use the device."""

    def gather(self, block_ids: Sequence[int], first_row: int) -> Event:
        """In the stream of the steps, whose thread calls it: copy the blocks to these rows of the device's buffer."""

    def copy_out(self, first_row: int, count: int, after: Event) -> Event:
        """In a stream of its own: copy these rows to pinned memory."""

    def copy_in(self, block_id: int, after: Event | None) -> Event:
        """In a stream of its own: copy the block for loads to its place in the cache."""

    def wait(self, event: Event) -> None:
        """Wait until the device has got there."""

    def row(self, row: int) -> Sequence[np.ndarray]:
        """The parts of a row in pinned memory."""

    def loaded(self) -> Sequence[np.ndarray]:
        """The parts of the block for loads."""


class _Gathered(NamedTuple):
    """Blocks in successive rows of the device's buffer, from when `event` is done."""
    blocks: Sequence[CacheBlock]
    first_row: int
    event: Event


class DeviceCopies:
    """Of a cache on a device. Owns a thread, from the first block on, which calls `work`."""

    def __init__(self, store: BlockStore, cache: DeviceCache, has_thread: bool = True) -> None:
        """`has_thread`: False where the caller calls `work`."""
        self.rows = cache.rows
        self._store = store
        self._cache = cache
        self._gathered = self._left_out = 0  # blocks, of all that were put
        self._done = 0  # of those gathered; written by `work` alone
        self._last_gather: Event | None = None
        self._jobs: queue.SimpleQueue[_Gathered | None] = queue.SimpleQueue()  # at most `rows`, each has one or more
        self._thread = None
        self._has_thread = has_thread
        self._loads = False  # whether the thread of loads uses the device
        self._has_failed = False

    @property
    def ended(self) -> int:
        """See `BlockCopies`."""
        return self._done + self._left_out

    def put(self, blocks: Sequence[CacheBlock]) -> None:
        """See `BlockCopies`. The first ones are left out where there are more than free rows."""
        too_many = max(0, len(blocks) - (self.rows - (self._gathered - self._done)))
        self._left_out += too_many
        blocks = blocks[too_many:]
        while blocks:
            first_row = self._gathered % self.rows
            some, blocks = blocks[:self.rows - first_row], blocks[self.rows - first_row:]
            self._last_gather = event = self._cache.gather([block.block_id for block in some], first_row)
            self._gathered += len(some)
            self._jobs.put(_Gathered(some, first_row, event))
        if self._has_thread and self._thread is None and self._gathered:
            self._thread = threading.Thread(target=self._run, name="pd-store-put", daemon=True)
            self._thread.start()

    def work(self) -> bool:
        """Put what was gathered first, or wait for it. Returns False after `close`."""
        job = self._jobs.get()
        if job is None:
            return False
        until = self._done + len(job.blocks)
        try:
            self._cache.wait(self._cache.copy_out(job.first_row, len(job.blocks), job.event))
            for row, block in enumerate(job.blocks, job.first_row):
                self._store.put(block.key, self._cache.row(row))
                self._done += 1
        except Exception:
            if not self._has_failed:
                logger.exception("store: %d blocks were not put; this is said once", until - self._done)
            self._has_failed = True
        self._done = until
        return True

    def load(self, block: CacheBlock, load: BlockLoad) -> bool:
        """See `BlockCopies`."""
        if not self._loads:
            self._cache.use()
            self._loads = True
        if not self._store.get(block.key, self._cache.loaded()):
            return False
        with load:
            self._cache.wait(self._cache.copy_in(block.block_id, self._last_gather))
        return True

    def close(self, timeout_s: float) -> bool:
        """See `BlockCopies`."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        self._cache.use()
        while self.work():
            pass
