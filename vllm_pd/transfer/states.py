# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in the blocks of a KV cache.

V1 lays the states of a layer (Mamba, GDN, short convolution) into blocks of the same size, and mostly of the same
memory, as the KV of the layers with attention: what a block holds depends on the group whose table names it. So a block
that goes whole carries either. This module checks that it does, and finds the memory that states alone use.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_pd.errors import ConfigError
from vllm_pd.transfer.layout import extent_bytes, numbers_in

if TYPE_CHECKING:
    import torch


def views_of_states(states: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
                    views: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """For memory in which only states are: a view like those of `views`, in the order of the layers' numbers.

    `views`: of the layers with KV, [blocks, heads, tokens, content], all of one shape. `states`: of each other layer
    its state, [blocks, ...], of any type, or its parts. The views that are returned must live as long as the caches.
    Raises ConfigError where a whole block, as it is transferred, does not contain all of a state.
    """
    if not states:
        return []
    if not views:
        raise ConfigError("kv_cache", sorted(states), "a model with attention in no layer can't be transferred")
    like = next(iter(views.values()))
    block_bytes, stride_bytes = extent_bytes(like[0]), like.stride(0) * like.element_size()
    if like[0].numel() * like.element_size() != block_bytes:
        raise ConfigError("kv_cache", f"strides {like.stride()}", "the heads of a block are apart, so states are not "
                          "in them: set VLLM_KV_CACHE_LAYOUT to LBHNC or BLHNC")
    starts, found = {view.data_ptr() for view in views.values()}, []
    for name, state in sorted(states.items(), key=lambda one: numbers_in(one[0])):
        parts = state if isinstance(state, Sequence) else [state]
        start = min(part.data_ptr() for part in parts)
        for part in parts:
            end = part.data_ptr() + extent_bytes(part[0])
            if (part.shape[0] != like.shape[0] or part.stride(0) * part.element_size() != stride_bytes
                    or end > start + block_bytes):
                raise ConfigError("kv_cache", f"{name}: a state of shape {tuple(part.shape)}, strides {part.stride()}",
                                  f"it is not inside one block of {block_bytes} bytes of {like.shape[0]}, one every "
                                  f"{stride_bytes} bytes: set VLLM_KV_CACHE_LAYOUT to LBHNC or BLHNC")
        if start not in starts:
            starts.add(start)
            found.append(_view_at(start, parts[0], like, block_bytes, name))
    return found


def _view_at(start: int, state: torch.Tensor, like: torch.Tensor, block_bytes: int, name: str) -> torch.Tensor:
    """A view like that one, on the memory of this state. Raises ConfigError if its blocks can't begin there."""
    storage = state.untyped_storage()
    offset = start - storage.data_ptr()
    apart = start - like.data_ptr() if like.untyped_storage().data_ptr() == storage.data_ptr() else offset
    if apart % block_bytes or offset % like.element_size() or offset + extent_bytes(like) > storage.nbytes():
        raise ConfigError("kv_cache", f"{name}: a state {offset} bytes into its memory", f"blocks of {block_bytes} "
                          "bytes do not begin there: this layout of states is not known")
    return like.new_empty(0).set_(storage, offset // like.element_size(), like.shape, like.stride())
