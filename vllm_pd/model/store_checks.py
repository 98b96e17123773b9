# SPDX-License-Identifier: Apache-2.0
"""What an engine must be to use the KV store: checked before the model is loaded."""
from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd.errors import ConfigError
from vllm_pd.model.checks import check_features, check_limits, check_model, check_parallel
from vllm_pd.model.fingerprint import pin_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STABLE_HASHES = ("sha256", "sha256_cbor")  # equal in all processes, and no two prompts have the same
STORE_LIMITS = {key: (1, "use 1: the store is tried with tensor-parallel ranks of one host only") for key in (
    "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
    "nnodes")}
STORE_FEATURES = {
    "speculative_config": "remove it: tokens that are guessed and rejected would be stored as computed",
    "lora_config": "remove it: adapters are known by their names only, so their KV can't be told apart",
    "enable_sleep_mode": "remove it: a sleeping engine's cache is gone while blocks are loaded",
    "attention_chunk_size": "serve a model without chunked local attention: its blocks are not kept",
    "enable_return_routed_experts": "remove it: the experts of a prompt that is loaded are not stored",
    "diffusion_config": "serve a model that computes one token after the other: this one writes its blocks anew",
    "enable_fault_tolerance": "remove it: a load that ends in a step that is given up would never be reported",
    "weight_transfer_config": "remove it and restart engines for new weights: KV of the old ones is stored",
}


def check_store(config: VllmConfig, given: str | None = None) -> None:
    """Raises ConfigError for an engine that can't use the store, or whose weights can't be told from others. `given`:
    the setting `weights_digest`."""
    check_storing(config)
    pin_weights(config, given)


def check_storing(config: VllmConfig) -> None:
    """As `check_store`, by the configuration alone."""
    transfer, cache = config.kv_transfer_config, config.cache_config
    if transfer.kv_role != "kv_both":
        raise ConfigError("kv_role", transfer.kv_role, "write kv_both: every engine puts and reads blocks")
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError("kv_load_failure_policy", transfer.kv_load_failure_policy, 'write "recompute" into '
                          "--kv-transfer-config: a block that is gone or wrong is then computed, and no request fails")
    if cache.prefix_caching_hash_algo not in STABLE_HASHES:
        raise ConfigError("prefix_caching_hash_algo", cache.prefix_caching_hash_algo, "write one of "
                          f"{', '.join(STABLE_HASHES)}: the names of blocks must be equal in all engines")
    if cache.cache_dtype.startswith("fp8"):
        raise ConfigError("kv_cache_dtype", cache.cache_dtype, "use another: with other scales the same bytes mean "
                          "another KV")
    parallel, model = config.parallel_config, config.model_config
    check_limits({key: getattr(parallel, key) for key in STORE_LIMITS}, STORE_LIMITS)
    check_features({"speculative_config": config.speculative_config, "lora_config": config.lora_config,
                    "enable_sleep_mode": model.enable_sleep_mode, "attention_chunk_size": model.attention_chunk_size,
                    "enable_return_routed_experts": config.aux_output_config.enable_return_routed_experts,
                    "diffusion_config": config.diffusion_config,
                    "enable_fault_tolerance": parallel.enable_fault_tolerance,
                    "weight_transfer_config": config.weight_transfer_config}, STORE_FEATURES)
    check_model(config)
    check_parallel(config)
    if parallel.tensor_parallel_size > 1 and config.device_config.device_type != "cpu":
        raise ConfigError("tensor_parallel_size", parallel.tensor_parallel_size, "use 1 where the cache is on a GPU: "
                          "ranks but the first may still copy a block out when the scheduler gives it to another "
                          "request")
    if parallel.tensor_parallel_size > 1 and config.scheduler_config.async_scheduling:
        raise ConfigError("async_scheduling", True, "add --no-async-scheduling: after an error on one rank another "
                          "would take part of its next step for that of the present one, and put what comes of it")


def check_shared_store(config: VllmConfig) -> None:
    """Raises ConfigError for an engine with PDConnector that can't use the store. Its weights have been looked at."""
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching", False, "leave it on, or leave \"store\" out: what the store has is "
                          "used as a prefix hit")
    check_storing(config)
