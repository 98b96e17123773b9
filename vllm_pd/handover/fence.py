# SPDX-License-Identifier: Apache-2.0
"""`BlockFence`: our own references on blocks that a transfer may touch.

V1's scheduler gives a request's blocks back to the pool when the request ends, is preempted, or its load has failed, no
matter what a peer still does to them. So each attempt holds a reference of its own, taken while the request still has
the blocks: on D on all rows of a parked request (a peer writes the new ones and may read the prefix hit), on P on the
blocks that a read fills or a write sends. It is given back when nobody touches them any more: all at once, or, where an
attempt on P has several writes, those of each write with its end.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_pd.protocol.messages import Attempt

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class BlockFence:
    """The references of one V1 engine, by attempt. Nothing else of ours calls `touch` or `free_blocks`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[Attempt, list[int]] = {}

    def hold(self, attempt: Attempt, block_ids: Iterable[int]) -> None:
        """Take a reference on each of these blocks, which a request must have at this moment. Raises ValueError for a
        block that the attempt holds."""
        more = list(block_ids)
        held = self._held.get(attempt, [])
        if not set(held).isdisjoint(more):
            raise ValueError(f"{attempt} holds some of these blocks already")
        self._pool.touch([self._pool.blocks[block_id] for block_id in more])
        self._held[attempt] = held + more

    def release(self, attempt: Attempt, block_ids: Iterable[int] | None = None) -> bool:
        """Give the references of this attempt back, or only those on these blocks; the pool frees what nobody else
        refers to. Returns whether there were any. May be called again."""
        held = self._held.pop(attempt, [])
        chosen = set(held if block_ids is None else block_ids)
        given = [block_id for block_id in held if block_id in chosen]
        if len(given) < len(held):
            self._held[attempt] = [block_id for block_id in held if block_id not in chosen]
        self._pool.free_blocks(self._pool.blocks[block_id] for block_id in reversed(given))
        return bool(given)

    def block_ids(self, attempt: Attempt) -> list[int]:
        """The blocks that this attempt holds, in order; empty for an unknown one."""
        return list(self._held.get(attempt, ()))

    def attempts(self) -> list[Attempt]:
        """All that hold blocks."""
        return list(self._held)

    def __len__(self) -> int:
        return len(self._held)
