# SPDX-License-Identifier: Apache-2.0
"""A defect of vLLM's CPU build that would give wrong KV to others, mended in the workers of engines with adapters.

A token without an adapter has the index -1 in a batch with adapters. vLLM's kernels for GPUs leave such tokens out; the
functions in torch, which the CPU has, take it for the last adapter and add what that makes of the token
(`vllm/lora/ops/torch_ops/lora_ops.py`). A prefill engine mixes jobs of many, so one D's adapter would be in another D's
base model (docs/upstreaming.md).
"""
from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EXPANDING = ("bgmv_expand", "bgmv_expand_slice")  # `sgmv_expand` and its kind call these
_CALLED_IN = ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu")


def leave_base_tokens() -> None:
    """From now on this process adds nothing to tokens without an adapter. May be called again."""
    modules = [importlib.import_module(name) for name in _CALLED_IN]
    for name in EXPANDING:
        expand = getattr(modules[0], name)
        if not hasattr(expand, "vllm_pd"):
            for module in modules:
                setattr(module, name, _leaving(expand))


def _leaving(expand: Callable[..., None]) -> Callable[..., None]:

    @functools.wraps(expand)
    def expand_adapters(inputs: torch.Tensor, lora_b_weights: torch.Tensor, output_tensor: torch.Tensor,
                        lora_indices_tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        has_none = (lora_indices_tensor < 0).unsqueeze(1)
        expand(inputs.masked_fill(has_none, 0), lora_b_weights, output_tensor, lora_indices_tensor, *arguments,
               **keywords)

    expand_adapters.vllm_pd = True
    return expand_adapters
