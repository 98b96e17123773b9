# SPDX-License-Identifier: Apache-2.0
"""What is refused before the model is loaded, besides what both engines refuse (`vllm_pd.model.checks`).

`vllm_pd.v0.claim` looks at the arguments; this module at the whole configuration, at this machine's NIXL, and at a
sample of the cache that the workers are going to have.
"""
from __future__ import annotations

import contextlib
import importlib.util
import math
from typing import TYPE_CHECKING, Any

from vllm_pd.decisions.policy import most_parked_requests
from vllm_pd.errors import ConfigError
from vllm_pd.handover.own_policy import load_policy
from vllm_pd.model.checks import check_bind, check_meeting, check_memory, check_model, check_nixl, check_parallel
from vllm_pd.model.fingerprint import pin_weights, short_rope_tokens
from vllm_pd.protocol.messages import Role
from vllm_pd.settings.engine import PDConfig
from vllm_pd.settings.store import FAR_KEYS, StoreSettings
from vllm_pd.transfer.choice import TransportChoice
from vllm_pd.transfer.layout import CacheDescription, check_backend, describe
from vllm_pd.v0.fingerprint import cache_dtype

if TYPE_CHECKING:
    from vllm.attention import AttentionBackend
    from vllm.config import VllmConfig

SAMPLE_BLOCKS = 2


def check_config(config: VllmConfig, settings: dict[str, Any]) -> None:
    """Raises ConfigError for an engine that can't take part. `settings` is what `vllm_pd.v0.claim` left."""
    ours = PDConfig.parse(settings["kv_role"], settings["extra"])
    check_model(config)
    check_windows(config)
    check_rope(config)
    check_cache_type(config)
    check_parallel(config)
    check_transport(ours, config.parallel_config.tensor_parallel_size)
    TransportChoice.of(ours.transport, ours.transport_host).check_device(config.device_config.device_type)
    check_seats(ours, config.scheduler_config.max_num_seqs)
    if ours.store is not None:
        check_store(config)
        check_one_host(ours.store)
    check_memory()
    check_bind(ours.bind)
    check_meeting(ours.bind, ours.broker)
    load_policy(ours.policy, ours.bounds)
    pin_weights(config, ours.weights_digest)
    sample_cache(config)
    if not ours.is_two_sided:
        check_nixl(ours.transport_host)


def check_windows(config: VllmConfig) -> None:
    """No layer may have a sliding window. Where some have one, V0 keeps the KV of all tokens, but its attention on the
    CPU has no window after a prefix, which is what a remote prefill is, and others were not tried. vLLM makes this
    field of a window and a pattern, unless the window is disabled; but a model's own configuration may have it, too."""
    model = config.model_config
    window = getattr(model.hf_text_config, "interleaved_sliding_window", None)
    if window is not None and model.disable_sliding_window:
        raise ConfigError("interleaved_sliding_window", window, "use V1, or serve another model: "
                          "--disable-sliding-window does not reach a window that the model's own configuration has for "
                          "some layers, which was not tried on V0")
    if window is not None:
        raise ConfigError("sliding_window", window, "add --disable-sliding-window, or use V1: a window in some layers "
                          "was not tried on V0")


def check_rope(config: VllmConfig) -> None:
    """The key of a token must depend on its position alone. With LongRoPE, V0 chooses between two sets of factors anew
    in each step, by the latest position in it. So it would depend on chunks and prefix hits, and on the other prompts
    of a batch, whether a peer or this engine computes it."""
    tokens, served = short_rope_tokens(config.model_config), config.model_config.max_model_len
    if tokens is not None and served > tokens:
        raise ConfigError("max_model_len", served, f"write at most {tokens}, or use V1: above that, V0 chooses the "
                          "factors of LongRoPE anew in each step, and a prompt's KV would depend on who computes it")


def check_cache_type(config: VllmConfig) -> None:
    """On the CPU V0 computes a prompt with fp8 from keys and values that are not rounded, so after a remote prefill the
    answer would be another one. vLLM has no prefix caching there with fp8, either."""
    kind = config.cache_config.cache_dtype
    if config.device_config.device_type == "cpu" and kind.startswith("fp8"):
        raise ConfigError("kv_cache_dtype", kind, "use auto, or V1: on the CPU V0 computes a prompt from KV that is "
                          "not rounded, and a decode engine would have the rounded KV only")


def check_transport(config: PDConfig, ranks: int) -> None:
    """The ranks beside the first hear of a grant with a step, which may be too late for a two-sided transport."""
    if config.is_two_sided and ranks > 1 and config.role.decodes:
        raise ConfigError("transport", config.transport, f"a decode engine of V0 with {ranks} ranks can't tell them in "
                          "time which blocks are granted: write nixl, or use V1")


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


def check_store(config: VllmConfig) -> None:
    """Raises ConfigError for an engine that can't use the KV store."""
    if config.device_config.device_type != "cpu":
        raise ConfigError("store", config.device_config.device_type, "leave it out: the store is not connected to "
                          "caches on a device yet")
    ranks = config.parallel_config.tensor_parallel_size
    if ranks > 1:
        raise ConfigError("tensor_parallel_size", ranks, "use 1, leave out the key store, or use V1: the other ranks "
                          "of V0 hear of a block to put with the next step, when a peer may write to it already")
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching", False, "leave it on, or leave out the key store: what the store has "
                          "is used as a prefix hit. If nothing switches it off, the log says why it is off")


def check_one_host(settings: StoreSettings) -> None:
    """Raises ConfigError for a store beyond one host."""
    for key in sorted(FAR_KEYS):
        if (value := getattr(settings, key)) is not None:
            raise ConfigError(key, value, "leave it out of the object store, or use V1: V0's scheduler asks once where "
                              "a prompt is prefilled, and can't wait for blocks of other hosts before")


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
