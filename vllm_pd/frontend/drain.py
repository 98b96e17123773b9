# SPDX-License-Identifier: Apache-2.0
"""The front end of `vllm serve`: refusing new work while the engine drains, and an operator's requests over HTTP.

`FrontDoor` stands before the application as ASGI middleware. It counts the requests that are open, answers new ones
with 503 once the engine drains, and serves

    GET  /pd/status
    POST /pd/drain
    POST /pd/role    {"role": "kv_consumer"}

to whoever has the server's API key. Where the server has none, the two that change something are for this machine only,
and for JSON from no browser (`vllm_pd.frontend.access`).
`GET /health_generate` has the application generate one token and answers as it does. The registry is told where the
server is reached.

The engine may be another process. `EngineLine` talks to its control agent, which tells by itself what changes, over a
socket of the file system that only this user can open; the messages are those of an operator, and nothing is pickled.

The server itself gives up headers that are too large or too slow (`vllm_pd.frontend.edge`).

SIGTERM: the first one drains and ends the server when nothing is open any more, or when `drain_timeout_s` is over and
whatever is left ends as it would upstream; a second one does that at once.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import zmq.asyncio

from vllm_pd.config import PDConfig
from vllm_pd.core import messages as m
from vllm_pd.errors import ControlError
from vllm_pd.frontend.access import key_of, objection, shows
from vllm_pd.frontend.edge import bound_headers
from vllm_pd.rpc import codec, sockets

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm.pd")

PREFIX = "/pd/"
ANSWER_S = 5.0
RETRY_AFTER_S = 5
MAX_BODY_BYTES = 4096
GENERATE_PATH = "/health_generate"
_ONE_TOKEN = json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0}).encode()  # of the model, whatever its name
_HARMLESS = ("/tokenize", "/detokenize")  # they need no engine step


class EngineLine:
    """The line to the engine's control agent. Belongs to the server's event loop."""

    def __init__(self, address: str, on_news: Callable[[m.StatusReply], None]) -> None:
        self._name = f"front-{uuid.uuid4().hex}"
        self._on_news = on_news
        self._context = zmq.asyncio.Context()
        self._socket = sockets.client(self._context, address, only_connected=False)
        self._news = asyncio.Event()
        self._last: m.StatusReply | None = None
        self._asking = asyncio.Lock()
        self._listener = asyncio.get_running_loop().create_task(self._listen())

    async def ask(self, message: m.Message, is_answer: Callable[[m.StatusReply], bool]) -> m.StatusReply:
        """Send it, and wait for the status that answers it. ControlError where none comes in time."""
        async with self._asking:
            if self._socket.closed:
                raise ControlError("the server ends")
            self._news.clear()
            await self._socket.send(codec.encode(self._name, message))
            try:
                async with asyncio.timeout(ANSWER_S):
                    while True:
                        await self._news.wait()
                        self._news.clear()
                        if self._last.problem or is_answer(self._last):
                            return self._last
            except TimeoutError:
                raise ControlError("the engine's control thread does not answer") from None

    def close(self) -> None:
        """Hang up. Never left to the garbage collector, which may end a context before its sockets, and hang."""
        if not self._socket.closed:
            self._listener.cancel()
            self._socket.close(linger=0)
            self._context.term()

    async def _listen(self) -> None:
        while True:
            try:
                _, message = codec.decode(await self._socket.recv_multipart())
            except codec.BadFrame as fault:
                logger.error("the engine's control thread can't be understood: %s", fault)
                continue
            if isinstance(message, m.StatusReply):
                self._last = message
                self._on_news(message)
                self._news.set()


class FrontDoor:
    """One of a server, which others reach at the base URL `http`. `stop` ends the server as upstream does."""

    def __init__(self, address: str, drain_timeout_s: float, api_token: str | None, stop: Callable[[], None],
                 http: str) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._api_token = api_token
        self._stop = stop
        self._http = http
        self._open = 0
        self._draining = False
        self._drained = False
        self._news = asyncio.Event()
        self._line = EngineLine(address, self._on_news)
        self._ending: asyncio.Task | None = None
        self._greeting = asyncio.get_running_loop().create_task(self._greet())

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """A request, on its way to the application."""
        if scope["type"] != "http":
            try:
                await app(scope, receive, send)
            finally:
                if scope["type"] == "lifespan":
                    self.close()
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(PREFIX):
            await _respond(send, *await self._operate(scope, path.removeprefix(PREFIX), receive))
            return
        if path == GENERATE_PATH and scope["method"] == "GET":
            refused = self._refused(scope, changes=False)
            if refused is not None:
                await _respond(send, *refused)
                return
            scope, receive = _one_token(scope), _OneBody(_ONE_TOKEN, receive)
        if scope["method"] != "POST" or path in _HARMLESS:
            await app(scope, receive, send)
        elif self._draining:
            await _respond(send, HTTPStatus.SERVICE_UNAVAILABLE, _error(
                HTTPStatus.SERVICE_UNAVAILABLE, "this engine takes no new requests: it is being drained"),
                ((b"retry-after", str(RETRY_AFTER_S).encode()), (b"connection", b"close")))
        else:
            self._open += 1
            try:
                await app(scope, receive, send)
            finally:
                self._open -= 1
                self._news.set()

    def on_sigterm(self) -> None:
        """Drain, then stop; stop at once if that was asked for before."""
        if self._ending is None:
            logger.info("SIGTERM: draining for at most %g s; another one ends the server at once",
                        self._drain_timeout_s)
            self._ending = asyncio.get_running_loop().create_task(self._end())
        else:
            self._stop()

    def close(self) -> None:
        """The server has ended. Idempotent."""
        self._greeting.cancel()
        self._line.close()

    async def _greet(self) -> None:
        """From now on the engine knows whom to tell, and where the server is."""
        with contextlib.suppress(ControlError):
            await self._line.ask(m.Status(self._http), lambda _: True)

    def _on_news(self, status: m.StatusReply) -> None:
        self._draining = self._draining or status.member.draining
        self._drained = bool(status.gauges.get("drained"))
        self._news.set()

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                answered = await self._begin_drain()
                while self._open or (answered and not self._drained):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            logger.warning("not drained in %g s: %d requests of clients end now", self._drain_timeout_s, self._open)
        except Exception:  # an engine that can't be asked is to end all the same
            logger.exception("the engine could not be drained")
        finally:
            self._stop()

    async def _drain(self) -> m.StatusReply:
        """From the engine's answer on, new requests are refused; without one it serves on as before."""
        return await self._line.ask(m.Drain(), lambda status: status.member.draining)

    async def _begin_drain(self) -> bool:
        """Whether the engine has heard of it. It may compute what is open even where its control thread is silent."""
        self._draining = True
        try:
            await self._drain()
        except ControlError as error:
            logger.error("the engine is not drained, only the open requests are waited for: %s", error)
            return False
        return True

    async def _operate(self, scope: Scope, name: str, receive: Receive) -> tuple[HTTPStatus, bytes]:
        """An operator's request: the response to it."""
        try:
            wanted = _METHODS.get(name)
            if wanted is None:
                return HTTPStatus.NOT_FOUND, _error(HTTPStatus.NOT_FOUND, f"there is no {PREFIX}{name}")
            if scope["method"] != wanted:
                return HTTPStatus.METHOD_NOT_ALLOWED, _error(HTTPStatus.METHOD_NOT_ALLOWED, f"use {wanted}")
            refused = self._refused(scope, changes=wanted == "POST")
            if refused is not None:
                return refused
            if name == "drain":
                status = await self._drain()
            elif name == "role":
                role = msgspec.json.decode(await _body(receive), type=_RoleBody).role
                status = await self._line.ask(m.SetRole(role), lambda status: status.member.role is role)
            else:
                status = await self._line.ask(m.Status(), lambda _: True)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return HTTPStatus.BAD_REQUEST, _error(
                HTTPStatus.BAD_REQUEST, f'{error}; write {{"role": "ROLE"}} with one of {", ".join(m.Role)}')
        except ControlError as error:
            return HTTPStatus.GATEWAY_TIMEOUT, _error(HTTPStatus.GATEWAY_TIMEOUT, str(error))
        if status.problem:
            return HTTPStatus.CONFLICT, _error(HTTPStatus.CONFLICT, status.problem)
        return HTTPStatus.OK, json.dumps(self._shown(status)).encode()

    def _refused(self, scope: Scope, changes: bool) -> tuple[HTTPStatus, bytes] | None:
        if self._api_token is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not shows(given, self._api_token):
                return HTTPStatus.UNAUTHORIZED, _error(HTTPStatus.UNAUTHORIZED, "Unauthorized")
        elif changes and (problem := objection(scope)) is not None:
            return HTTPStatus.FORBIDDEN, _error(HTTPStatus.FORBIDDEN, problem)
        return None

    def _shown(self, status: m.StatusReply) -> dict[str, Any]:
        member = status.member
        return {"incarnation": member.incarnation, "role": member.role.value, "draining": member.draining,
                "drained": self._drained and not self._open, "open_requests": self._open, "address": member.address,
                "degraded": status.degraded or None, "gauges": status.gauges}


