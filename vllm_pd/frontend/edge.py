# SPDX-License-Identifier: Apache-2.0
"""Limits for the clients of an HTTP server that uvicorn runs: how much each may send, and how long it may take.

uvicorn's protocol upon httptools keeps a header of any size. It waits without a limit for the end of a header, for the
rest of a body, and for a client that does not read. `EdgeConnection` is that protocol with limits. All connections of
a server share one `Edge`, whose `connect` uvicorn gets as `http`. One timer, which runs while there are connections,
ends those that are over a limit. Where there are too many connections, those without a whole request are ended first.

It is our own because uvicorn has no limit for the time of a body, or of a client that does not read, and a vLLM runs in
no other server: a few silent clients would hold a router. The names of uvicorn that are overridden and used here are
checked at import (`uvicorn_names`).
"""
from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn

from vllm_pd.frontend import errors, sparing_log
from vllm_pd.frontend.uvicorn_names import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

SWEEP_S = 0.25
LINGER_S = 1.0  # how long a refused client may read the reason
MAX_DISCARDED_BYTES = 1 << 20  # that a refused client may still send meanwhile
MAX_PIPELINED = 16  # requests of one connection that wait behind another
SPARE = 32  # connections beyond the limit, for the paths that are always served
UNKNOWN_BYTES = 1 << 62  # a content length for uvicorn, which counts down from it
RESCAN_S = 0.25  # pause after a search that found too few connections to end


@dataclass(frozen=True)
class EdgeLimits:
    """Limits for each client of a server; None means no limit. Times are in seconds.

    `head_s`: from the start of the connection, or the first byte of a later request, to the end of the header.
    `body_s`: from there to the end of the body. `write_s`: how long a client may read nothing while data waits for it.
    `idle_s`: between two requests. `connections`: of all clients together.
    """
    head_bytes: int = 1 << 16  # the whole header, with the request line
    target_bytes: int = 1 << 13  # path and query
    header_count: int = 100
    head_s: float | None = 10.0
    body_s: float | None = None
    write_s: float | None = None
    idle_s: float | None = None
    connections: int | None = None


class _Wait(IntEnum):
    """What a connection waits for. To make room, the lowest are ended first and the last two never."""
    SILENT = 0  # no byte was received yet
    HEAD = 1
    IDLE = 2
    BODY = 3
    WRITE = 4
    CLOSE = 5


class _Part(Enum):
    """The part of a request that is being received."""
    NONE = auto()
    HEAD = auto()
    BODY = auto()


class _Refused(Exception):
    """Raised to end the parsing of a refused request."""


