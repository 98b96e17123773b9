# SPDX-License-Identifier: Apache-2.0
"""What is refused before the model is loaded: loading takes minutes, and an error after it costs all of them.

`vllm_pd.v0.claim` looks at the arguments; this module at the whole configuration, at this machine's NIXL, and at a
sample of the cache that the workers are going to have.
"""
from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import math
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_pd.config import PDConfig
from vllm_pd.core.messages import Role
from vllm_pd.core.policy import most_parked_requests
from vllm_pd.errors import ConfigError
from vllm_pd.fingerprint import pin_weights
from vllm_pd.transfer.layout import CacheDescription, check_backend, describe
from vllm_pd.v0.fingerprint import cache_dtype

if TYPE_CHECKING:
    from vllm.attention import AttentionBackend
    from vllm.config import VllmConfig

NIXL_TIMEOUT_S = 60  # it takes a second; only a broken installation does not end
SAMPLE_BLOCKS = 2
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


def check_config(config: VllmConfig, settings: dict[str, Any]) -> None:
    """Raises ConfigError for an engine that can't take part. `settings` is what `vllm_pd.v0.claim` left."""
    ours = PDConfig.parse(settings["kv_role"], settings["extra"])
    check_model(config)
    check_parallel(config)
    check_seats(ours, config.scheduler_config.max_num_seqs)
    check_memory()
    check_bind(ours.bind)
    pin_weights(config)
    sample_cache(config)
    check_nixl()


def check_model(config: VllmConfig) -> None:
    """The model must be one whose prompt is nothing but KV."""
    model: Any = config.model_config
    for refused, key, cure in (
        (model.runner_type != "generate", "runner_type", "serve a generating model: a pooling one has no decode"),
        (model.is_encoder_decoder, "model", "serve a decoder-only model: cross-attention blocks are not transferred"),
        (model.is_attention_free, "model", "serve a model with attention: there is no KV to transfer"),
        (model.has_inner_state, "model", "serve a model without recurrent state: it is not in the KV blocks"),
        (config.cache_config.sliding_window is not None, "sliding_window",
         "add --disable-sliding-window: blocks that slide out have no place in the peer's table"),
    ):
        if refused:
            value = config.cache_config.sliding_window if key == "sliding_window" else model.model
            raise ConfigError(key, value, cure)


def check_parallel(config: VllmConfig) -> None:
    """The ranks must be on this host, and share the KV heads evenly."""
    parallel = config.parallel_config
    if parallel.world_size > 1 and parallel.distributed_executor_backend != "mp":
        raise ConfigError("distributed_executor_backend", parallel.distributed_executor_backend,
                          'write "mp": all workers must be on this host')
    ranks, kv_heads = parallel.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    if max(ranks, kv_heads) % min(ranks, kv_heads):
        raise ConfigError("tensor_parallel_size", ranks, f"choose one that divides the model's {kv_heads} KV heads")


def check_seats(config: PDConfig, max_num_seqs: int) -> None:
    """An engine that does both jobs must have a seat in its batch that its own parked requests never take: a peer's job
    needs one, and that peer may have parked requests that wait for this engine in turn."""
    if config.role is not Role.BOTH:
        return
    if max_num_seqs < 2:
        raise ConfigError("max_num_seqs", max_num_seqs, "a kv_both engine needs a seat for peers' jobs beside one for "
                          "a parked request: use at least 2, or start it as kv_consumer or kv_producer")
    if most_parked_requests(config.max_parked_fraction, max_num_seqs) >= max_num_seqs:
        raise ConfigError("max_parked_fraction", config.max_parked_fraction, "on a kv_both engine one of the "
                          f"{max_num_seqs} seats (max_num_seqs) must stay free for peers' jobs: write at most "
                          f"{math.floor((max_num_seqs - 1) / max_num_seqs * 1000) / 1000:g}")


def check_memory() -> None:
    """The KV cache must lie in memory that can be registered for transfers."""
    from vllm.platforms import current_platform
    settings = os.environ.get(ALLOCATOR_VARIABLE, "")
    if current_platform.device_type == "cuda" and "expandable_segments:true" in settings.replace(" ", "").lower():
        raise ConfigError(ALLOCATOR_VARIABLE, settings, "take expandable_segments:True out of it: memory that is "
                          "mapped piece by piece can't be registered for transfers as one")


def check_bind(bind: str) -> None:
    """The control socket's address must be one of this machine's. Port 0: whether it is free is not asked."""
    host = urlsplit(bind).hostname
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ConfigError("bind", bind, f"this machine can't listen there ({error}): write an address of its own"
                          ) from error


def sample_cache(config: VllmConfig) -> CacheDescription:
    """What a cache of two blocks and one layer looks like that is made as the workers make theirs."""
    import torch
    from vllm.attention import get_attn_backend
    from vllm.platforms import current_platform

    model, cache = config.model_config, config.cache_config
    backend = get_attn_backend(model.get_head_size(), model.dtype, cache.cache_dtype, cache.block_size,
                               model.is_attention_free, use_mla=model.use_mla)
    platform = current_platform.device_type
    name = backend_name(platform, backend)
    check_backend(name)
    heads, size = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    shape = backend.get_kv_cache_shape(SAMPLE_BLOCKS, cache.block_size, heads, size)
    order = tuple(range(len(shape)))
    if platform != "cpu":
        with contextlib.suppress(AttributeError, NotImplementedError):  # as upstream asks for it
            order = backend.get_kv_cache_stride_order()
    sample = torch.empty([shape[axis] for axis in order], dtype=cache_dtype(config)).permute(*order)
    return describe([sample], num_blocks=SAMPLE_BLOCKS, block_size=cache.block_size, kv_heads=heads, head_size=size,
                    platform=platform, backend=name)


def backend_name(platform: str, backend: type[AttentionBackend]) -> str:
    """What `vllm_pd.transfer.layout` calls this attention back end: on the CPU its layout depends on IPEX."""
    name = backend.get_name()
    return "IPEX" if platform == "cpu" and name == "TORCH_SDPA" and _has_ipex() else name


def _has_ipex() -> bool:
    return importlib.util.find_spec("intel_extension_for_pytorch") is not None


@functools.cache
def check_nixl() -> None:
    """NIXL must be there and able to make an agent with UCX. Tried in a process of its own: its libraries may touch the
    device, and workers that are forked after that can't."""
    program = "from vllm_pd.transfer.agent import NixlAgent; NixlAgent('check', False).metadata()"
    try:
        tried = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=NIXL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _broken_nixl(f"made no agent in {NIXL_TIMEOUT_S} s") from None
    if tried.returncode:
        lines = tried.stderr.strip().splitlines()
        raise _broken_nixl(lines[-1] if lines else f"ended with status {tried.returncode}")


def _broken_nixl(reason: str) -> ConfigError:
    try:
        version = importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return ConfigError("nixl", version, f"{reason}: install it again, in the version that vllm requires: "
                       "pip install --force-reinstall nixl==VERSION")
