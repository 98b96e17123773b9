# SPDX-License-Identifier: Apache-2.0
"""Blocks of a cache into a contiguous buffer and back, for transports that move no scattered memory.

A buffer of `n` blocks has lane after lane, and in each lane block after block. Both ends use the lanes of the same plan
(`vllm_pd.transfer.plan`), so they agree on that order.
"""
from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from vllm_pd.errors import TransferError
from vllm_pd.transfer.plan import Run

STAGE_BYTES = 4 << 20  # a staging buffer, unless one block is bigger; each direction of a connection has two
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_PIECE_WORDS = 32768  # torch uses one thread for a copy of at most so many elements


class BlockCopier:
    """Copies blocks of these caches, which have `num_blocks`. `runs`: of the lanes, in these caches. Raises
    TransferError for one outside of them."""

    def __init__(self, caches: list[torch.Tensor], runs: list[Run], num_blocks: int) -> None:
        self.block_bytes = sum(run.bytes for run in runs)
        word = math.gcd(8, *(part for run in runs for part in run))
        self._views = [_view(caches, run, num_blocks, word) for run in runs]
        self.blocks_per_stage = max(1, STAGE_BYTES // max(1, self.block_bytes))

    def buffer(self) -> torch.Tensor:
        """A staging buffer: uint8 [bytes]."""
        return torch.empty(self.blocks_per_stage * self.block_bytes, dtype=torch.uint8)

    def stages(self, block_ids: list[int]) -> Iterator[torch.Tensor]:
        """The block ids, int64, in parts that fit a staging buffer."""
        if block_ids and self._views:
            yield from torch.tensor(block_ids).split(self.blocks_per_stage)

    def filled(self, buffer: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """The part of the staging buffer that these blocks take."""
        return buffer[:len(block_ids) * self.block_bytes]

    def gather(self, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy these blocks into the buffer."""
        for view, ids, part in self._pieces(block_ids, buffer):
            torch.index_select(view, 0, ids, out=part)

    def scatter(self, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy the buffer into these blocks. They hold it when this returns."""
        for view, ids, part in self._pieces(block_ids, buffer):
            view.index_copy_(0, ids, part)

    def _pieces(self, block_ids: torch.Tensor,
                buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(view of a lane or a part of it, block ids, their part of the buffer), small enough for one thread."""
        start, count = 0, len(block_ids)
        for view in self._views:
            words = view.shape[1]
            end = start + count * words * view.element_size()
            part = buffer[start:end].view(view.dtype).view(count, words)
            rows = max(1, _PIECE_WORDS // words)
            for first in range(0, count, rows):
                for start_word in range(0, words, _PIECE_WORDS):  # several in a wide lane, where `rows` is 1
                    columns = slice(start_word, start_word + _PIECE_WORDS)
                    yield view[:, columns], block_ids[first:first + rows], part[first:first + rows, columns]
            start = end


def _view(caches: list[torch.Tensor], run: Run, num_blocks: int, word: int) -> torch.Tensor:
    """A lane as a tensor [blocks, words]."""
    address, nbytes, stride_bytes = run
    end = address + (num_blocks - 1) * stride_bytes + nbytes
    for tensor in caches:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start <= address and end <= start + storage.nbytes() and not (address - start) % word:
            return torch.empty(0, dtype=_WORDS[word]).set_(
                storage, (address - start) // word, (num_blocks, nbytes // word), (stride_bytes // word, 1))
    raise TransferError(f"{nbytes} bytes at {address:#x} of each block are outside of this rank's caches")
