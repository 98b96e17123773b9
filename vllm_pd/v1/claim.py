# SPDX-License-Identifier: Apache-2.0
"""Turning the configuration of an engine that names PDConnector into one that takes part, or refusing it.

vLLM imports our connector's class while it makes such a configuration, and checks the KV transfer at the end of that.
`claim_configurations` has that check call us, so the settings are there before any process of the engine is started.
"""
from __future__ import annotations

import dataclasses
import functools
import logging
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_pd.errors import ConfigError
from vllm_pd.extras import require_extra
from vllm_pd.handover.own_policy import load_policy
from vllm_pd.model.checks import (
    FEATURES,
    LIMITS,
    check_bind,
    check_executor,
    check_features,
    check_limits,
    check_meeting,
    check_memory,
    check_model,
    check_nixl,
    check_parallel,
    check_stages,
    require_free_bind,
)
from vllm_pd.model.drafter import check_drafter, pin_drafter
from vllm_pd.model.fingerprint import pin_weights
from vllm_pd.model.layers import check_index, check_states, check_v1_layers, choose_one_group
from vllm_pd.model.offloading import check_offloading, hybrid_flag
from vllm_pd.model.store_checks import check_shared_store
from vllm_pd.rpc.addresses import is_loopback
from vllm_pd.rpc.nats_address import NatsAddress
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.choice import TransportChoice
from vllm_pd.transfer.nixl.devices import check_network_only
from vllm_pd.v1.beside import config as beside
from vllm_pd.v1.events import check_ports
from vllm_pd.v1.lockstep.mark import claim_step_sync
from vllm_pd.v1.plugin import CONNECTOR
from vllm_pd.v1.settings import OWN_KEY, name_front

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig

logger = logging.getLogger("vllm.pd")

SCHEDULER = "vllm_pd.v1.scheduler.make_scheduler"
STORE_MODULE = "vllm_pd.v1.store.activate_peers"  # has a PDConnector, too, which V1 then takes
END_S = 5  # for the end of a process of the server after its drain
V1_LIMITS = {
    **LIMITS,
    "prefill_context_parallel_size": (1, "use 1: a split of the prompt over ranks is not transferred"),
    "decode_context_parallel_size": (1, "use 1: a split of the context over ranks is not transferred"),
}
V1_FEATURES = {
    **FEATURES,
    "weight_transfer_config": "remove it and restart engines for new weights: peers would mix KV of the old and the "
                              "new ones",
    "enable_permute_local_kv": "remove it: peers compare the layout of their caches, and move it as it is",
    "enable_cumem_allocator": "remove it: a cache that is released and mapped anew is memory that peers write to",
    "enable_return_routed_experts": "remove it: the experts that a peer chose for a prompt are not transferred",
    "enable_fault_tolerance": "remove it: after a step that is given up, peers and this engine disagree about blocks",
    "kv_connector_module_path": "remove it: the plugin knows PDConnector by its name",
}


def claim_configurations() -> None:
    """From now on `VllmConfig` takes our settings over at the end of its own checks. May be called again."""
    from vllm.config import VllmConfig
    check = VllmConfig._verify_kv_transfer_compat
    if not hasattr(check, "vllm_pd"):
        VllmConfig._verify_kv_transfer_compat = _claiming(check)


def _claiming(check: Callable[[VllmConfig], None]) -> Callable[[VllmConfig], None]:

    @functools.wraps(check)
    def verify_kv_transfer_compat(config: VllmConfig) -> None:
        check(config)
        check_offloading(config)
        if config.kv_transfer_config is not None and config.kv_transfer_config.has_connector(CONNECTOR):
            claim(config)
        claim_step_sync(config)

    verify_kv_transfer_compat.vllm_pd = True
    return verify_kv_transfer_compat


def claim(config: VllmConfig) -> None:
    """Check the configuration and set what the binding needs: scheduler class, failure policy, and kv_both as the role
    that vLLM sees. Our own role moves to where `vllm_pd.v1.settings` reads it. Raises ConfigError."""
    config.kv_transfer_config, offloading = beside.take_apart(config.kv_transfer_config)
    transfer = config.kv_transfer_config
    check_scheduler(config)
    check_policy(transfer)
    if OWN_KEY not in transfer.kv_connector_extra_config:
        ours = PDConfig.parse(transfer.kv_role, transfer.kv_connector_extra_config)
        check_config(config, ours)
        module = None if ours.store is None else STORE_MODULE
        if offloading is not None:
            beside.check_beside(config)
            module = beside.MODULE
        choose_one_group(config, hybrid_flag() is True, ours.store is not None, offloading is not None)
        own = {OWN_KEY: {"kv_role": transfer.kv_role, "front": name_front(transfer.engine_id), beside.KEY: offloading}}
        if "bind" in transfer.kv_connector_extra_config:  # what a name or `auto` is now, for all processes
            own["bind"] = ours.bind
        # A copy: the user's may be used for another engine.
        config.kv_transfer_config = dataclasses.replace(
            transfer, kv_role="kv_both", kv_connector_extra_config=transfer.kv_connector_extra_config | own,
            kv_connector_module_path=module, kv_load_failure_policy="recompute")
        claim_step_sync(config, ours.step_sync)
        if ours.store is not None:
            check_shared_store(config)
        if config.parallel_config._api_process_count > 1 and not config.shutdown_timeout:
            # A first process passes SIGTERM on to those that serve, and would kill them at once.
            config.shutdown_timeout = math.ceil(ours.drain_timeout_s) + END_S
        logger.info("%s: role %s, broker %s, V1 engine", CONNECTOR, ours.role.value, ours.broker)
    if config.model_config.multimodal_config is not None:
        # vLLM lets a consumer's clients leave out the outputs of their own encoder: another engine has made the KV of
        # these. Here such a prompt is computed, and the model would end the engine.
        config.model_config.multimodal_config.allow_missing_mm_embeddings = False
    config.scheduler_config.scheduler_cls = SCHEDULER


