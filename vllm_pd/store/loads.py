# SPDX-License-Identifier: Apache-2.0
"""Loads of blocks into an engine's cache, in a thread, with a limit in time.

A disk may hang. It holds up the thread while a block is brought from its file into the arena, and never while one is
copied from there into the cache. So a load that is overdue can be given up: nothing is copied for it any more, and V1
may have its blocks. Until the thread moves again, each load fails. A disk may also be slow: a load that has not ended
in time, with those before it in the thread, is given up, too.
"""
from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from vllm_pd.store.plan import NamedBlock

logger = logging.getLogger("vllm.pd")

BLOCK_S = 10.0  # for each block
LOAD_S = 120.0  # for each load, from when its request got blocks
LOG_S = 60.0  # between two lines about loads that failed


class LoadGivenUp(Exception):
    """Nothing may be copied for this load any more."""


class BlockLoad:
    """The load of one request. It is entered (`with`) around each copy into the cache, which raises LoadGivenUp if it
    has been given up."""

    def __init__(self, blocks: Sequence[NamedBlock], begun_s: float) -> None:
        self.blocks = blocks
        self.begun_s = begun_s
        self.has_ended = False
        self._copying = threading.Lock()
        self._is_whole = False
        self._has_failed = False

    @property
    def is_right(self) -> bool:
        """Whether all blocks have arrived; of a load that has ended."""
        return self._is_whole and not self._has_failed

    def __enter__(self) -> BlockLoad:
        self._copying.acquire()
        if self._has_failed:
            self._copying.release()
            raise LoadGivenUp
        return self

    def __exit__(self, *_: object) -> None:
        self._copying.release()

    def fail(self) -> None:
        """It ends as failed, after the block that is being copied."""
        self._has_failed = True

    def give_up(self) -> None:
        """End it now as failed, unless a block is being copied: then soon."""
        self.fail()
        if self._copying.acquire(blocking=False):
            self.has_ended = True
            self._copying.release()

    def run(self, load_block: Callable[[NamedBlock, BlockLoad], bool], begins_block: Callable[[], None]) -> None:
        """In the thread. The last block first: the end of a prompt is the first to be replaced."""
        try:
            for block in reversed(self.blocks):
                begins_block()
                if self._has_failed or not load_block(block, self):
                    return
            self._is_whole = True
        except LoadGivenUp:
            pass
        finally:
            self.has_ended = True


class EndedLoads(NamedTuple):
    """Ids of requests: those whose loads have ended, and those of them that failed."""
    ended: set[str]
    failed: set[str]


class BlockLoader:
    """The loads of one engine. All methods are for one thread. Owns a thread.

    `counts`: loads by how they ended: "loaded", "failed", "overdue" (given up)."""

    def __init__(self, load_block: Callable[[NamedBlock, BlockLoad], bool],
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`load_block`, in the thread: bring a block, and copy it while the load is entered. Returns whether it was
        there and right."""
        self.counts: Counter[str] = Counter()
        self._load_block = load_block
        self._clock = clock
        self._loads: dict[str, BlockLoad] = {}
        self._queue: queue.SimpleQueue[BlockLoad | None] = queue.SimpleQueue()  # of requests that V1 has blocks for
        self._since_s: float | None = None  # when the thread began with the present block
        self._error: Exception | None = None  # of the disk or ours, the last one
        self._quiet_until_s = -LOG_S
        self._thread = threading.Thread(target=self._run, name="pd-store-load", daemon=True)
        self._thread.start()

    def begin(self, request_id: str, blocks: Sequence[NamedBlock]) -> None:
        """Begin to load the blocks of a request."""
        self._loads[request_id] = load = BlockLoad(blocks, self._clock())
        self._queue.put(load)

    def take_ended(self) -> EndedLoads:
        """What has ended since the last call, also because it is overdue."""
        since_s, now_s = self._since_s, self._clock()
        is_overdue = since_s is not None and now_s - since_s > BLOCK_S
        taken = EndedLoads(set(), set())
        for request_id, load in list(self._loads.items()):
            was_given_up = not load.has_ended and (is_overdue or now_s - load.begun_s > LOAD_S)
            if was_given_up:
                load.give_up()
            if not load.has_ended:
                continue
            del self._loads[request_id]
            taken.ended.add(request_id)
            if not load.is_right:
                taken.failed.add(request_id)
            self.counts["loaded" if load.is_right else "overdue" if was_given_up else "failed"] += 1
        if taken.failed and now_s > self._quiet_until_s:
            self._quiet_until_s = now_s + LOG_S
            logger.warning("store: a load failed, and its prompt is computed: %s. So far %s; this is said once in %d s",
                           self._error or ("the disk does not answer" if is_overdue else
                                            "a block was gone or wrong, or the disk is too slow"),
                           dict(self.counts), LOG_S)
        return taken

    def fail(self, request_ids: Collection[str]) -> None:
        """The present loads of these requests, if there are any, end as failed."""
        for request_id in self._loads.keys() & request_ids:
            self._loads[request_id].fail()

    def fail_all(self) -> None:
        """All present loads end as failed."""
        self.fail(self._loads.keys())

    def close(self, timeout_s: float) -> bool:
        """End the thread. Returns False if it has not ended after `timeout_s`. Idempotent."""
        self.fail_all()
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _begins_block(self) -> None:
        self._since_s = self._clock()

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            try:
                load.run(self._load_block, self._begins_block)
            except Exception as error:
                self._error = error
            finally:
                self._since_s = None
