# SPDX-License-Identifier: Apache-2.0
"""How the server of an engine ends without failing a request.

The first SIGTERM begins a drain: the engine gets the order, new requests get 503, and the server ends when no request
is open and the engine is drained. After `drain_timeout_s`, or upon a second SIGTERM, it ends at once, and what is left
ends as it would upstream. An operator may begin the same drain over HTTP or at the engine itself; the server stays up
then.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

from vllm_pd.core import messages as m
from vllm_pd.errors import ControlError
from vllm_pd.frontend.asgi import error_response, route_path
from vllm_pd.frontend.connection import EngineConnection

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm.pd")

RETRY_AFTER_S = 5
_NO_ENGINE_STEP = ("/tokenize", "/detokenize")  # POST requests that are served during a drain


class ServerDrain:
    """The drain of one server: how many requests its clients have open, and whether the engine drains. Belongs to the
    server's event loop.

    `address` is the engine's control socket for its front end, `url` the base URL by which others reach the server.
    `stop` ends the server as upstream does.
    """

    def __init__(self, address: str, timeout_s: float, stop: Callable[[], None], url: str) -> None:
        self.connection = EngineConnection(address, self._on_status)
        self.draining = False  # new requests are refused
        self.open_requests = 0
        self._timeout_s = timeout_s
        self._stop = stop
        self._engine_drained = False
        self._changed = asyncio.Event()
        self._ending: asyncio.Task | None = None
        self._greeting = asyncio.get_running_loop().create_task(self._greet(url))

    @property
    def drained(self) -> bool:
        """Whether nothing is open any more, at the engine and here."""
        return self._engine_drained and not self.open_requests

    @contextlib.contextmanager
    def open_request(self) -> Iterator[None]:
        """Counts one request of a client as open."""
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1
            self._changed.set()

    async def begin(self) -> m.StatusReply:
        """Tell the engine to drain. New requests are refused from its answer on. Raises ControlError without one; the
        server then goes on as before."""
        return await self.connection.ask(m.Drain(), lambda status: status.member.draining)

    def on_sigterm(self) -> None:
        """Drain, then stop. The second call stops at once."""
        if self._ending is None:
            logger.info("SIGTERM: draining for at most %g s; another one ends the server at once", self._timeout_s)
            self._ending = asyncio.get_running_loop().create_task(self._end())
        else:
            self._stop()

    def close(self) -> None:
        """Release the connection when the server has ended. Idempotent."""
        self._greeting.cancel()
        self.connection.close()

    async def _greet(self, url: str) -> None:
        """The first message says where the server is, and makes the engine send its status here."""
        with contextlib.suppress(ControlError):
            await self.connection.ask(m.Status(url), lambda _: True)

    def _on_status(self, status: m.StatusReply) -> None:
        self.draining = self.draining or status.member.draining
        self._engine_drained = bool(status.gauges.get("drained"))
        self._changed.set()

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                answered = await self._begin_for_good()
                while self.open_requests or (answered and not self._engine_drained):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("not drained in %g s: %d requests of clients end now", self._timeout_s, self.open_requests)
        except Exception:  # a server must end whatever its engine does
            logger.exception("the engine could not be drained")
        finally:
            self._stop()

    async def _begin_for_good(self) -> bool:
        """Refuse new requests whether or not the engine answers. Returns whether it does: where only its control thread
        is silent, the engine still computes what is open."""
        self.draining = True
        try:
            await self.begin()
        except ControlError as error:
            logger.error("the engine is not drained, only the open requests are waited for: %s", error)
            return False
        return True


class DrainMiddleware:
    """ASGI middleware that counts the POST requests to `app`, and refuses new ones during a drain."""

    def __init__(self, app: ASGIApp, drain: ServerDrain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the whole life of the server."""
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                self._drain.close()
        elif scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) in _NO_ENGINE_STEP:
            await self._app(scope, receive, send)
        elif self._drain.draining:
            refusal = error_response(HTTPStatus.SERVICE_UNAVAILABLE,
                                     "this engine takes no new requests: it is being drained",
                                     {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"})
            await refusal(scope, receive, send)
        else:
            with self._drain.open_request():
                await self._app(scope, receive, send)
