# SPDX-License-Identifier: Apache-2.0
"""The writes of one attempt on the prefill engine: all of its blocks at once, or some after each step that computes it.

Whoever computes the prompt adds blocks when their KV is there and will not change any more. One write is under way at a
time: it takes all blocks that were added since the last one began, so a slow network gets fewer and larger writes. Only
the last write carries the notice, and it begins after all others have ended well. After a failure, or when the attempt
is stopped, no write begins any more.

The attempt is over when no write is under way and none will begin. Nothing may be said to the peer that takes its fence
down before that. Not for several threads at once.
"""
from collections.abc import Sequence
from typing import NamedTuple


class BlockWrite(NamedTuple):
    """One write of an attempt: our blocks and those of the peer, pairwise. `number` counts from 1. `is_last`: it
    carries the notice."""
    number: int
    local_block_ids: list[int]
    remote_block_ids: list[int]
    is_last: bool


class AttemptWrites:
    """The writes into `remote_block_ids`, the granted blocks in order. `open`: the write that is under way, `bytes`:
    what those moved that have ended well, `error`: why no more follow."""

    def __init__(self, remote_block_ids: Sequence[int]) -> None:
        self._remote = remote_block_ids
        self._ready: list[int] = []  # our blocks that are in no write yet
        self._is_complete = False
        self._closed = False
        self._number = 0
        self.added = 0  # how many blocks were added
        self.open: BlockWrite | None = None
        self.bytes = 0
        self.error = ""

    def add(self, local_block_ids: Sequence[int], is_last: bool) -> None:
        """The next blocks in order hold their KV for good. `is_last`: there are no more. No effect once no write
        begins any more. Without a block for each of the peer's the last write, and so the notice, does not begin."""
        if self._closed:
            return
        self._ready += local_block_ids
        self.added += len(local_block_ids)
        self._is_complete = is_last
        if self.added > len(self._remote) or is_last and self.added < len(self._remote):
            self.close(f"{self.added} blocks were computed, and {len(self._remote)} granted")

    @property
    def is_due(self) -> bool:
        """Whether a write may begin now."""
        return self.open is None and not self._closed and (bool(self._ready) or self._is_complete)

    @property
    def is_complete(self) -> bool:
        """Whether the next write is the last one."""
        return self._is_complete

    def begin(self) -> BlockWrite:
        """The write that is due: it is under way from now on, until `end`."""
        blocks, self._ready = self._ready, []
        self._number += 1
        first = self.added - len(blocks)
        self.open = BlockWrite(self._number, blocks, list(self._remote[first:self.added]), self._is_complete)
        self._closed = self._is_complete
        return self.open

    def end(self, ok: bool, nbytes: int = 0, error: str = "") -> None:
        """The write under way has ended: no byte of it moves any more."""
        self.open = None
        if ok:
            self.bytes += nbytes
        else:
            self.close(error)

    def close(self, error: str = "") -> BlockWrite | None:
        """No write begins any more. Returns the one that is under way."""
        self._closed = True
        self.error = self.error or error
        return self.open

    @property
    def is_closed(self) -> bool:
        """Whether no write begins any more."""
        return self._closed

    @property
    def is_over(self) -> bool:
        """Whether no write is under way, and none begins any more."""
        return self._closed and self.open is None

    @property
    def unsent_blocks(self) -> int:
        """How many blocks were added whose write has not ended."""
        return len(self._ready) + (len(self.open.local_block_ids) if self.open is not None else 0)
