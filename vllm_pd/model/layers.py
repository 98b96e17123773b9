# SPDX-License-Identifier: Apache-2.0
"""What is transferred are blocks of one size that have the KV of their tokens in every layer of a group, in one shape,
or, in the layers of other groups, the recurrent state after some token. On V1 layers may also differ in shape, if vLLM
lays all of them into each block (`is_mixed`). A model whose layers have more, less or other than that is refused.

`check_layers` and `check_v1_layers` refuse by the configuration, before the model is loaded. It does not tell
everything. `check_groups` looks at what V1 has made of it, and `vllm_pd.transfer.layout` at the cache itself.

A sliding window in some layers: V1 keeps these in groups of their own, which have the blocks of the last tokens only
(`vllm_pd.protocol.rows`), or, without its hybrid KV cache manager, those of all tokens in one group with all layers.
Layers with a recurrent state are always in groups of their own, beside those of the layers with full attention.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_pd.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

CACHE_DTYPES = frozenset({"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"})
COMPRESSED_KEY = "compress_ratios"  # of a model whose layers keep one state for several tokens, and others beside it
INDEX_KEY = "index_topk"  # of a model whose layers have an index of all tokens, from which they choose some
FP8_DS_MLA = "fp8_ds_mla"  # a token is 656 bytes
MLA_DTYPES = CACHE_DTYPES | {FP8_DS_MLA}
WITH_DRAFTS = frozenset({"MAMBA2", "GDN_ATTN", "SHORT_CONV"})  # kinds of states whose place beside drafts is known
ONE_SHAPE = "serve a model whose layers all have KV of one shape: "
OR_IN_BLOCKS = "; or set VLLM_KV_CACHE_LAYOUT to BLHNC, if the attention backend has it"  # V1
_OTHER_STATE = {
    "blocksparse_block_size": "serve a model without block-sparse attention: its layers order the axes of a block "
                              "otherwise than the engine's backend does",
    "index_kpool": "serve a model whose index has the key of each token: what this one keeps of the last tokens is in "
                   "a block of its own, which is not transferred",
    "rswa_window": "serve a model without reference sliding windows: blocks that it frees have no place in the peer's "
                   "table",
}
_OF_SOME_LAYERS = {  # a key for some layers -> that for the others
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
    "global_head_dim": "head_dim",
}


def check_layers(config: VllmConfig, with_bytes: bool = False) -> None:
    """Raises ConfigError for a model or a type of the cache that can't be transferred, on either engine. `with_bytes`:
    blocks may have what only moves as whole bytes, beside the KV of MLA or in its place."""
    cache_dtype, model = config.cache_config.cache_dtype, config.model_config.hf_text_config
    for key, cure in _OTHER_STATE.items():
        if getattr(model, key, None):
            raise ConfigError(key, getattr(model, key), cure)
    on_v1, may_differ = with_bytes, with_bytes and may_be_mixed(config)
    if is_compressed(config) and not may_differ:
        raise ConfigError(COMPRESSED_KEY, getattr(model, COMPRESSED_KEY, None), "use V1, or serve a model without "
                          "compressed attention: its layers have more than one kind of KV")
    with_bytes = with_bytes and config.model_config.use_mla
    if _has_index(config) and not with_bytes:
        raise ConfigError(INDEX_KEY, getattr(model, INDEX_KEY), "serve a model without sparse attention: its layers "
                          "have a second cache, which is transferred on V1 alone, beside MLA, and is not stored")
    known = MLA_DTYPES if with_bytes else CACHE_DTYPES
    if cache_dtype not in known:
        raise ConfigError("kv_cache_dtype", cache_dtype, f"use one of {sorted(known)}: what a block of another type "
                          "has beside keys and values is not known here")
    if may_differ:
        return
    or_in_blocks = OR_IN_BLOCKS if on_v1 else ""
    for key, other in _OF_SOME_LAYERS.items():
        values = getattr(model, key, None), getattr(model, other, None)
        if None not in values and values[0] != values[1]:
            raise ConfigError(key, values[0], f"{ONE_SHAPE}{other} is {values[1]}{or_in_blocks}")
    groups = _heads_in_groups(model)
    if len(groups) > 1:
        raise ConfigError("block_configs", f"n_heads_in_group {sorted(groups)}",
                          f"{ONE_SHAPE}here KV heads differ{or_in_blocks}")


def check_v1_layers(config: VllmConfig) -> None:
    """As `check_layers`, by what only V1's configuration has."""
    if config.cache_config.kv_cache_dtype_skip_layers:
        raise ConfigError("kv_cache_dtype_skip_layers", config.cache_config.kv_cache_dtype_skip_layers,
                          "remove it: the cache must be of one type in all layers")
    if config.model_config.attention_chunk_size:
        raise ConfigError("attention_chunk_size", config.model_config.attention_chunk_size,
                          "serve a model without chunked local attention: blocks that it frees have no place in the "
                          "peer's table")
    shapes = config.model_config.model_arch_config
    each = [shapes[layer] for layer in range(shapes.total_num_hidden_layers)]
    kinds = {(layer.total_num_kv_heads, layer.head_size) for layer in each}
    if len(kinds) > 1 and not may_be_mixed(config):
        raise ConfigError("model", config.model_config.model, f"{ONE_SHAPE}here (KV heads, head size) are "
                          f"{sorted(kinds)}{OR_IN_BLOCKS}")


