# SPDX-License-Identifier: Apache-2.0
"""The functions that the patched vLLM calls. Patches import no other module of this package.

For an engine that does not name our connector, the hooks for disaggregation return at once and import nothing more.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pd.v0 import CONNECTOR, SETTINGS_KEY
from vllm_pd.v0.selection import selection

if TYPE_CHECKING:
    from collections.abc import Callable

    import uvicorn
    from fastapi import FastAPI
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.llm_engine import LLMEngine
    from vllm.v1.engine.core import DPEngineCoreProc

    from vllm_pd.v0.dp.engine import EngineSync
    from vllm_pd.v0.engine import V0Handover
    from vllm_pd.v0.interface import EngineBinding as EngineBinding  # for annotations in the patched scheduler


def claim_kv_transfer_config(engine_args: EngineArgs) -> None:
    """Move a kv_transfer_config that names our connector to where vLLM does not see it, and select the V0 engine for as
    long as that engine lives.

    Called by `EngineArgs.create_engine_config` before anything else. Raises ConfigError for settings that can't work.
    """
    config = engine_args.kv_transfer_config
    if config is not None and config.kv_connector == CONNECTOR:
        from vllm_pd.v0.claim import claim
        claim(engine_args)
    elif _settings(engine_args) is not None:  # configured once more
        selection.select(CONNECTOR)
    else:
        selection.drop()


def check_engine(config: VllmConfig) -> None:
    """Refuse an engine that is to disaggregate, or to publish KV events, and can't.

    Called by `LLMEngine.__init__` before anything else, so before the model is loaded. Raises ConfigError.
    """
    if _publishes_events(config):
        from vllm_pd.v0.events import check_events
        check_events(config)
    settings = _settings(config)
    if settings is not None:
        from vllm_pd.v0.checks import check_config
        check_config(config, settings)


def attach_engine(engine: LLMEngine) -> V0Handover | None:
    """The binding of this engine, which owns it from then on; None where disaggregation is off. Also begins to publish
    the engine's KV events, where they are configured.

    Called by `LLMEngine.__init__` at its end. Raises ConfigError for what has changed since `check_engine`.
    """
    if _publishes_events(engine.vllm_config):
        from vllm_pd.v0.events import attach_events
        attach_events(engine)
    settings = _settings(engine.vllm_config)
    if settings is None:
        return None
    if settings["extra"].get("store") is None:
        from vllm_pd.v0.engine import V0Handover as Binding
    else:
        from vllm_pd.v0.with_store import V0HandoverWithStore as Binding
    selection.hold(engine)
    return Binding(engine, settings)


def attach_server(app: FastAPI, server: uvicorn.Server, stop: Callable[[], None]) -> Callable[[], None]:
    """What SIGTERM is to call: `stop`, or with disaggregation on a drain that ends with it. Also adds the routes of
    `vllm_pd.frontend.routes`.

    Called by `serve_http` in the server's event loop, before the server starts.
    """
    config = getattr(app.state, "vllm_config", None)
    settings = _settings(config)
    if settings is not None:
        from vllm_pd.frontend.attach import attach_disaggregation
        stop = attach_disaggregation(app, server, settings, stop, (settings["front"], ))
    if _publishes_events(config):
        from vllm_pd.events import notice
        from vllm_pd.frontend.attach import attach_events
        attach_events(app, lambda: notice.find(config, config.parallel_config.data_parallel_external_lb))
    return stop


def _settings(config: VllmConfig | EngineArgs | None) -> dict[str, Any] | None:
    """What `vllm_pd.v0.claim` has put into the configuration; None where disaggregation is off."""
    additional = config.additional_config if config is not None else None
    return additional.get(SETTINGS_KEY) if isinstance(additional, dict) else None


def _publishes_events(config: VllmConfig | None) -> bool:
    events = config.kv_events_config if config is not None else None
    return events is not None and events.enable_kv_cache_events and events.publisher != "null"


def join_dp_sync(engine: DPEngineCoreProc, config: VllmConfig) -> EngineSync:
    """Join this rank's engine to the step sync of its data-parallel group. Where the model needs no sync, `config`
    becomes that of an engine without data parallelism.

    Called by `DPEngineCoreProc._init_data_parallel`, in every rank at the same point. Raises GroupFailed, ConfigError.
    """
    from vllm_pd.v0.dp.engine import EngineSync
    from vllm_pd.v0.dp.independent import IndependentRank, lockstep
    return (EngineSync if lockstep(config) else IndependentRank)(engine).join(config)


def exit_grace_s(config: VllmConfig) -> float:
    """Seconds from SIGTERM to SIGKILL for an engine process: upstream's 5, or a day for a rank that others may need.

    Called where engine processes are started. Raises ConfigError.
    """
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1 or parallel.data_parallel_rank_local is None:
        return 5.0
    from vllm_pd.v0.dp.independent import lockstep
    return 86400.0 if lockstep(config) else 5.0