def check_scheduler(config: VllmConfig) -> None:
    """The scheduler must be vLLM's own or ours. Raises ConfigError."""
    chosen = config.scheduler_config.scheduler_cls
    if chosen in (None, SCHEDULER):
        return
    is_own = not any("scheduler-cls" in one.replace("_", "-") for one in sys.argv)  # vLLM itself has chosen it
    if is_own and isinstance(chosen, str) and chosen.startswith("vllm."):
        raise ConfigError("scheduler_cls", chosen, "serve another model: vLLM has a scheduler of its own for this one, "
                          f"and {CONNECTOR} needs another")
    raise ConfigError("scheduler_cls", chosen, f"remove it: {CONNECTOR} needs a scheduler of its own and sets it")


def check_policy(transfer: KVTransferConfig) -> None:
    """The policy for loads that fail must not be "fail", as far as the user has chosen it. Raises ConfigError. It is
    vLLM's default, too, and only the command line distinguishes the two."""
    if transfer.kv_load_failure_policy == "fail" and any("kv_load_failure_policy" in one for one in sys.argv):
        raise ConfigError("kv_load_failure_policy", "fail", f"remove it: a request whose KV does not come is computed "
                          f"here, and {CONNECTOR} sets recompute for that")


def check_config(config: VllmConfig, ours: PDConfig) -> None:
    """Raises ConfigError for an engine that can't take part, MissingPackage without an extra that it needs."""
    from vllm import envs
    parallel, model, transfer = config.parallel_config, config.model_config, config.kv_transfer_config
    check_limits({key: getattr(parallel, key) for key in V1_LIMITS}, V1_LIMITS)
    check_features({"enable_sleep_mode": model.enable_sleep_mode,
                    "enable_cumem_allocator": model.enable_cumem_allocator,
                    "weight_transfer_config": config.weight_transfer_config,
                    "enable_return_routed_experts": config.aux_output_config.enable_return_routed_experts,
                    "enable_fault_tolerance": parallel.enable_fault_tolerance,
                    "enable_permute_local_kv": transfer.enable_permute_local_kv,
                    "kv_connector_module_path": transfer.kv_connector_module_path}, V1_FEATURES)
    check_model(config, with_states=True, with_bytes=True)
    check_v1_layers(config)
    check_states(config, ours.store is not None)
    check_index(config, ours.store is not None)
    check_drafter(config)
    check_parallel(config)
    check_nodes(parallel, ours)
    check_executor(config, ours.role.prefills)
    check_stages(config)
    check_memory()
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        raise ConfigError("VLLM_ENABLE_V1_MULTIPROCESSING", 0, "unset it: an engine that runs in its caller's loop "
                          "can't sleep while its requests wait for peers")
    for key, value, is_free in (("bind", ours.bind, ours.bind.endswith(":0")),
                                ("lifeline_port", ours.lifeline_port, not ours.lifeline_port)):
        if parallel.data_parallel_size > 1 and not is_free:
            raise ConfigError(key, value, "write port 0: each data-parallel rank listens at a port of its own")
    TransportChoice.of(ours.transport, ours.transport_host).check_device(config.device_config.device_type)
    _ask_host(config, ours)


def check_nodes(parallel: ParallelConfig, ours: PDConfig) -> None:
    """An engine on several nodes must be alone on them, and its ranks must be reached. Raises ConfigError."""
    if parallel.nnodes == 1:
        return
    if parallel.data_parallel_size > 1:
        raise ConfigError("nnodes", parallel.nnodes, "use 1, or --data-parallel-size 1: an engine on several nodes is "
                          "not tried as one of a data-parallel group. Data-parallel ranks on several hosts need no "
                          "--nnodes: write --data-parallel-size-local")
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("pipeline_parallel_size", parallel.pipeline_parallel_size, f"use 1 with --nnodes "
                          f"{parallel.nnodes}, and a --tensor-parallel-size of {parallel.world_size}; or use --nnodes "
                          "1: stages over several nodes are not tried")
    if is_loopback(ours.transport_host) and not is_loopback(parallel.master_addr):
        raise ConfigError("bind", ours.bind, f"the engine's first node is {parallel.master_addr}, so the others are on "
                          "other machines: listen at an address of this node's own that they reach: write "
                          '"auto", or one like tcp://10.0.0.6:0')
    check_network_only()


def check_host(config: VllmConfig, ours: PDConfig) -> None:
    """As `check_config`, by what this machine has, and by the files of the model."""
    check_bind(ours.bind)
    check_meeting(ours.bind, ours.broker)
    require_free_bind(ours)
    check_ports(config)
    if NatsAddress.is_url(ours.broker):
        require_extra("nats")
    load_policy(ours.policy, ours.bounds)
    pin_weights(config, ours.weights_digest)
    pin_drafter(config)
    if not ours.is_two_sided:
        check_nixl(ours.transport_host)


_ask_host = check_host


def rehearse(ask_host: Callable[[VllmConfig, PDConfig], None]) -> None:
    """From now on this process has `ask_host` called in place of `check_host`: it makes configurations, and no engine.
    """
    global _ask_host
    _ask_host = ask_host
