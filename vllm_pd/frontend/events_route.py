# SPDX-License-Identifier: Apache-2.0
"""`GET /pd/events` on the front end of any engine that publishes KV events, V0 or V1."""
from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from vllm_pd.events import notice
from vllm_pd.frontend.access import key_of, shows

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send
    from vllm.config import VllmConfig


def add_route(app: FastAPI, config: VllmConfig) -> None:
    """Serve it before anything else does, to whoever has the server's API key where there is one: vLLM's own check
    looks at /v1 only. To be called before the server starts."""
    app.add_middleware(_Middleware, config=config, api_token=key_of(app))


class _Middleware:
    """Starlette builds it around the application."""

    def __init__(self, app: ASGIApp, config: VllmConfig, api_token: str | None) -> None:
        self._app = app
        self._config = config
        self._api_token = api_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) == notice.PATH
        await (self._answer(scope) if ours else self._app)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        given = Headers(scope=scope).get("authorization", "").encode()
        if self._api_token is not None and not shows(given, self._api_token):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        if scope["method"] != "GET":
            return JSONResponse({"error": "use GET"}, status_code=405)
        return Response(msgspec.json.encode(notice.find(self._config)), media_type="application/json")
