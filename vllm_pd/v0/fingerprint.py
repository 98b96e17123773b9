# SPDX-License-Identifier: Apache-2.0
"""What an engine tells its peers about its model and cache, so that KV never goes between two that differ."""
from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

from vllm_pd.core.messages import PROTOCOL, Fingerprint

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

SAMPLE_BYTES = 1 << 20
IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "architectures"})


def fingerprint(config: VllmConfig, layout: str) -> Fingerprint:
    """The engine's fingerprint. `layout` names the order of its cache's axes (vllm_pd.transfer.layout)."""
    model, parallel = config.model_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = config.cache_config.cache_dtype
    return Fingerprint(
        protocol=PROTOCOL,
        model=model_digest(model),
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


def token_bytes(config: VllmConfig) -> int:
    """The KV of one token, over all layers and ranks, in bytes."""
    from vllm.utils import STR_DTYPE_TO_TORCH_DTYPE
    model, kv_dtype = config.model_config, config.cache_config.cache_dtype
    dtype = model.dtype if kv_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kv_dtype]
    layers = model.get_num_layers(config.parallel_config)
    return 2 * layers * model.get_total_num_kv_heads() * model.get_head_size() * dtype.itemsize


def model_digest(model: ModelConfig) -> str:
    """Architecture and a digest of configuration and weights, the same wherever the same model lies.

    Of the weights only names, sizes and both ends of each file are read: enough to tell a fine-tune from its base, as
    its header or its last tensor differ, and quick for any size. A model that is not a local folder is told apart by
    its name and revision.
    """
    digest = hashlib.sha256()
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in IGNORED_KEYS}
    digest.update(json.dumps([settings, model.quantization], sort_keys=True, default=str).encode())
    if os.path.isdir(model.model):
        for name in sorted(os.listdir(model.model)):
            if name.endswith((".safetensors", ".bin", ".pt", ".gguf")):
                digest.update(name.encode() + _both_ends(os.path.join(model.model, name)))
    else:
        digest.update(f"{model.model}@{model.revision}".encode())
    architecture = (model.hf_config.architectures or ["unknown"])[0]
    return f"{architecture}:{digest.hexdigest()[:16]}"


def _both_ends(path: str) -> bytes:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(SAMPLE_BYTES)
        file.seek(max(0, size - SAMPLE_BYTES))
        return hashlib.sha256(size.to_bytes(8, "big") + head + file.read(SAMPLE_BYTES)).digest()
