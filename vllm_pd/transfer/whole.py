# SPDX-License-Identifier: Apache-2.0
"""What layers have in each block beside their KV, as vLLM registers it: with sparse attention the keys of an index.

It belongs to all tokens of the block, as the KV does, and every rank has all of it. So it is known by its layer and its
size alone, and goes as whole bytes (`vllm_pd.transfer.layout.WholeRegion`).
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_pd.errors import ConfigError
from vllm_pd.transfer.layout import WholeRegion, extent_bytes, numbers_in

if TYPE_CHECKING:
    import torch


def regions_beside(caches: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor],
                   first_layer: int) -> tuple[WholeRegion, ...]:
    """A region for each of these caches, in the order of their layers. `views`: of the layers' KV, [blocks, heads,
    tokens, content], in their order; `first_layer`: the number of the first one in the model. `caches`: [blocks, 1,
    tokens, content] of any type and size, with the blocks and tokens of the KV. Both are by the names of their layers,
    and what is beside a layer's KV has that layer's number in its name.

    The tensors must stay alive and in place as long as a transport uses the regions. Raises ConfigError for a cache of
    another kind."""
    layers: dict[int, int] = {}
    for layer, name in enumerate(views, first_layer):
        layers.setdefault(_number(name), layer)
    like, found = next(iter(views.values())), []
    for name in sorted(caches, key=numbers_in):
        cache = caches[name]
        nbytes = cache[0].numel() * cache.element_size()
        if cache.dim() != 4 or cache.shape[:3] != (like.shape[0], 1, like.shape[2]):
            raise ConfigError("kv_cache", f"{name} of shape {tuple(cache.shape)}", f"expected {like.shape[0]} blocks "
                              f"of 1 head and {like.shape[2]} tokens, as the KV beside it has: set --block-size to "
                              "the tokens that the attention backend takes")
        if extent_bytes(cache[0]) != nbytes or cache.stride(0) * cache.element_size() < nbytes:
            raise ConfigError("kv_cache", f"{name} of strides {cache.stride()}", f"its blocks of {nbytes} bytes are "
                              "not contiguous: set VLLM_KV_CACHE_LAYOUT to LBHNC or BLHNC")
        if _number(name) not in layers:
            raise ConfigError("kv_cache", name, f"it is beside the KV of no layer: these are {list(views)}")
        found.append(WholeRegion(layers[_number(name)], cache.data_ptr(), nbytes,
                                 cache.stride(0) * cache.element_size()))
    return tuple(sorted(found, key=lambda region: region.layer))


def _number(name: str) -> int:
    """Of a layer, by its name; -1 for none."""
    return next((number for number, _ in numbers_in(name) if number >= 0), -1)