def check_states(config: VllmConfig, has_store: bool, is_offloading: bool = False) -> None:
    """What can't be together with recurrent states. Raises ConfigError."""
    if not config.model_config.has_inner_state:
        return
    scheduler, cache = config.scheduler_config, config.cache_config
    stages = config.parallel_config.pipeline_parallel_size
    model = f"of a model with recurrent states ({config.model_config.model})"
    for key, value, cure in (
        ("store", has_store, f"leave it out: the store keeps KV, and nothing {model}"),
        ("OffloadingConnector", is_offloading, f"leave it out: it was not tried with the states {model}"),
        ("pipeline_parallel_size", stages > 1 and stages, f"use 1: stages {model} were not tried"),
        ("use_replayssm", cache.use_replayssm, f"remove it: it keeps beside the blocks how far the states {model} are"),
        ("prefix_match_unit", cache.prefix_match_unit, f"remove it: prefix hits {model} must be whole blocks"),
        ("disable_hybrid_kv_cache_manager", scheduler.disable_hybrid_kv_cache_manager,
         f"leave --disable-hybrid-kv-cache-manager away: the states {model} need groups of their own"),
    ):
        if value:
            raise ConfigError(key, value, cure)


def check_index(config: VllmConfig, has_store: bool, is_offloading: bool = False) -> None:
    """What can't be together with sparse attention by an index, or with compressed attention. Raises ConfigError."""
    compressed = is_compressed(config)
    if not _has_index(config) and not compressed:
        return
    stages = config.parallel_config.pipeline_parallel_size
    of_layers = f"the index that the layers of {config.model_config.model} have beside their KV"
    for key, value, cure in (
        ("store", has_store, f"leave it out: the store keeps KV, and not {of_layers}"),
        ("OffloadingConnector", is_offloading, f"leave it out: it was not tried with {of_layers}"),
        ("hisparse_config", config.attention_config.hisparse_config,
         f"remove it: it has the KV in the host's memory, and {of_layers} on the device"),
        ("pipeline_parallel_size", compressed and stages > 1 and stages,
         "use 1: stages of a model with compressed attention were not tried"),
        ("disable_hybrid_kv_cache_manager", compressed and config.scheduler_config.disable_hybrid_kv_cache_manager,
         "leave --disable-hybrid-kv-cache-manager away: compressed attention needs groups of its own"),
    ):
        if value:
            raise ConfigError(key, value, cure)


