# SPDX-License-Identifier: Apache-2.0
"""Blocks in which layers of different shapes lie side by side.

Where the layers of a model differ in what they keep of a token (compressed attention, windows with other heads, a
drafter of another shape), vLLM lays the parts of all layers of a group one after the other, block after block. Each
block, of whichever group, is one run of the same number of bytes then. Such a block goes whole: for a transfer the
cache is one layer of one head, and what is inside a block is known by a name that both engines must have.
"""
from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_pd.errors import ConfigError
from vllm_pd.transfer.layout import extent_bytes, numbers_in

if TYPE_CHECKING:
    import torch


def own_caches(caches: Mapping[str, torch.Tensor], groups: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The caches of the layers in `groups`, without those of layers that use another one's. Raises ConfigError for
    other layers."""
    own = {name: caches[name] for name in caches if name in groups}
    places = {cache.data_ptr() for cache in own.values()}
    for name in caches.keys() - own.keys():
        if caches[name].data_ptr() not in places:
            raise ConfigError("kv_cache", name, "it is in none of vLLM's groups of layers, so what its blocks hold is "
                              "not known here")
    return own


def mixed_blocks(caches: Mapping[str, torch.Tensor], num_blocks: int) -> torch.Tensor:
    """All of a rank's cache as one view [blocks, 1, 1, bytes], uint8, of the memory that the layers share. `caches`: of
    each layer, by its name, [blocks, ...] of any type and strides, with `num_blocks` blocks. The view keeps the memory
    alive. Raises ConfigError where a layer's part of a block is not inside the block's own bytes."""
    import torch

    if not caches:
        raise ConfigError("kv_cache", "no layers", "a model without attention has no KV to transfer")
    first = min(caches.values(), key=lambda cache: cache.data_ptr())
    start, stride, storage = first.data_ptr(), _stride_bytes(first), first.untyped_storage()
    end = start
    for name, cache in caches.items():
        end = max(end, cache.data_ptr() + extent_bytes(cache[0]))
        if (cache.shape[0] != num_blocks or _stride_bytes(cache) != stride or end > start + stride
                or cache.untyped_storage().data_ptr() != storage.data_ptr()):
            raise ConfigError("kv_cache", f"{name} of shape {tuple(cache.shape)}, strides {cache.stride()}",
                              f"its blocks are not inside {num_blocks} blocks of {stride} bytes, in which all layers "
                              "of a model with several kinds of them must be: set VLLM_KV_CACHE_LAYOUT to BLHNC")
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(
        storage, start - storage.data_ptr(), (num_blocks, 1, 1, end - start), (stride, end - start, end - start, 1))


def mixed_name(caches: Mapping[str, torch.Tensor], groups: Mapping[str, int]) -> str:
    """What is where in a block, for two engines to compare: for each layer its group, which `groups` has, its place,
    type, shape and order. Both mappings are by the names of the layers."""
    start = min(cache.data_ptr() for cache in caches.values())
    places = [f"{name} {groups[name]} {cache.data_ptr() - start} {cache.dtype} {tuple(cache.shape[1:])} "
              f"{cache.stride()[1:]}" for name, cache in sorted(caches.items(), key=lambda one: numbers_in(one[0]))]
    digest = hashlib.sha256("\n".join(places).encode()).hexdigest()[:16]
    return f"{len(places)} layers of several shapes in {len(set(groups.values()))} groups {digest}"


def _stride_bytes(cache: torch.Tensor) -> int:
    return cache.stride(0) * cache.element_size()
