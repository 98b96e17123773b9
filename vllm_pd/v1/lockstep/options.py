# SPDX-License-Identifier: Apache-2.0
"""The step sync as a user asks for it: `step_sync` in `kv_connector_extra_config`, or `vllm_pd_step_sync` in
`additional_config`, which also works without PDConnector and may have the bounds of the group in the place of `true`.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from vllm_pd.dp.group import check, check_call_wait
from vllm_pd.dp.interface import TOGETHER_S, SyncOptions, SyncSettings
from vllm_pd.errors import ConfigError
from vllm_pd.model.checks import check_features, check_limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STEP_SYNC = "step_sync"  # in kv_connector_extra_config
ADDITIONAL_KEY = "vllm_pd_step_sync"  # in additional_config; `vllm_pd.v1.plugin` looks for it on the command line

_LIMITS = {
    "prefill_schedule_interval": (1, "use 1: a prompt that waits would wait for a step that no rank makes"),
}
_FEATURES = {
    "enable_elastic_ep": "remove it: a group that counts its steps has a fixed size",
    "enable_fault_tolerance": "remove it: a group ends with the first of its ranks that does",
}


class StepSyncOptions(SyncOptions, frozen=True, forbid_unknown_fields=True):
    """What a user may set."""

    def settings(self, one_front_end: bool) -> SyncSettings:
        """The settings that must be equal on all ranks. `one_front_end`: it calls all ranks at once. Otherwise each
        call reaches one server after another, if all, and a rank makes it at once, alone."""
        return self.filled(TOGETHER_S if one_front_end else 0.0)


OPTIONS = tuple(key for key in StepSyncOptions.__struct_fields__ if key != "lockstep")


def parse(value: Any) -> StepSyncOptions | None:
    """The options in this value of `vllm_pd_step_sync`. Raises ConfigError."""
    if value is None or value is False:
        return None
    if value is True:
        return StepSyncOptions()
    keys = ", ".join(OPTIONS)
    if not isinstance(value, dict):
        raise ConfigError(ADDITIONAL_KEY, value, f"write true, false, or an object with some of {keys}")
    if "lockstep" in value:
        raise ConfigError(f"{ADDITIONAL_KEY}.lockstep", value["lockstep"], f"there is no such key: write one of {keys}")
    try:
        options = msgspec.convert(dict(value), StepSyncOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(ADDITIONAL_KEY, value, f"{error}; the keys are {keys}") from error
    check_call_wait(options, ADDITIONAL_KEY)
    check(options, ADDITIONAL_KEY)
    return options


def counts_steps(config: VllmConfig) -> bool:
    """Whether an engine of this configuration runs in lockstep with others, so that there are steps to count."""
    return config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe


def check_engine(config: VllmConfig) -> None:
    """Raises ConfigError for an engine whose ranks can't count their steps."""
    parallel = config.parallel_config
    check_limits({key: getattr(config.scheduler_config, key) for key in _LIMITS}, _LIMITS)
    check_features({key: getattr(parallel, key) for key in _FEATURES}, _FEATURES)
    if parallel.data_parallel_backend != "mp":
        raise ConfigError("data_parallel_backend", parallel.data_parallel_backend, "use mp: the step sync was tried "
                          "with ranks that vLLM starts as processes")
    if parallel.distributed_executor_backend == "ray":
        raise ConfigError("distributed_executor_backend", "ray", "use mp: Ray's executor begins a forward pass only "
                          "when its tokens are sampled, and says before that it has ended")
    encoders = config.ec_transfer_config
    if encoders is not None and encoders.is_ec_producer and not encoders.is_ec_consumer:
        raise ConfigError("ec_transfer_config", encoders.ec_role, "remove it: a step of an engine that encodes for "
                          "others may make no forward pass")