def is_mixed(groups: Sequence[KVCacheGroupSpec]) -> bool:
    """Whether layers have KV of different shapes, so that only whole blocks of all layers can be transferred. As far as
    these groups show: in EngineCore a group has the spec of one of its layers. An index beside a layer's KV is none of
    them (`vllm_pd.transfer.whole`), nor are layers with a recurrent state."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec, SlidingWindowSpec
    with_kv = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec)
    specs = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    if any(type(spec) not in with_kv for spec in specs):
        return False
    return len({_shape(spec) for spec in specs if not (len(groups) == 1 and _is_index(spec))}) > 1


def _shape(spec: Any) -> tuple[Any, ...]:
    return spec.block_size, spec.page_size_bytes, spec.num_kv_heads, spec.head_size, spec.dtype, spec.tokens_per_state


def _is_index(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import SparseCacheRole
    return getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER


def _check_mixed(groups: Sequence[KVCacheGroupSpec]) -> None:
    """The groups of `is_mixed`: some must have the KV of all tokens, each other one window. Raises ConfigError."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    specs = [layer_specs(group.kv_cache_spec) for group in groups]
    windows = [{spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0 for spec in each} for each in specs]
    names = [" and ".join(sorted({type(spec).__name__ for spec in each})) for each in specs]
    if not any(isinstance(spec, FullAttentionSpec) for each in specs for spec in each) or max(map(len, windows)) > 1:
        raise ConfigError("kv_cache_groups", names, "serve a model for which vLLM keeps the KV of all tokens in one "
                          "group of blocks, with or without others, each for layers with one sliding window")
    kept = {name: getattr(spec, name) for each in specs for spec in each
            for name in ("prefix_replay_tokens", "extra_retained_tokens") if getattr(spec, name, 0)}
    if kept:
        raise ConfigError("kv_cache_groups", names, f"serve a model whose windows are kept as they are: here {kept}")


def check_groups(groups: Sequence[KVCacheGroupSpec], is_block_outermost: bool = False) -> None:
    """All layers must be in one group of blocks, which has the KV of all tokens, or in such groups and others with
    sliding windows, all of whose blocks have one size, or in such groups and others with recurrent states. Where all
    layers are inside each block (`is_block_outermost`), the shapes of layers with KV may differ. Raises ConfigError."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
    if is_block_outermost and is_mixed(groups):
        _check_mixed(groups)
        return
    specs = [layer_specs(group.kv_cache_spec) for group in groups]
    kinds = [{type(spec) for spec in each} for each in specs]
    if kinds in ([{FullAttentionSpec}], [{MLAAttentionSpec}]):
        return
    names = [" and ".join(sorted(kind.__name__ for kind in each)) for each in kinds]
    pairs = (({FullAttentionSpec}, {SlidingWindowSpec}), ({FullAttentionSpec}, {MambaSpec}),
             ({MLAAttentionSpec}, {MambaSpec}))
    full, other = next((pair for pair in pairs if pair[0] in kinds and all(each in pair for each in kinds)),
                       (None, None))
    if full is None:
        raise ConfigError("kv_cache_groups", names, "serve a model for which vLLM keeps the KV of all tokens in one "
                          "group of blocks, with or without others, all for layers with a sliding window or all for "
                          "recurrent states; or write --disable-hybrid-kv-cache-manager, which puts some models' "
                          "layers in one group")
    with_kv = [each for each, kind in zip(specs, kinds, strict=True) if kind == full or other == {SlidingWindowSpec}]
    shapes = {(spec.block_size, spec.page_size_bytes, spec.num_kv_heads, spec.head_size, spec.dtype,
               getattr(spec, "extra_retained_tokens", 0)) for each in with_kv for spec in each}
    windows = [{getattr(spec, "sliding_window", None) for spec in each} for each in with_kv]
    if len(shapes) > 1 or max(map(len, windows)) > 1:
        in_one = ("; or set VLLM_KV_CACHE_LAYOUT to BLHNC, or write --disable-hybrid-kv-cache-manager"
                  if other == {SlidingWindowSpec} else "")
        raise ConfigError("kv_cache_groups", names, f"{ONE_SHAPE}here (tokens of a block, bytes, KV heads, head size, "
                          f"type, kept tokens) are {sorted(map(str, shapes))}{in_one}")
    states = {(spec.block_size, spec.mamba_cache_mode, spec.num_speculative_blocks)
              for each, kind in zip(specs, kinds, strict=True) if kind == {MambaSpec} for spec in each}
    if len(states) > 1 or any(mode == "all" for _, mode, _ in states):
        raise ConfigError("kv_cache_groups", names, "serve a model whose states are all kept in one way, with "
                          "--mamba-cache-mode align or none: here (tokens of a block, mode, blocks for drafts) are "
                          f"{sorted(states)}")
    drafting = {spec.mamba_type.name for each, kind in zip(specs, kinds, strict=True) if kind == {MambaSpec}
                for spec in each if spec.num_speculative_blocks}
    if drafting - WITH_DRAFTS:
        raise ConfigError("speculative_config", sorted(drafting), "remove it: states with drafts are known of "
                          f"{sorted(WITH_DRAFTS)} only")


def choose_one_group(config: VllmConfig, is_asked_for: bool, has_store: bool, is_offloading: bool = False) -> None:
    """Have V1 keep all layers in one group, as with `--disable-hybrid-kv-cache-manager`, where something else is on
    that was not tried with several. `is_asked_for`: the user has written the flag that turns the manager on.
    `is_offloading`: with OffloadingConnector. Raises ConfigError for both together."""
    scheduler, stages = config.scheduler_config, config.parallel_config.pipeline_parallel_size
    reasons = {"store": has_store, "OffloadingConnector": is_offloading,
               "pipeline_parallel_size": stages > 1 and stages}
    key = next((key for key, value in reasons.items() if value), None)
    if key is None or scheduler.disable_hybrid_kv_cache_manager:
        return
    if is_asked_for:
        raise ConfigError("disable_hybrid_kv_cache_manager", False, f"leave --no-disable-hybrid-kv-cache-manager away: "
                          f"with {key}={reasons[key]} it was not tried, and all layers must be in one group of blocks")
    scheduler.disable_hybrid_kv_cache_manager = True


def check_stored_groups(groups: Sequence[KVCacheGroupSpec]) -> None:
    """As `check_groups`, for the store: all layers must be in one group, and the KV of a block must follow from the
    tokens up to its end, by which it is named. It does not where a prompt is computed with attention to later tokens
    (Prefix LM). Raises ConfigError."""
    check_groups(groups)
    if len(groups) > 1:
        raise ConfigError("kv_cache_groups", len(groups), "write --disable-hybrid-kv-cache-manager: the store keeps "
                          "the blocks of one group")
    if any(spec.non_causal for group in groups for spec in layer_specs(group.kv_cache_spec)):
        raise ConfigError("kv_cache_groups", "non_causal", "serve this model without the store: the KV of its prompts "
                          "depends on later tokens, so it is of no use to a prompt with the same beginning")


def layer_specs(spec: KVCacheSpec) -> Sequence[KVCacheSpec]:
    """Of the layers of a group: one for all, or, where they differ in shape, their own."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def may_be_mixed(config: VllmConfig) -> bool:
    """Whether V1 may lay all layers into each block: by the order that the user has asked for, or that our connector
    asks for. That of compressed attention has no other."""
    from vllm import envs
    asked = envs.VLLM_KV_CACHE_LAYOUT
    return is_compressed(config) or (asked.startswith("B") if asked else asks_for_blocks(config))


