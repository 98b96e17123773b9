# SPDX-License-Identifier: Apache-2.0
"""Turning an engine's arguments into one that takes part in disaggregation, or refusing them before anything starts."""
from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_pd.decisions.fallback import FallbackRule
from vllm_pd.errors import ConfigError
from vllm_pd.model.checks import FEATURES, LIMITS, check_features, check_limits, new_front_address, require_free_bind
from vllm_pd.model.installation import check_installation
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v0 import CONNECTOR, SETTINGS_KEY
from vllm_pd.v0.caching import choose_prefix_caching
from vllm_pd.v0.chunks import choose_chunks
from vllm_pd.v0.selection import selection

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.pd")

_LIMITS = {
    **LIMITS,
    "pipeline_parallel_size": (1, "use 1: a split over stages is not transferred yet"),
    "data_parallel_size": (1, "use 1 and start more engines: V0 has no data parallelism"),
    "num_scheduler_steps": (1, "use 1: a request can't join a batch between multi-steps"),
}
_FEATURES = {
    **FEATURES,
    "speculative_config": "remove it: the draft model's KV of a prompt is not transferred",
    "calculate_kv_scales": "remove it: each engine would scale its KV by the first prompt it sees, and read a peer's "
                           "KV by another scale; use a checkpoint that has its scales",
}


def claim(engine_args: EngineArgs) -> None:
    """Validate the settings, move them to `additional_config`, and select the V0 engine.

    vLLM's own KV transfer must not see them: V0's model runners would move KV by themselves.
    """
    check_installation()
    transfer = engine_args.kv_transfer_config
    extra = dict(transfer.kv_connector_extra_config or {})
    config = PDConfig.parse(transfer.kv_role, extra)
    if "bind" in extra:
        extra["bind"] = config.bind  # what a name or `auto` is now, for all processes of the engine
    if config.metaservers is not None:
        raise ConfigError("metaservers", config.metaservers, "leave it out, or use V1: engines of V0 post no jobs")
    if config.fallback != FallbackRule.LOCAL:
        raise ConfigError("fallback", config.fallback, f"write {FallbackRule.LOCAL}, or use V1: engines of V0 prefill "
                          "each prompt that can't be prefilled remotely")
    if config.step_sync:
        raise ConfigError("step_sync", True, "leave it out, or use V1: engines of V0 have no data-parallel ranks")
    _check_arguments(engine_args)
    require_free_bind(config)
    selection.select(CONNECTOR)
    choose_prefix_caching(engine_args)
    if not config.role.decodes:
        choose_chunks(engine_args)
    engine_args.additional_config = {
        **(engine_args.additional_config or {}),
        SETTINGS_KEY: {"kv_role": transfer.kv_role, "extra": extra, "front": new_front_address()},
    }
    engine_args.kv_transfer_config = None
    if config.role.prefills or config.store is not None:
        # With it the engine would learn a step late that a job is computed, and its peer would wait for another
        # prompt. And the end of a step would not prove to the store that the step was computed.
        engine_args.disable_async_output_proc = True
    logger.info("%s: role %s, broker %s, V0 engine", CONNECTOR, config.role.value, config.broker)


def _check_arguments(engine_args: EngineArgs) -> None:
    check_limits({key: getattr(engine_args, key) for key in _LIMITS}, _LIMITS)
    check_features({key: getattr(engine_args, key) for key in _FEATURES}, _FEATURES)
    if engine_args.distributed_executor_backend == "ray":
        raise ConfigError("distributed_executor_backend", "ray", 'write "mp": all workers must be on this host')
    if engine_args.preemption_mode == "swap":
        raise ConfigError("preemption_mode", "swap",
                          "remove it: a step's transfers run before its copies to the swap space, so that a peer could "
                          "read or write blocks that are being swapped; preempted requests are computed again")
