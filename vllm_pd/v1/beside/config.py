# SPDX-License-Identifier: Apache-2.0
"""A `MultiConnector` of PDConnector and vLLM's OffloadingConnector: taken apart where the configuration is made.

vLLM is then given PDConnector alone, of a class that owns the other (`vllm_pd.v1.beside.connector`). What the user
wrote for the other is kept under `OWN_KEY`, where that class reads it in each process.
"""
from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from vllm_pd.errors import ConfigError
from vllm_pd.model.checks import check_features, check_limits
from vllm_pd.model.layers import check_index, check_states, is_mixed
from vllm_pd.v1.plugin import CONNECTOR
from vllm_pd.v1.settings import OWN_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

OFFLOADING = "OffloadingConnector"
MODULE = "vllm_pd.v1.beside.activate"  # has a PDConnector, too, which V1 then takes
KEY = "beside"  # under OWN_KEY
_LIMITS = {key: (1, f"use 1: {CONNECTOR} beside {OFFLOADING} is tried with tensor-parallel ranks of one host only")
           for key in (
    "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
    "nnodes")}
_FEATURES = {
    "speculative_config": f"remove it: drafts were not tried with {CONNECTOR} beside {OFFLOADING}",
    "lora_config": f"remove it: {OFFLOADING} knows adapters by their names only, so their KV can't be told apart",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": f"unset it: a request may end while {OFFLOADING} still copies for it, and "
                                             "it must not mistake a later one for it",
}


def take_apart(transfer: KVTransferConfig) -> tuple[KVTransferConfig, dict[str, Any] | None]:
    """PDConnector's own part of a configuration that names it, as if it had been named alone, and what was written for
    OffloadingConnector beside it; None: it is alone. What a child of MultiConnector leaves out is as outside of it.
    Raises ConfigError for other children."""
    if transfer.kv_connector == CONNECTOR:
        return transfer, None
    children = transfer.kv_connector_extra_config["connectors"]
    names = [str(one.get("kv_connector")) for one in children]
    if sorted(names) != sorted((CONNECTOR, OFFLOADING)):
        raise ConfigError("connectors", names, f"name {CONNECTOR} by itself, or it and {OFFLOADING} once each: beside "
                          "another connector it can't know who holds which block. For the KV store write \"store\" "
                          f"into the kv_connector_extra_config of {CONNECTOR}")
    ours, theirs = (_child(transfer, children[names.index(name)]) for name in (CONNECTOR, OFFLOADING))
    if theirs.kv_role != "kv_both":
        raise ConfigError(f"kv_role of {OFFLOADING}", theirs.kv_role, "write kv_both: it loads what it has kept")
    if theirs.kv_connector_module_path is not None:
        raise ConfigError(f"kv_connector_module_path of {OFFLOADING}", theirs.kv_connector_module_path,
                          "remove it: only vLLM's own was tried")
    if theirs.kv_connector_extra_config.get("sync_load_budget_bytes"):  # of 0.33
        raise ConfigError("sync_load_budget_bytes", theirs.kv_connector_extra_config["sync_load_budget_bytes"],
                          "remove it: a load is waited for before it is decided who computes the rest, and one within "
                          "a step ends after that")
    if "store" in ours.kv_connector_extra_config:
        raise ConfigError("store", ours.kv_connector_extra_config["store"], f"leave it out, or {OFFLOADING}: both load "
                          "what follows a prefix hit")
    return ours, {"kv_connector_extra_config": theirs.kv_connector_extra_config, "engine_id": theirs.engine_id}


def _child(transfer: KVTransferConfig, child: dict[str, Any]) -> KVTransferConfig:
    try:
        return dataclasses.replace(transfer, **{"kv_connector_extra_config": {}, **child})
    except (TypeError, ValueError) as error:
        raise ConfigError("connectors", child, f"correct it: {error}") from error


def check_beside(config: VllmConfig) -> None:
    """Raises ConfigError for an engine that can't have OffloadingConnector beside PDConnector."""
    from vllm import envs
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching", False, f"leave it on, or leave {OFFLOADING} out: what that loads is "
                          "used as a prefix hit")
    check_limits({key: getattr(config.parallel_config, key) for key in _LIMITS}, _LIMITS)
    check_states(config, False, is_offloading=True)
    check_index(config, False, is_offloading=True)
    check_features({"speculative_config": config.speculative_config, "lora_config": config.lora_config,
                    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION}, _FEATURES)


def check_kept_groups(groups: Sequence[KVCacheGroupSpec]) -> None:
    """All layers must be in one group, with the blocks of all tokens: in other groups vLLM takes blocks out of a
    running request, and gives them to one that a peer writes to without a word to OffloadingConnector. Raises
    ConfigError."""
    if len(groups) > 1:
        raise ConfigError("kv_cache_groups", len(groups), "write --disable-hybrid-kv-cache-manager: beside "
                          f"{OFFLOADING} all layers must be in one group of blocks")
    if is_mixed(groups):
        raise ConfigError(OFFLOADING, "with layers of several shapes", "leave it out: it was not tried with these")


def offloading_config(config: VllmConfig) -> VllmConfig:
    """The configuration of an engine with both, as it is for OffloadingConnector."""
    transfer, own = config.kv_transfer_config, copy.copy(config)
    own.kv_transfer_config = dataclasses.replace(
        transfer, kv_connector=OFFLOADING, kv_connector_module_path=None,
        **transfer.kv_connector_extra_config[OWN_KEY][KEY])
    return own
