# SPDX-License-Identifier: Apache-2.0
"""The client's connection during one request: sends the answer by ASGI, and notices when the client has gone."""
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_pd.router.responses import Headers, RouterResponse, find
from vllm_pd.router.workers import InFlightTry, Interruption

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

EVENT_STREAM = b"text/event-stream"
_FIXED = (b"content-length", b"content-encoding")  # with one of these nothing may be added to a body


class ClientGone(Exception):
    """The client has closed its connection."""


class ClientResponseBroken(Exception):
    """The answer can't be completed, nor ended with an error event: the client's connection must be closed."""


class ClientConnection:
    """See the module. `begun`: the answer's head was sent. `takes_events`: an error event may be added to it."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.begun = False
        self.takes_events = False
        self._receive = receive
        self._send = send
        self._watched: InFlightTry | None = None
        self._gone = False
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def watch(self, watched: InFlightTry | None) -> None:
        """Interrupt this try when the client goes; None for no try."""
        self._watched = watched
        if self._gone and watched is not None:
            watched.interrupt(Interruption.CLIENT_GONE)

    async def begin(self, status: int, headers: Headers, first: bytes, more: bool) -> None:
        """Send the head of the answer and its first bytes; `more`: others follow."""
        self.begun = True
        self.takes_events = takes_events(headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": first, "more_body": more})

    async def more(self, chunk: bytes) -> None:
        """Send further bytes of the answer."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """End the answer."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, answer: RouterResponse) -> None:
        """Send a complete answer."""
        await respond(self._send, answer)

    def leave(self) -> None:
        """Treat the client as one that has gone: interrupt what is watched, or will be."""
        self._gone = True
        if self._watched is not None:
            self._watched.interrupt(Interruption.CLIENT_GONE)

    def close(self) -> None:
        """Stop watching the client."""
        self._watcher.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()


def is_stream(headers: Headers) -> bool:
    """Whether these are the headers of a stream of server-sent events."""
    return (find(headers, b"content-type") or b"").startswith(EVENT_STREAM)


def takes_events(headers: Headers) -> bool:
    """Whether events may be added to an answer with these headers, and taken out."""
    return is_stream(headers) and not any(name in _FIXED for name, _ in headers)


async def respond(send: Send, answer: RouterResponse) -> None:
    """Send a complete answer."""
    await send({"type": "http.response.start", "status": int(answer.status),
                "headers": [*answer.headers, (b"content-length", str(len(answer.body)).encode())]})
    await send({"type": "http.response.body", "body": answer.body})