def asks_for_blocks(config: VllmConfig) -> bool:
    """Whether our connector asks V1 for an order in which all layers are in each block. ROCm's attention has it in part
    only, and a CPU's does not."""
    from vllm.platforms import current_platform
    return not config.model_config.use_mla and current_platform.is_cuda()


def is_compressed(config: VllmConfig) -> bool:
    """Whether the model has compressed attention: its layers keep one state for several tokens, a window, and others
    beside them, in groups of their own."""
    model = config.model_config.hf_text_config  # vLLM 0.33 leaves the configuration to Transformers
    return bool(getattr(model, COMPRESSED_KEY, None) or getattr(model, "compress_rates", None))


def _has_index(config: VllmConfig) -> bool:
    return bool(getattr(config.model_config.hf_text_config, INDEX_KEY, None))


def _heads_in_groups(model: Any) -> set[int]:
    """By how many query heads a KV head is used, in the layers that have attention: of models found by architecture
    search, which configure each layer."""
    attentions = [_field(block, "attention") for block in getattr(model, "block_configs", None) or []]
    return {_field(attention, "n_heads_in_group") for attention in attentions
            if attention is not None and not _field(attention, "no_op")} - {None}


def _field(value: Any, name: str) -> Any:
    """Of a configuration inside another, which is an object, or a mapping where nobody made one of it."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
