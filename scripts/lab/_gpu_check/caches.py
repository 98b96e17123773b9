# SPDX-License-Identifier: Apache-2.0
"""KV caches with a number of its own in every element, in each layout that engines have.

A cache is one buffer, whose axes stand in the order of its layout's name: L layers, B blocks, H heads, N tokens, C
content; and K, keys and values apart, in V0. The worker of an engine gets a view of it for each layer, with the axes in
the order that its attention backend has.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import torch

from vllm_pd.transfer.layout import CacheDescription, describe, describe_views


class PatternShape(NamedTuple):
    """Sizes. `content`: elements of one token and head, keys and values together in V1, one of both in V0."""
    layers: int
    blocks: int
    heads: int
    tokens: int
    content: int

    def size(self, axis: str) -> int:
        """Of an axis by its letter."""
        return 2 if axis == "K" else self["LBHNC".index(axis)]


class CacheLayout(NamedTuple):
    """`axes`: the order in memory. `view`: the order of a layer's view. `backend`: V0's attention backend, "" in V1."""
    name: str
    axes: str
    view: str
    backend: str = ""


LAYOUTS = (
    *(CacheLayout(f"V1 {order}", order, "BHNC") for order in ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")),
    CacheLayout("V0 FlashAttention NHD", "LKBNHC", "KBNHC", "FLASH_ATTN"),
    CacheLayout("V0 FlashAttention HND", "LKBHNC", "KBNHC", "FLASH_ATTN"),
    CacheLayout("V0 FlashInfer NHD", "LBKNHC", "BKNHC", "FLASHINFER"),
    CacheLayout("V0 FlashInfer HND", "LBKHNC", "BKNHC", "FLASHINFER"),
)
SHAPES = {"cuda": PatternShape(16, 256, 8, 16, 128), "cpu": PatternShape(3, 40, 4, 16, 32)}
ORDER_LAYOUT = LAYOUTS[0]


class PatternCache:
    """One cache on `device`. Element number i has the number `seed` x elements + i, so no two caches with different
    seeds share one. `blocks` is a view of all of it with the blocks first. `expected` is what `blocks` should hold.
    `busy_block` belongs to the kernels that run beside the transfers."""

    busy_block = 0

    def __init__(self, layout: CacheLayout, shape: PatternShape, seed: int, device: str) -> None:
        self.layout, self.shape, self.device = layout, shape, device
        by_layer = self._by_layer(seed)
        self.views = list(by_layer)
        self.blocks = self._by_block(by_layer)
        self.expected = self.blocks.clone()
        self.description = self._describe()

    def pattern_of(self, seed: int) -> torch.Tensor:
        """`blocks` of a cache with that seed."""
        return self._by_block(self._by_layer(seed))

    def wrong_blocks(self) -> list[int]:
        """The blocks that differ from `expected` in any bit, but for the busy one."""
        differs = (self.blocks != self.expected).flatten(1).any(1)
        differs[self.busy_block] = False
        return differs.nonzero().flatten().tolist()

    def busy_turns(self) -> int | None:
        """How often the busy block was increased; None where its elements do not agree."""
        added = (self.blocks[self.busy_block] - self.expected[self.busy_block]).unique().tolist()
        return added[0] if len(added) == 1 else None

    def _by_layer(self, seed: int) -> torch.Tensor:
        """A new buffer, with the axes in the order of the layers' views."""
        sizes = [self.shape.size(axis) for axis in self.layout.axes]
        count = math.prod(sizes)
        first = seed * count
        buffer = torch.arange(first, first + count, dtype=torch.int32, device=self.device).reshape(sizes)
        return buffer.permute([self.layout.axes.index(axis) for axis in "L" + self.layout.view])

    def _by_block(self, by_layer: torch.Tensor) -> torch.Tensor:
        return by_layer.movedim(1 + self.layout.view.index("B"), 0)

    def _describe(self) -> CacheDescription:
        if not self.layout.backend:
            return describe_views(self.views, num_blocks=self.shape.blocks, block_size=self.shape.tokens)
        return describe(self.views, num_blocks=self.shape.blocks, block_size=self.shape.tokens,
                        kv_heads=self.shape.heads, head_size=self.shape.content, platform=self.device,
                        backend=self.layout.backend)
