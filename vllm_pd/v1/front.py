# SPDX-License-Identifier: Apache-2.0
"""The routes and the drain of `vllm_pd.frontend`, for a V1 server whose engine has our connector.

V1's server sets its signal handlers and then starts `NoSignalServer.serve`, whose application has not begun by then:
`attach_servers` wraps that. SIGTERM begins a drain; at its end vLLM's own handler, which SIGINT has still, is called.

Our connector joins its peers when the engine's loop is about to begin. If that fails the engine ends, and V1's server
is in its first call to it, whose answer V1 would await for ever: it sees that the engine is gone, and ends no call that
is open. Here such a call fails, and with it the start.
"""
from __future__ import annotations

import asyncio
import functools
import signal
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

CUT_S = 5.0  # for what V1 itself says to those that are open when it stops
LOOK_S = 1.0  # at an engine that has not answered
LAUNCHER = "vllm.entrypoints.launchers.launcher"


def attach_servers() -> None:
    """From now on the servers of this process whose engine has our connector get our routes and drain as they start.
    Does nothing in a process without V1's server. May be called again."""
    launcher = sys.modules.get(LAUNCHER)
    if launcher is not None and not hasattr(launcher.NoSignalServer.serve, "vllm_pd"):
        launcher.NoSignalServer.serve = _attaching(launcher.NoSignalServer.serve)
        from vllm.v1.engine.core_client import AsyncMPClient
        AsyncMPClient._call_utility_async = _ending_with_engine(AsyncMPClient._call_utility_async)


def _ending_with_engine(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A call to an engine of ours that is gone raises EngineDeadError."""

    @functools.wraps(call)
    async def call_while_it_lives(client: Any, *arguments: Any, **keywords: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        from vllm_pd.v1.settings import is_ours
        if not is_ours(client.vllm_config):
            return await call(client, *arguments, **keywords)
        answer = asyncio.ensure_future(call(client, *arguments, **keywords))
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
                if client.resources.engine_dead:
                    raise EngineDeadError
            return answer.result()
        finally:
            answer.cancel()

    return call_while_it_lives


def _attaching(serve: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:

    @functools.wraps(serve)
    async def serve_attached(server: Any, *arguments: Any, **keywords: Any) -> None:
        _attach(server.config.app, server)
        await serve(server, *arguments, **keywords)

    serve_attached.vllm_pd = True
    return serve_attached


def _attach(app: FastAPI, server: Any) -> None:
    """Give the server that is about to serve our routes, its drain and its events, if its engine is ours."""
    from vllm_pd.frontend.attach import attach_disaggregation, attach_events
    from vllm_pd.v1.events import find_events, publishes_events
    from vllm_pd.v1.settings import fronts_of_server, is_ours, read_settings
    client = getattr(app.state, "engine_client", None)
    if client is None or not is_ours(client.vllm_config):
        return
    fronts = fronts_of_server(client.vllm_config)
    if not fronts:  # all ranks are on other hosts
        return
    app.middleware_stack = None  # vLLM builds it while it makes the application; no request has come, so it may be anew
    # Its own exit is left to vLLM's handler, which ends the engine, too.
    stopping = SimpleNamespace(config=server.config, handle_exit=lambda number, frame: None)
    on_sigterm = attach_disaggregation(app, stopping, read_settings(client.vllm_config)._asdict(),
                                       lambda: signal.raise_signal(signal.SIGINT), fronts,
                                       client.vllm_config.shutdown_timeout + CUT_S, takes_jobs=True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
    if publishes_events(client.vllm_config):
        attach_events(app, lambda: find_events(client.vllm_config, client))
