# SPDX-License-Identifier: Apache-2.0
"""The routes that an engine's server has beside vLLM's own.

    GET  /pd/status
    GET  /pd/prompts       the same of the last prompts, at most 256 a rank, and how long ago each was decided about
    GET  /pd/prompts/NAME  where the prompt of this request was prefilled; NAME: the client's X-Request-Id
    POST /pd/drain
    POST /pd/role          {"role": "kv_consumer"}
    GET  /pd/events        where KV events are published, V0 or V1
    GET  /health_generate  generates one token, and answers as a completion does

`vllm_pd.frontend.access` says who may use them. They are applications of their own in front of vLLM's and not routes
of it, because its CORS headers would let web pages read them.
"""
from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_pd.decisions.policy import PLACE_KEY, AskedPlace
from vllm_pd.errors import ControlError
from vllm_pd.events import notice
from vllm_pd.frontend.access import refusal
from vllm_pd.frontend.asgi import error_response, route_path
from vllm_pd.frontend.drain import ServerDrain
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.holds import PARAMS_KEY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/pd/"
MAX_BODY_BYTES = 4096
GENERATE_PATH = "/health_generate"
# Of the model, whatever its name. Here: it is this engine that is asked about, not a prefill engine.
_ONE_TOKEN = json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0,
                         PARAMS_KEY: {PLACE_KEY: AskedPlace.LOCAL}}).encode()


class RoutesMiddleware:
    """ASGI middleware: requests below `prefix` go to `routes`, all others to `app`."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route], prefix: str) -> None:
        self._app = app
        self._prefix = prefix
        self._routes = Starlette(routes=routes, exception_handlers={
            HTTPException: _on_refusal, ControlError: _on_silence, msgspec.DecodeError: _on_bad_body,
            UnicodeDecodeError: _on_bad_body, ClientDisconnect: _on_bad_body})
        self._routes.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        ours = scope["type"] == "http" and route_path(scope).startswith(self._prefix)
        await (self._routes if ours else self._app)(scope, receive, send)


def operator_routes(drain: ServerDrain, keys: Sequence[str]) -> list[Route]:
    """/pd/status, /pd/prompts, /pd/drain and /pd/role of an engine with disaggregation."""

    def show(answers: list[m.StatusReply]) -> Response:
        for status in answers:
            if status.problem:
                raise HTTPException(HTTPStatus.CONFLICT, status.problem)
        ranks = [{"incarnation": status.member.incarnation, "role": status.member.role.value,
                  "draining": status.member.draining, "drained": bool(status.gauges.get("drained")),
                  "address": status.member.address, "degraded": status.degraded or None, "gauges": status.gauges}
                 for status in answers]
        return JSONResponse({**ranks[0], "draining": any(rank["draining"] for rank in ranks),
                             "drained": drain.drained, "open_requests": drain.open_requests,
                             **({"ranks": ranks} if len(ranks) > 1 else {})})

    async def show_status(request: Request) -> Response:
        return show(await drain.ask(m.Status(), lambda status: True))

    async def show_prompt(request: Request) -> Response:
        name = request.path_params["name"]
        if len(name) > m.MAX_ID_CHARS:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        answers = await drain.ask(m.Status(prompt=name), lambda status: status.prompt is not None
                                  and status.prompt.is_of(name))
        for status in answers:
            if status.prompt.decision:
                return JSONResponse(_prompt_as_json(status.prompt))
        raise HTTPException(HTTPStatus.NOT_FOUND)

    async def show_prompts(request: Request) -> Response:
        answers = await drain.ask(m.Status(prompts=m.MAX_PROMPTS), lambda status: status.prompts is not None)
        ranks = [{"incarnation": status.member.incarnation, "role": status.member.role.value,
                  "prompts": [*map(_prompt_as_json, status.prompts)]} for status in answers]
        return Response(msgspec.json.encode({"ranks": ranks}), media_type="application/json")

    async def begin_drain(request: Request) -> Response:
        return show(await drain.begin())

    async def set_role(request: Request) -> Response:
        role = msgspec.json.decode(await _body(request), type=_RoleBody).role
        return show(await drain.ask(m.SetRole(role), lambda status: status.member.role is role))

    return [_route("GET", "/pd/status", show_status, keys),
            _route("GET", "/pd/prompts", show_prompts, keys, guarded=True),
            _route("GET", "/pd/prompts/{name}", show_prompt, keys), _route("POST", "/pd/drain", begin_drain, keys),
            _route("POST", "/pd/role", set_role, keys)]


def events_route(find: Callable[[], notice.EventsNotice], keys: Sequence[str]) -> Route:
    """/pd/events of an engine that publishes KV events, where `find` says."""

    async def show_events(request: Request) -> Response:
        return Response(msgspec.json.encode(find()), media_type="application/json")

    return _route("GET", notice.PATH, show_events, keys)


class GenerateMiddleware:
    """ASGI middleware that turns `GET /health_generate` into a completion of one token, which takes the whole way that
    a client's takes."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] != "GET" or route_path(scope) != GENERATE_PATH:
            await self._app(scope, receive, send)
            return
        refused = refusal(scope, self._keys, guarded=False)
        if refused is not None:
            await error_response(*refused)(scope, receive, send)
            return
        await self._app(_one_token(scope), _receive_first(_ONE_TOKEN, receive), send)


def _route(method: str, path: str, answer: Callable[[Request], Awaitable[Response]], keys: Sequence[str],
           guarded: bool = False) -> Route:
    """A route that only those reach who may use it. `guarded`: although it changes nothing."""

    async def endpoint(request: Request) -> Response:
        refused = refusal(request.scope, keys, guarded=guarded or method != "GET")
        if refused is not None:
            raise HTTPException(*refused)
        return await answer(request)

    return Route(path, endpoint, methods=[method])


def _prompt_as_json(record: m.PromptRecord) -> dict[str, Any]:
    return {**msgspec.structs.asdict(record), "timings": msgspec.structs.asdict(record.timings)}


class _RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /pd/role."""
    role: m.Role


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise msgspec.DecodeError(f"the body has more than {MAX_BODY_BYTES} bytes")
    return body


async def _on_refusal(request: Request, error: HTTPException) -> Response:
    """Also Starlette's own errors: an unknown path, a wrong method."""
    text = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        text = f"there is no {route_path(request.scope)}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        text = f"use {' or '.join(sorted(error.headers['Allow'].split(', ')))}"
    return error_response(HTTPStatus(error.status_code), text, error.headers)


async def _on_silence(request: Request, error: ControlError) -> Response:
    return error_response(HTTPStatus.GATEWAY_TIMEOUT, str(error))


async def _on_bad_body(request: Request, error: Exception) -> Response:
    return error_response(HTTPStatus.BAD_REQUEST, f'{error}; write {{"role": "ROLE"}} with one of {", ".join(m.Role)}')


def _one_token(scope: Scope) -> Scope:
    """The scope of the completion in place of this request's."""
    path = scope.get("root_path", "") + "/v1/completions"
    kept = [(name, value) for name, value in scope["headers"]
            if name not in (b"content-type", b"content-length", b"transfer-encoding", b"accept-encoding")]
    return {**scope, "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [*kept, (b"content-type", b"application/json"),
                        (b"content-length", str(len(_ONE_TOKEN)).encode())]}


def _receive_first(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that gives this body, and then what the client sends, such as its end."""
    unread: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> dict[str, Any]:
        return unread.pop() if unread else await receive()

    return receive_next