class Edge:
    """The connections of one server. `count` is called for each client that is cut off, with the reason: `header_size`,
    `head_time`, `body_time`, `write_time`, `pipelined`, `malformed`, `room` or `full`. Paths in `spared` are served
    even where there are too many connections. `error_body` makes the body of an error."""

    def __init__(self, limits: EdgeLimits, count: Callable[[str], None] = lambda reason: None,
                 spared: Collection[bytes] = (),
                 error_body: Callable[[HTTPStatus, str], bytes] = lambda status, text: errors.error_body(
                     status, text, errors.installed_form())) -> None:
        self.limits = limits
        self.error_body = error_body
        self.count = count
        self.ending = False  # close each connection after its present answer
        self._spared = frozenset(spared)
        self._open: set[EdgeConnection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._packed_until_s = 0.0
        self._times = {_Wait.SILENT: (limits.head_s, "head_time"), _Wait.HEAD: (limits.head_s, "head_time"),
                       _Wait.IDLE: (limits.idle_s, None), _Wait.BODY: (limits.body_s, "body_time"),
                       _Wait.WRITE: (limits.write_s, "write_time"), _Wait.CLOSE: (limits.write_s, "write_time")}

    def __len__(self) -> int:
        """The number of open connections."""
        return len(self._open)

    def connect(self, **given: Any) -> EdgeConnection:
        """The protocol object of a new connection. uvicorn calls this."""
        return EdgeConnection(self, **given)

    def opened(self, connection: EdgeConnection) -> None:
        """Add a new connection; may end others, or this one, to stay within the limit."""
        self._open.add(connection)
        if self._sweeping is None:
            self._sweeping = connection.loop.call_later(SWEEP_S, self._sweep, connection.loop)
        most = self.limits.connections
        if most is not None and len(self._open) > most:
            self._end_incomplete(connection)
            if len(self._open) > most + SPARE:
                self.count("full")
                connection.transport.abort()

    def closed(self, connection: EdgeConnection) -> None:
        """Remove a connection that has ended."""
        self._open.discard(connection)

    def has_room_for(self, target: bytes) -> bool:
        """Whether a request for this path and query is to be served now."""
        most = self.limits.connections
        return most is None or len(self._open) <= most or target.partition(b"?")[0] in self._spared

    def abort_all(self) -> None:
        """End every connection at once."""
        for connection in list(self._open):
            connection.transport.abort()

    def _end_incomplete(self, newest: EdgeConnection) -> None:
        """End connections without a whole request, in the order of `_Wait` and then those that have waited for longest;
        `newest` is spared. After a search that found too few, no other one is made for RESCAN_S."""
        now_s = newest.loop.time()
        if now_s < self._packed_until_s:
            return
        idle = sorted(((*waiting, number, one) for number, one in enumerate(self._open)
                       if one is not newest and (waiting := one.waiting()) is not None and waiting[0] <= _Wait.BODY),
                      key=lambda entry: entry[:3])
        # More than needed, as each search is expensive.
        batch = max(len(self._open) - self.limits.connections, self.limits.connections // 32)
        for *_, one in idle[:batch]:
            self.count("room")
            self.closed(one)
            one.transport.abort()
        if len(idle) < batch:
            self._packed_until_s = now_s + RESCAN_S

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """The timer: every SWEEP_S, end the connections that are over a limit. The client of an incomplete request gets
        408, if that can still be answered. One that was refused has LINGER_S to read its answer."""
        self._sweeping = loop.call_later(SWEEP_S, self._sweep, loop) if self._open else None
        now_s = loop.time()
        for one in list(self._open):
            waiting = one.waiting()
            if waiting is None:
                continue
            if waiting[0] in (_Wait.WRITE, _Wait.CLOSE):
                one.see_reading()
                waiting = one.waiting()
            what, since_s = waiting
            limit_s, reason = self._times[what]
            if one.refused_s is not None:
                limit_s, reason = LINGER_S, None
            if limit_s is not None and now_s - since_s > limit_s:
                if reason is not None:
                    self.count(reason)
                if what in (_Wait.HEAD, _Wait.BODY):
                    one.refuse(HTTPStatus.REQUEST_TIMEOUT, f"the rest of the request has not come in {limit_s:g} s")
                else:
                    one.transport.abort()


class EdgeConnection(HttpToolsProtocol):
    """The connection of one client. uvicorn and httptools call the methods without a docstring."""

    def __init__(self, edge: Edge, **given: Any) -> None:
        super().__init__(**given)
        self.logger.addFilter(sparing_log.malformed)  # only the first call changes anything
        self.parser = _OfferlessParser(self)
        self._edge = edge
        self._limits = edge.limits
        self._part = _Part.NONE
        self._since_s = self.loop.time()  # when it began to wait for the present part
        self._full_since_s: float | None = None  # when the write buffer became full; None while it is not
        self._unread_bytes = 0  # in the write buffer at the last check
        self._read_s = 0.0  # when the client was last seen to read some of them
        self._refusal: tuple[HTTPStatus, str] | None = None
        self.refused_s: float | None = None
        self._discarded_bytes = 0
        self._unparsed_bytes = 0  # received since the parser last made progress
        self._running: RequestResponseCycle | None = None  # the request that is being answered

    def waiting(self) -> tuple[_Wait, float] | None:
        """What the connection waits for and since when (loop time, in s); None where it waits for the server."""
        if self.refused_s is not None:
            return _Wait.CLOSE, self.refused_s
        if self._full_since_s is not None:
            return _Wait.WRITE, max(self._full_since_s, self._read_s)
        if self.transport.is_closing():
            return _Wait.CLOSE, max(self._since_s, self._read_s)
        if self._is_busy():
            return (_Wait.BODY, self._since_s) if self._part is _Part.BODY and not self.pipeline else None
        if self._part is _Part.NONE:
            return (_Wait.SILENT if self.cycle is None else _Wait.IDLE), self._since_s
        return (_Wait.HEAD if self._part is _Part.HEAD else _Wait.BODY), self._since_s

    def see_reading(self) -> None:
        """Check whether the client has read anything since the last check."""
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes < self._unread_bytes:
            self._read_s = self.loop.time()
        self._unread_bytes = unread_bytes

    def refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer the present request with this error, where an answer is still possible, and end the connection."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if self._is_busy():
            if cycle.response_started or self.pipeline or self._part is not _Part.BODY:
                self.transport.abort()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        elif self._part is _Part.BODY:  # the request was answered before its end
            self.transport.abort()
            return
        body = self._edge.error_body(status, text)
        self.transport.write(STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
                             b"content-length: %d\r\n\r\n%b" % (len(body), body))
        self.refused_s = self.loop.time()
        if self.transport.can_write_eof():  # closing with unread data would discard the answer
            self.transport.write_eof()
        else:
            self.transport.close()

    def declines_offer(self) -> bool:
        """Whether the present request offers a protocol that this server does not speak, like `Upgrade: h2c`."""
        return self.parser.should_upgrade() and not self._should_upgrade()

    def header_without_offer(self) -> bytes:
        """The present request's header as it was received, without the offer."""
        kept = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url,
                                             self.parser.get_http_version().encode(), b"".join(kept))

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._edge.opened(self)

    def handle_websocket_upgrade(self) -> None:
        self._edge.closed(self)  # another protocol owns the transport now
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        self._edge.closed(self)
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:  # uvicorn does so for the newest request only
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.refused_s is not None:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > self._limits.head_bytes and self.refused_s is None:
            self._edge.count("header_size")
            self.refuse(*_too_large(self._limits))

    def send_400_response(self, msg: str) -> None:
        if self._refusal is None:
            self._edge.count("malformed")
        self.refuse(*(self._refusal or (HTTPStatus.BAD_REQUEST, msg)))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._full_since_s = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._full_since_s = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = _Part.HEAD
        if self.cycle is not None and not self._is_busy():
            self._since_s = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is not _Part.BODY:  # else a trailer, and the application has the list of the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        self._check_header()
        if self.declines_offer():
            return  # the header comes once more without the offer
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail("pipelined", HTTPStatus.TOO_MANY_REQUESTS, f"more than {MAX_PIPELINED} requests wait")
        if not self._is_busy():
            self._since_s = self.loop.time()
        self._part = _Part.BODY
        app = self.config.loaded_app if self._edge.has_room_for(self.url) else self._say_full
        self.app = _UntilClose(app) if self.parser.get_http_version() == "1.0" else app
        super().on_headers_complete()
        if self.cycle is None:  # the connection's first request opens a WebSocket
            return
        if isinstance(self.app, _UntilClose):
            self.app.cycle = self.cycle
        if self._edge.ending:
            self.cycle.keep_alive = False
        if not self.pipeline:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """httptools calls this for each chunk of a body. uvicorn does not."""
        self._unparsed_bytes = 0

    def on_message_complete(self) -> None:
        if self.declines_offer():
            return
        self._unparsed_bytes = 0
        self._part = _Part.NONE
        super().on_message_complete()
        if not self._is_busy():
            self._since_s = self.loop.time()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self._part is not _Part.BODY:
            self._since_s = self.loop.time()

    def _check_header(self) -> None:
        """Check a complete header; `data_received` checks one that does not end."""
        size, hosts, sized = len(self.url), 0, False
        for name, value in self.headers:
            size += len(name) + len(value)
            hosts += name == b"host"
            sized |= name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        if len(self.url) > self._limits.target_bytes:
            self._fail("header_size", HTTPStatus.REQUEST_URI_TOO_LONG,
                       f"the path has more than {self._limits.target_bytes} bytes")
        if size > self._limits.head_bytes or len(self.headers) > self._limits.header_count:
            self._fail("header_size", *_too_large(self._limits))
        problem = ("more than one Host header" if hosts > 1 else
                   "the method CONNECT is not served" if self.parser.get_method() == b"CONNECT" else
                   "a WebSocket with Content-Length or Transfer-Encoding: leave the body out"
                   if sized and self.parser.should_upgrade() and self._should_upgrade() else None)
        if problem is not None:
            self._refusal = (HTTPStatus.BAD_REQUEST, problem)
            raise _Refused

    def _is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and (not self.cycle.response_complete or bool(self.pipeline))

    def _fail(self, reason: str, status: HTTPStatus, text: str) -> None:
        self._edge.count(reason)
        self._refusal = (status, text)
        raise _Refused

    async def _say_full(self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]],
                        send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        self._edge.count("full")
        status = HTTPStatus.SERVICE_UNAVAILABLE
        body = self._edge.error_body(status, "too many connections: try again later")
        await send({"type": "http.response.start", "status": status.value,
                    "headers": [(b"content-type", b"application/json"), (b"retry-after", b"1"),
                                (b"connection", b"close"), (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})


class _OfferlessParser(httptools.HttpRequestParser):
    """A parser that ignores offers of other protocols, as RFC 9110 (7.8) allows. httptools' own ends a request with an
    offer at its header, and takes the body for the next request."""

    def __init__(self, connection: EdgeConnection) -> None:
        super().__init__(connection)
        with contextlib.suppress(AttributeError):  # of httptools before 0.6.3
            self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._connection = connection

    def feed_data(self, data: bytes) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            connection = self._connection
            if not connection.declines_offer():
                raise
            data = connection.header_without_offer() + data[offer.args[0]:]
            connection.parser = _OfferlessParser(connection)  # as this one may regard the connection as closed
            connection.parser.feed_data(data)


def limit_headers(config: uvicorn.Config) -> None:
    """Make a server that has not started yet refuse headers that are too large or too slow. Changes nothing for h11,
    which limits their size by itself."""
    if config.http_protocol_class is HttpToolsProtocol:
        config.http_protocol_class = Edge(EdgeLimits()).connect


class _UntilClose:
    """The application for a client of HTTP/1.0, which has no chunked answers. Where an answer has no content length, it
    ends with the connection, and a reset tells the client that it is incomplete."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.cycle: RequestResponseCycle | None = None  # set before the application is called
        self._app = app
        self._unsized = False

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]],
                       send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        try:
            await self._app(scope, receive, self._send)
        finally:
            if self._unsized and not self.cycle.response_complete:
                _reset(self.cycle.transport)

    async def _send(self, message: dict[str, Any]) -> None:
        cycle = self.cycle
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self._unsized = True
                cycle.chunked_encoding = False
                cycle.expected_content_length = UNKNOWN_BYTES
        elif self._unsized and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)


def _reset(transport: asyncio.Transport) -> None:
    """End the connection with a reset, so that the client sees that the answer is incomplete."""
    if not transport.is_closing():
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def _too_large(limits: EdgeLimits) -> tuple[HTTPStatus, str]:
    return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, (
        f"the header has more than {limits.head_bytes} bytes or {limits.header_count} fields")
