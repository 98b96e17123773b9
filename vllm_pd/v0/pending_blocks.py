# SPDX-License-Identifier: Apache-2.0
"""`PendingBlocks`: the blocks of a prompt whose KV does not exist yet, because another engine computes it.

Upstream's `allocate` would register such blocks in the prefix cache at once, and the next `schedule` of any request
would mark them as computed: a second request with that prefix would hit memory that nobody wrote. Pending blocks hold
no token ids, as look-ahead slots do: they have no hash, are nobody's prefix hit, and are freed as plain blocks.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.core.block.block_table import BlockTable
from vllm.utils import Device

if TYPE_CHECKING:
    from vllm.core.block_manager import SelfAttnBlockSpaceManager
    from vllm.sequence import Sequence


class PendingBlocks:
    """Allocates, commits and detaches pending blocks of one block manager, which keeps their tables in `block_tables`.

    Nothing here is called unless prompts are parked. The block manager has no public method for this. These private
    names of upstream's V0 are used: its `_computed_blocks_tracker` with `_update_seq_hashes` and
    `_seq_id_to_blocks_hashes`, its `_last_access_blocks_tracker`, and the `_allocators` of its `block_allocator`.
    """

    def __init__(self, block_manager: SelfAttnBlockSpaceManager) -> None:
        self._manager = block_manager
        self._allocator = block_manager.block_allocator
        self._computed = block_manager._computed_blocks_tracker
        self._last_access = block_manager._last_access_blocks_tracker

    def allocate(self, seq: Sequence, num_computed_tokens: int) -> list[int]:
        """Allocate the blocks of a whole prompt, and return their ids in order. Those of its first
        `num_computed_tokens`, a prefix hit of whole blocks, are shared as in `BlockSpaceManager.allocate`; the others
        are pending until `commit`. The caller has seen that enough blocks are free."""
        token_ids, extra_hash = seq.get_token_ids(), seq.extra_hash()
        block_size = self._manager.block_size
        table = BlockTable(block_size=block_size, block_allocator=self._allocator)
        if num_computed_tokens:
            table.allocate(token_ids[:num_computed_tokens], extra_hash=extra_hash)
        else:
            table.update([self._allocator.allocate_mutable_block(None, device=Device.GPU, extra_hash=extra_hash)])
        table.ensure_num_empty_slots(len(token_ids) - num_computed_tokens, extra_hash)
        if self._manager.enable_caching:
            # The hit rate counts full blocks that were no hit, as `BlockSpaceManager.allocate` does.
            hit_rate = self._allocator._allocators[Device.GPU].metric_data
            for _ in range(len(token_ids) // block_size - num_computed_tokens // block_size):
                hit_rate.query(hit=False)
        self._manager.block_tables[seq.seq_id] = table
        self._last_access.add_seq(seq.seq_id)
        return table.physical_block_ids

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """Register the full blocks of the sequence's first `num_tokens` tokens, whose KV has arrived, in the prefix
        cache. If an equal block is cached already, the sequence uses that one, and the new one is freed."""
        table = self._manager.block_tables[seq.seq_id]
        if self._manager.enable_caching:
            self._computed._update_seq_hashes(seq)
            hashes = self._computed._seq_id_to_blocks_hashes[seq.seq_id]
            self._allocator.forget_uncomputed_blocks(hashes[:num_tokens // self._manager.block_size], shared=True)
        table.append_token_ids(table.get_unseen_token_ids(seq.get_token_ids()[:num_tokens]),
                               extra_hash=seq.extra_hash())
        if self._manager.enable_caching:
            self._allocator.mark_blocks_as_computed(table.physical_block_ids)

    def detach(self, seq: Sequence) -> BlockTable:
        """Take the block table from a sequence that ends or starts anew while a peer may still write to its blocks.
        The caller owns the table, and frees it when no peer can write to its blocks any more."""
        table = self._manager.block_tables.pop(seq.seq_id)
        self._last_access.update_seq_blocks_last_access(seq.seq_id, table.physical_block_ids)
        self._last_access.remove_seq(seq.seq_id)
        self._computed.remove_seq(seq.seq_id)
        return table
