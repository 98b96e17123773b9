# SPDX-License-Identifier: Apache-2.0
"""What a configuration has where the step sync is on: a mark, which goes to each process of the engine with it. To
unpickle one, a process imports this module, and so has the hook in time. vLLM loads its plugins after the ranks of a
group have met, and a connector after the model.
"""
from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm_pd.errors import ConfigError
from vllm_pd.extras import version_of
from vllm_pd.v1.lockstep.core import StepSyncCore, adopt
from vllm_pd.v1.lockstep.options import (
    ADDITIONAL_KEY,
    OPTIONS,
    STEP_SYNC,
    StepSyncOptions,
    check_engine,
    counts_steps,
    parse,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import DPEngineCoreProc

logger = logging.getLogger("vllm.pd")


class Mark(dict[str, Any]):
    """The options, as the user could write them. vLLM hashes what it is in as JSON, so it is a dict. `release`: of this
    package in the process that has made the mark, the front end; pickled with it, and no part of that hash."""
    release: str | None = None  # of a release that wrote none

    def check_release(self, rank: int) -> None:
        """For the engine of `rank`, which then has its process group, so that the other ranks find within `join_s`
        that it is gone. Raises ConfigError if this process has another release than its front end: the package was
        changed between their starts."""
        ours = _release()
        if self.release != ours:
            raise ConfigError("vllm-pd", ours, f"the front end of rank {rank} has {self.release}: install one release "
                              "everywhere, and start both again")


def _release() -> str:
    return version_of("vllm-pd") or ""


def claim_step_sync(config: VllmConfig, connector_asks: bool = False) -> None:
    """Mark the configuration if the step sync is asked for, by it or by PDConnector's settings, and has steps to
    count. Raises ConfigError for an engine that can't have it. May be called again."""
    written = config.additional_config
    if not isinstance(written, dict):
        if connector_asks:
            raise ConfigError(STEP_SYNC, True, f"write additional_config as an object: it is {type(written).__name__}")
        return
    value = written.get(ADDITIONAL_KEY)
    if isinstance(value, Mark):
        return
    if value is False and connector_asks:
        raise ConfigError(ADDITIONAL_KEY, False, f'remove it, or "{STEP_SYNC}": true of kv_connector_extra_config')
    options = parse(value) or (StepSyncOptions() if connector_asks else None)
    if options is None:
        return
    if not counts_steps(config):
        logger.info("the step sync has nothing to do here: ranks of this engine make no forward passes together")
        return
    check_engine(config)
    mark = Mark({key: getattr(options, key) for key in OPTIONS})
    mark.release = _release()
    config.additional_config = written | {ADDITIONAL_KEY: mark}  # a copy: the user's may be used for another engine


def hook_engines() -> None:
    """From now on an engine of this process whose configuration has a mark joins its group before it loads its model.
    May be called again."""
    from vllm.v1.engine.core import DPEngineCoreProc
    join = DPEngineCoreProc._init_data_parallel
    if hasattr(join, "vllm_pd"):
        return

    def init_data_parallel(engine: DPEngineCoreProc, vllm_config: VllmConfig) -> None:
        join(engine, vllm_config)
        written = vllm_config.additional_config
        mark = written.get(ADDITIONAL_KEY) if isinstance(written, dict) else None
        if isinstance(mark, Mark) and not isinstance(engine, StepSyncCore):
            mark.check_release(vllm_config.parallel_config.data_parallel_rank)
            adopt(engine, vllm_config, parse(dict(mark)))

    init_data_parallel.vllm_pd = True
    DPEngineCoreProc._init_data_parallel = init_data_parallel


hook_engines()
