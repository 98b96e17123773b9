# SPDX-License-Identifier: Apache-2.0
"""What an engine tells its peers about its model and cache, so that KV never goes between two that differ."""
from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd.model.fingerprint import model_digest
from vllm_pd.protocol.messages import PROTOCOL, Fingerprint
from vllm_pd.settings.store import DIGEST_KEY
from vllm_pd.v0 import SETTINGS_KEY

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def fingerprint(config: VllmConfig, layout: str) -> Fingerprint:
    """The engine's fingerprint. `layout` names the order of its cache's axes (vllm_pd.transfer.layout)."""
    model, parallel = config.model_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = config.cache_config.cache_dtype
    return Fingerprint(
        protocol=PROTOCOL,
        model=model_digest(config, given_weights(config)),
        dtype=dtype,
        kv_dtype=dtype if kv_dtype == "auto" else kv_dtype,
        block_size=config.cache_config.block_size,
        layers=model.get_num_layers(parallel),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        layout=layout,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
    )


def given_weights(config: VllmConfig) -> str | None:
    """The setting `weights_digest`; None without one."""
    additional = config.additional_config
    settings = additional.get(SETTINGS_KEY) if isinstance(additional, dict) else None
    return None if settings is None else settings["extra"].get(DIGEST_KEY)


def token_bytes(config: VllmConfig) -> int:
    """The KV of one token, over all layers and ranks, in bytes."""
    model = config.model_config
    layers = model.get_num_layers(config.parallel_config)
    return 2 * layers * model.get_total_num_kv_heads() * model.get_head_size() * cache_dtype(config).itemsize


def cache_dtype(config: VllmConfig) -> torch.dtype:
    """The type of the cache's elements, or another one of that size."""
    from vllm.utils import STR_DTYPE_TO_TORCH_DTYPE
    kv_dtype = config.cache_config.cache_dtype
    return config.model_config.dtype if kv_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kv_dtype]