class _RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    role: m.Role


class _OneBody:
    """What an application receives whose request has this body; then it hears of the client's end."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


_METHODS = {"status": "GET", "drain": "POST", "role": "POST"}


class _Middleware:
    """Starlette builds it around the application."""

    def __init__(self, app: ASGIApp, door: FrontDoor) -> None:
        self._app = app
        self._door = door

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._door.serve(self._app, scope, receive, send)


def open_front_door(app: FastAPI, server: uvicorn.Server, settings: dict[str, Any],
                    stop: Callable[[], None]) -> Callable[[], None]:
    """Put a FrontDoor before `app`, whose `server` has not started yet. Returns what SIGTERM is to call."""
    config = PDConfig.parse(settings["kv_role"], settings["extra"])
    exit_as_before = server.handle_exit

    def handle_exit(number: int, frame: Any) -> None:
        if number != signal.SIGTERM:  # on which it would stop accepting at once
            exit_as_before(number, frame)

    def stop_as_before() -> None:
        exit_as_before(signal.SIGTERM, None)
        stop()

    server.handle_exit = handle_exit
    door = FrontDoor(settings["front"], config.drain_timeout_s, key_of(app), stop_as_before,
                     _base_url(server.config, config))
    app.add_middleware(_Middleware, door=door)
    bound_headers(server.config)
    return door.on_sigterm


def _base_url(server: uvicorn.Config, config: PDConfig) -> str:
    """Where others reach the server: one that listens everywhere, at the address of the control socket."""
    host = server.host if server.host not in (None, "", "0.0.0.0", "::") else urlsplit(config.bind).hostname
    return f"{'https' if server.is_ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{server.port}"


def _one_token(scope: Scope) -> Scope:
    """The request in place of this one that takes all of a completion's way."""
    path = scope.get("root_path", "") + "/v1/completions"
    kept = [(name, value) for name, value in scope["headers"]
            if name not in (b"content-type", b"content-length", b"transfer-encoding", b"accept-encoding")]
    return {**scope, "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [*kept, (b"content-type", b"application/json"),
                        (b"content-length", str(len(_ONE_TOKEN)).encode())]}


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise msgspec.DecodeError(f"the body has more than {MAX_BODY_BYTES} bytes")
    return body


def _error(status: HTTPStatus, text: str) -> bytes:
    """In the form of vLLM's own errors."""
    return json.dumps({"object": "error", "message": text, "type": status.phrase, "param": None,
                       "code": status.value}).encode()


async def _respond(send: Send, status: HTTPStatus, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    await send({"type": "http.response.start", "status": status.value,
                "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
                            *headers]})
    await send({"type": "http.response.body", "body": body})
