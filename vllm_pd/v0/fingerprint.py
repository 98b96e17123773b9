# SPDX-License-Identifier: Apache-2.0
"""What an engine tells its peers about its model and cache, so that KV never goes between two that differ."""
from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_pd.core.messages import PROTOCOL, Fingerprint
from vllm_pd.errors import ConfigError
from vllm_pd.weights import SUFFIXES, digest_weights, weight_files

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig

IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "architectures"})
_AS_AUTO = frozenset({"safetensors", "fastsafetensors", "runai_streamer"})  # other ways to read the same files
_COMMIT = re.compile("[0-9a-f]{40}")


def fingerprint(config: VllmConfig, layout: str) -> Fingerprint:
    """The engine's fingerprint. `layout` names the order of its cache's axes (vllm_pd.transfer.layout)."""
    model, parallel = config.model_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = config.cache_config.cache_dtype
    return Fingerprint(
        protocol=PROTOCOL,
        model=model_digest(config),
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
    model = config.model_config
    layers = model.get_num_layers(config.parallel_config)
    return 2 * layers * model.get_total_num_kv_heads() * model.get_head_size() * cache_dtype(config).itemsize


def cache_dtype(config: VllmConfig) -> torch.dtype:
    """The type of the cache's elements, or another one of that size."""
    from vllm.utils import STR_DTYPE_TO_TORCH_DTYPE
    kv_dtype = config.cache_config.cache_dtype
    return config.model_config.dtype if kv_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kv_dtype]


def model_digest(config: VllmConfig) -> str:
    """Architecture and a digest of configuration and weights, the same wherever the same model lies.

    Of a local folder or file every tensor counts (`vllm_pd.weights`), of a hub's model its name and commit. What it
    can't see was refused by `pin_weights`.
    """
    model = config.model_config
    digest = hashlib.sha256()
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in IGNORED_KEYS}
    digest.update(json.dumps([settings, model.quantization], sort_keys=True, default=str).encode())
    digest.update(_weights(model, _load_format(config)))
    architecture = (model.hf_config.architectures or ["unknown"])[0]
    return f"{architecture}:{digest.hexdigest()[:16]}"


def hub_commit(model: ModelConfig) -> str:
    """The commit of a hub's model, whose configuration was read at that commit. Raises ConfigError if it is unknown."""
    commit = model.hf_config._commit_hash or model.revision or ""
    if not _COMMIT.fullmatch(commit):
        raise ConfigError("revision", model.revision, f"the commit of {model.model} is not known, so its weights can't "
                          "be told from a peer's: write --revision with the whole commit, or serve a local folder")
    return commit


def pin_weights(config: VllmConfig) -> None:
    """Make sure, before the model is loaded, that the digest is going to see what is loaded: the files of a folder, or
    of a hub's model that very commit by which it will be known. Raises ConfigError where neither can be."""
    model = config.model_config
    if _load_format(config) == "dummy":
        return
    path = Path(model.model)
    if not path.exists():
        model.revision = hub_commit(model)
    elif not weight_files(path):
        raise ConfigError("model", model.model, "serve a folder or file with the weights in it, or a model of the hub: "
                          f"there is no {', '.join(SUFFIXES)} file, so its weights can't be told from a peer's")


def _load_format(config: VllmConfig) -> str:
    from vllm.config import LoadFormat
    load_format = config.load_config.load_format
    if not isinstance(load_format, str) or load_format == LoadFormat.TENSORIZER:
        raise ConfigError("load_format", load_format, "use one that reads the model's own files: weights from "
                          "elsewhere can't be told from a peer's")
    value = LoadFormat(load_format).value
    return "auto" if value in _AS_AUTO else value


def _weights(model: ModelConfig, load_format: str) -> bytes:
    if load_format == "dummy":
        return b"dummy"  # from the shapes alone, with a constant seed
    path = Path(model.model)
    if not path.exists():
        return f"{load_format} {model.model}@{hub_commit(model)}".encode()
    return load_format.encode() + digest_weights(path)
