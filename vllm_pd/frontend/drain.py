# SPDX-License-Identifier: Apache-2.0
"""How the server of an engine ends without failing a request.

The first SIGTERM begins a drain: the engine gets the order, new requests get 503, and the server ends when no request
is open and the engine is drained. After `drain_timeout_s`, or upon a second SIGTERM, it ends at once, and what is
left ends as it would upstream. With V1 it is cut off after a while: its front end may wait for ever for an engine
that it killed. An operator may begin the same drain over HTTP or at the engine itself; the server stays up then.

A server of several data-parallel ranks has an engine for each. They drain together, wherever the drain began: the
server can't choose which of them a request goes to.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from vllm_pd.errors import ControlError
from vllm_pd.frontend.asgi import error_response, route_path
from vllm_pd.frontend.connection import EngineConnection
from vllm_pd.protocol import messages as m

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm.pd")

RETRY_AFTER_S = 5
_NO_ENGINE_STEP = ("/tokenize", "/detokenize")  # POST requests that are served during a drain


class ServerDrain:
    """The drain of one server: how many requests its clients have open, and whether its engines drain. Belongs to the
    server's event loop.

    `addresses` are the engines' control sockets for their front end, `url` is the base URL by which others reach the
    server. `stop` ends the server as upstream does; requests that are open `cut_s` after that are cut off. None: never.
    """

    def __init__(self, addresses: Sequence[str], timeout_s: float, stop: Callable[[], None], url: str,
                 cut_s: float | None = None) -> None:
        self._connections = [EngineConnection(address, self._on_status) for address in addresses]
        self.draining = False  # new requests are refused
        self.open_requests = 0
        self._tasks: set[asyncio.Task] = set()  # of the open requests
        self._timeout_s = timeout_s
        self._stop = stop
        self._cut_s = cut_s
        self._changed = asyncio.Event()
        self._ending: asyncio.Task | None = None
        self._spreading: asyncio.Task | None = None
        self._cutting: asyncio.Task | None = None
        # The server is registered once, with its first engine.
        self._greeting = [asyncio.get_running_loop().create_task(self._greet(connection, "" if rank else url))
                          for rank, connection in enumerate(self._connections)]

    @property
    def drained(self) -> bool:
        """Whether nothing is open any more, at the engines and here."""
        return not self.open_requests and all(map(_is_drained, self._connections))

    @contextlib.contextmanager
    def open_request(self) -> Iterator[None]:
        """Counts one request of a client as open."""
        task = asyncio.current_task()
        self.open_requests += 1
        self._tasks.add(task)
        try:
            yield
        finally:
            self.open_requests -= 1
            self._tasks.discard(task)
            self._changed.set()

    async def ask(self, message: m.Message, is_answer: Callable[[m.StatusReply], bool]) -> list[m.StatusReply]:
        """Send a message to each engine, and return their answers, see `EngineConnection.ask`. Raises ControlError
        where one does not answer."""
        return list(await asyncio.gather(*(one.ask(message, is_answer) for one in self._connections)))

    async def run_job(self, job: m.Job) -> str:
        """Have one of the engines do this job, the same one each time: see `EngineConnection.run_job`."""
        return await self._connections[job.attempt.number % len(self._connections)].run_job(job)

    async def begin(self) -> list[m.StatusReply]:
        """Tell the engines to drain. New requests are refused from the first answer on. Raises ControlError where one
        does not answer."""
        return await self.ask(m.Drain(), lambda status: status.member.draining)

    def on_sigterm(self) -> None:
        """Drain, then stop. The second call stops at once."""
        if self._ending is None:
            logger.info("SIGTERM: draining for at most %g s; another one ends the server at once", self._timeout_s)
            self._ending = asyncio.get_running_loop().create_task(self._end())
        else:
            self._stop_now()

    def close(self) -> None:
        """Release the connections when the server has ended. Idempotent."""
        for task in (*self._greeting, self._spreading, self._cutting):
            if task is not None:
                task.cancel()
        for connection in self._connections:
            connection.close()

    async def _greet(self, connection: EngineConnection, url: str) -> None:
        """The first message says where the server is, and makes the engine send its status here."""
        with contextlib.suppress(ControlError):
            await connection.ask(m.Status(url), lambda _: True)

    def _on_status(self, status: m.StatusReply) -> None:
        if status.member.draining and not self.draining:
            self.draining = True
            if len(self._connections) > 1:
                self._spreading = asyncio.get_running_loop().create_task(self._spread())
        self._changed.set()

    async def _spread(self) -> None:
        """One engine drains: so do the others."""
        try:
            await self.begin()
        except ControlError as error:
            logger.error("not all data-parallel ranks of this server drain: %s", error)

    async def _end(self) -> None:
        """Drain for at most `drain_timeout_s`, then stop the server, whether it is drained or not."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answered = await self._begin_for_good()
                while self.open_requests or not all(map(_is_drained, answered)):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("not drained in %g s: %d requests of clients end now", self._timeout_s, self.open_requests)
        except Exception:  # a server must end whatever its engine does
            logger.exception("the engine could not be drained")
        finally:
            self._stop_now()

    def _stop_now(self) -> None:
        self._stop()
        if self._cutting is None and self._cut_s is not None:
            self._cutting = asyncio.get_running_loop().create_task(self._cut())

    async def _cut(self) -> None:
        """End the requests that the server, which was stopped, has left open."""
        await asyncio.sleep(self._cut_s)
        if self._tasks:
            logger.warning("%d requests of clients are cut off", len(self._tasks))
        for task in self._tasks:
            task.cancel()

    async def _begin_for_good(self) -> list[EngineConnection]:
        """Refuse new requests whether or not the engines answer. Returns those that do: where only the control thread
        is silent, the engine still computes what is open."""
        self.draining = True
        answers = await asyncio.gather(*(one.ask(m.Drain(), lambda status: status.member.draining)
                                         for one in self._connections), return_exceptions=True)
        answered = []
        for connection, answer in zip(self._connections, answers, strict=True):
            if isinstance(answer, ControlError):
                logger.error("the engine is not drained, only the open requests are waited for: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answered.append(connection)
        return answered


def _is_drained(connection: EngineConnection) -> bool:
    return connection.last is not None and bool(connection.last.gauges.get("drained"))


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
                                     {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
                                     route_path(scope))
            await refusal(scope, receive, send)
        else:
            with self._drain.open_request():
                await self._app(scope, receive, send)
