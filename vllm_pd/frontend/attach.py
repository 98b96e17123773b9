# SPDX-License-Identifier: Apache-2.0
"""Putting all of this package before the application of `vllm serve`, when its server is about to start."""
from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.middleware import Middleware

from vllm_pd.events import notice
from vllm_pd.frontend import routes
from vllm_pd.frontend.access import keys_of
from vllm_pd.frontend.asked import AskedMiddleware
from vllm_pd.frontend.drain import DrainMiddleware, ServerDrain
from vllm_pd.frontend.edge import limit_headers
from vllm_pd.frontend.metaserver import DirectJobMiddleware, SeveralAnswersMiddleware
from vllm_pd.rpc.addresses import hosts_of, url_of
from vllm_pd.settings.engine import PDConfig

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI


def attach_disaggregation(app: FastAPI, server: uvicorn.Server, settings: dict[str, Any],
                          stop: Callable[[], None], fronts: Sequence[str],
                          cut_s: float | None = None, takes_jobs: bool = False) -> Callable[[], None]:
    """Give the server of an engine with disaggregation its routes, its drain and limits for headers. `stop` is what
    SIGTERM calls upstream; returns what it is to call instead. `fronts` are the addresses at which the engine of each
    data-parallel rank expects the server. `cut_s`: see `ServerDrain`. `takes_jobs`: whether its
    clients may bring jobs (`vllm_pd.frontend.metaserver`). The server must not have started yet."""
    config = PDConfig.parse(settings["kv_role"], settings["extra"])
    exit_as_before = server.handle_exit

    def handle_exit(number: int, frame: Any) -> None:
        if number != signal.SIGTERM:  # on which it would stop accepting at once
            exit_as_before(number, frame)

    def stop_as_before() -> None:
        exit_as_before(signal.SIGTERM, None)
        stop()

    server.handle_exit = handle_exit
    keys = keys_of(app)
    app.user_middleware.append(Middleware(AskedMiddleware))  # after vLLM's own, which asks for the key
    drain = ServerDrain(fronts, config.drain_timeout_s, stop_as_before, _base_url(server.config, config),
                        cut_s)
    if takes_jobs and config.role.prefills:
        app.user_middleware.append(Middleware(DirectJobMiddleware, run=drain.run_job))
    if config.metaserver_urls:
        app.user_middleware.append(Middleware(SeveralAnswersMiddleware))
    app.add_middleware(DrainMiddleware, drain=drain)
    app.add_middleware(routes.GenerateMiddleware, keys=keys)
    app.add_middleware(routes.RoutesMiddleware, routes=routes.operator_routes(drain, keys), prefix=routes.PREFIX)
    limit_headers(server.config)
    return drain.on_sigterm


def attach_events(app: FastAPI, find: Callable[[], notice.EventsNotice]) -> None:
    """Give the server of an engine that publishes KV events the route that says where, as `find` does. It must not have
    started yet; to be called after `attach_disaggregation`, whose routes would hide this one."""
    app.add_middleware(routes.RoutesMiddleware, routes=[routes.events_route(find, keys_of(app))], prefix=notice.PATH)


def _base_url(server: uvicorn.Config, config: PDConfig) -> str:
    """Where others reach the server: one that listens everywhere, at the address of the control socket."""
    host = server.host if server.host not in (None, "", "0.0.0.0", "::") else hosts_of(config.bind)[0]
    return url_of(host, server.port, "https" if server.is_ssl else "http")
