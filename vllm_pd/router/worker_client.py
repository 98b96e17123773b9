# SPDX-License-Identifier: Apache-2.0
"""The HTTP/1.1 client for workers: sends a request and returns the answer's bytes as they come.

It is written directly on httptools, the parser that uvicorn uses too, and does only what a proxy needs: no redirects,
cookies, decompression or proxies. A general client would cost too much: with aiohttp in its place the router takes 35
to 55 % more CPU for a plain request and adds 1.5 to 1.6 times as much time. In proportion it would then add a little
more than twice what the fastest comparable router adds; the goal is at most twice (docs/router.md has the figures).

Life of a connection: `request` returns a `WorkerResponse`. At its end the connection becomes idle, unless either side
wants it closed. An idle connection is used again, or closed after `KEEP_ALIVE_S`. A response that is closed before its
end closes its connection, so that the worker stops generating.

What a worker sends beside bytes of a body has a bound, MAX_HEAD_BYTES: heads, interim responses, chunk extensions,
trailers. It is counted as it comes, because the parser keeps a name or value until its end, and copies it at each read.
Trailers are dropped. The connection of a worker that sends more than the answer is closed.
"""
import asyncio
import collections
import functools
import ipaddress
import socket
import ssl
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import aiohappyeyeballs
import httptools

from vllm_pd.router import descriptors
from vllm_pd.router.responses import Headers, RouterResponse, find
from vllm_pd.router.workers import WorkerFailure

KEEP_ALIVE_S = 4.0  # vLLM's server closes an idle connection after 5 s
MAX_IDLE = 256  # idle connections to one worker
MAX_BUFFERED_BYTES = 1 << 18  # received and not read yet; beyond, reading from the worker pauses
PART_BYTES = 64  # of memory for a part of a body, beside its own bytes
MAX_HEAD_BYTES = 1 << 16  # of all that comes before, between or after the bytes of a body
HEAD_START_S = 0.25  # of each address of a name before the next one (RFC 8305)
STALE_S = 0.5  # within this after sending, the end of an idle connection means that it was closed before

P = TypeVar("P", bound=asyncio.Protocol)


class TryFailed(Exception):
    """A try at a worker has failed before anything was sent to the client. `detail`: the reason, in words. `stale`: the
    worker had closed the idle connection, as a healthy worker does, too. `answer`: the worker's answer, where there is
    one that may go to the client. `final`: the request must not be tried on another worker."""

    def __init__(self, kind: WorkerFailure, detail: str, stale: bool = False, answer: RouterResponse | None = None,
                 final: bool = False) -> None:
        super().__init__(detail)
        self.final = final
        self.kind = kind
        self.stale = stale
        self.answer = answer


class WorkerResponseBroken(Exception):
    """The worker's answer ended too early."""


class Origin(NamedTuple):
    """Where a worker listens."""
    host: str
    port: int
    tls: bool
    authority: bytes
    prefix: bytes  # put before each path
    is_address: bool  # whether `host` is no name

    @classmethod
    @functools.lru_cache(8192)
    def of(cls, url: str) -> "Origin":
        """The origin of a worker's base URL, which `parse_worker` has checked."""
        parts = urllib.parse.urlsplit(url)
        return cls(parts.hostname, parts.port, parts.scheme == "https", parts.netloc.encode(), parts.path.encode(),
                   _is_address(parts.hostname))


async def connect(make: Callable[[], P], origin: Origin,
                  tls: ssl.SSLContext | None = None) -> tuple[asyncio.Transport, P]:
    """Connect to a worker. The addresses of a name are tried side by side, so that one which drops packets holds up
    none of the others; uvloop's `create_connection` can't do that. Raises OSError."""
    loop = asyncio.get_running_loop()
    if origin.is_address:
        return await loop.create_connection(make, origin.host, origin.port, ssl=tls)
    found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    connected = await aiohappyeyeballs.start_connection(found, happy_eyeballs_delay=HEAD_START_S)
    return await loop.create_connection(make, sock=connected, ssl=tls, server_hostname=origin.host if tls else None)


class WorkerResponse:
    """A worker's answer. It must be read to its end or closed."""

    def __init__(self, connection: "_WorkerConnection") -> None:
        self.status = 0
        self.headers: Headers = []
        self._connection = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._complete = False
        self._error: str | None = None
        self._waiter: asyncio.Future | None = None

    async def head(self) -> None:
        """Wait until `status` and `headers` are there. Raises WorkerResponseBroken."""
        while not self.status:
            if self._error is not None:
                raise WorkerResponseBroken(self._error)
            await self._wait()

    async def chunk(self) -> bytes:
        """Wait for further bytes of the body; empty at its end. Raises WorkerResponseBroken."""
        while not self._parts:
            if self._complete:
                return b""
            if self._error is not None:
                raise WorkerResponseBroken(self._error)
            await self._wait()
        parts, self._parts = self._parts, []
        if self._size > MAX_BUFFERED_BYTES:
            self._connection.resume()
        self._size = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def framed(self) -> bool:
        """Whether its framing shows its end; otherwise the end of the connection does."""
        return _has_length(self.headers)

    def close(self) -> None:
        """Close the connection, unless the answer is complete: the worker then gives the request up."""
        if not self._complete:
            self._connection.abort()

    # Called by the connection.

    def began(self, status: int, headers: Headers) -> None:
        """Status and headers have come."""
        self.status, self.headers = status, headers
        self._wake()

    def more(self, part: bytes) -> bool:
        """A part of the body has come. Returns whether reading must pause."""
        self._parts.append(part)
        self._size += len(part) + PART_BYTES
        self._wake()
        return self._size > MAX_BUFFERED_BYTES

    def ended(self) -> None:
        """The body is complete."""
        self._complete = True
        self._wake()

    def broke(self, why: str) -> None:
        """The answer ended too early."""
        self._error = why
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _WorkerConnection(asyncio.Protocol):
    """One connection to a worker, with at most one request at a time. Between requests it is in `idle`."""

    def __init__(self, owner: "WorkerClient", idle: "collections.deque[_WorkerConnection]") -> None:
        self.idle_since_s = 0.0
        self._owner = owner
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: WorkerResponse | None = None
        self._headers: Headers = []  # of the head that is being received
        self._bodiless_bytes = 0  # received since the request, or since the last byte of a body
        self._lost = False
        self.silent = True  # nothing has come since the last request

    @property
    def usable(self) -> bool:
        """Whether a request can be sent."""
        return not self._lost and not self._transport.is_closing()

    def request(self, head: bytes, body: bytes) -> WorkerResponse:
        """Send a request: its head, then its body. The caller owns the response."""
        self._reply = reply = WorkerResponse(self)
        self._headers = []
        self._bodiless_bytes = 0
        self.silent = True
        self._transport.write(head + body if len(body) < MAX_HEAD_BYTES else head)
        if len(body) >= MAX_HEAD_BYTES:
            self._transport.write(body)
        return reply

    def abort(self) -> None:
        """Close the connection at once."""
        self._lost = True
        if self._transport is not None:
            self._transport.abort()

    def resume(self) -> None:
        """Go on reading from the worker."""
        if self.usable:
            self._transport.resume_reading()

    # Called by asyncio, see `asyncio.Protocol`.

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The connection is there."""
        self._transport = transport
        self._owner.connections += 1

    def data_received(self, data: bytes) -> None:
        """Bytes have come: parse them."""
        if self._reply is None:  # there was no request
            self.abort()
            return
        self.silent = False
        rest = memoryview(data)
        while rest:
            piece = rest[:MAX_HEAD_BYTES + 1 - self._bodiless_bytes]
            rest = rest[len(piece):]
            self._bodiless_bytes += len(piece)
            try:
                self._parser.feed_data(piece)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                return self._break(f"not HTTP/1.1: {error.__context__ or error}")
            if self._bodiless_bytes > MAX_HEAD_BYTES:
                return self._break(f"more than {MAX_HEAD_BYTES} bytes of headers, trailers or chunk extensions")

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended, which may be the end of an answer without framing."""
        self._lost = True
        self._owner.connections -= 1
        if self._reply is None:
            if self in self._idle:
                self._idle.remove(self)
            return
        reply = self._reply
        if error is None and reply.status and not _has_length(reply.headers):
            self._reply = None
            reply.ended()
        else:
            self._break("the connection ended" if error is None else repr(error))

    # Called by httptools, see `httptools.HttpResponseParser`.

    def on_message_begin(self) -> None:
        """A response begins. Raises ValueError where its request was answered before."""
        if self._reply is None:
            raise ValueError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header was parsed, or a trailer, which is dropped."""
        if not self._reply.status:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """All headers were parsed. Raises ValueError for a status that HTTP does not have."""
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            raise ValueError(f"the status {status}")
        headers, self._headers = self._headers, []
        if status >= 200:  # else an interim response
            self._reply.began(status, headers)

    def on_body(self, part: bytes) -> None:
        """A part of the body was parsed."""
        self._bodiless_bytes = 0
        if self._reply.more(part) and not self._transport.is_closing():
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The answer is complete: keep the connection for another request, or close it."""
        if self._parser.get_status_code() < 200:
            return
        reply, self._reply = self._reply, None
        self._bodiless_bytes = 0
        keep = len(self._idle) < MAX_IDLE and self._owner.connections <= self._owner.max_connections
        if self._parser.should_keep_alive() and self.usable and keep:
            self._transport.resume_reading()
            self.idle_since_s = self._loop.time()
            self._idle.append(self)
        else:
            self._transport.close()
        reply.ended()

    def _break(self, why: str) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.broke(why)
        self.abort()


class WorkerClient:
    """The client for all workers. `tls` is used for https workers. Above `max_connections` no connection is kept idle.
    Belongs to the router's event loop."""

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext, max_connections: int = 1 << 16) -> None:
        self.max_connections = max_connections
        self.connections = 0
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, collections.deque[_WorkerConnection]] = {}
        self._tls = tls

    async def send(self, method: bytes, url: str, target: bytes, headers: Headers, body: bytes,
                   fresh: bool = False) -> WorkerResponse:
        """Send a request to the worker at this base URL, and wait for the head of its answer. `fresh`: on a new
        connection. Raises TryFailed."""
        origin = Origin.of(url)
        connection = None if fresh else self._take_idle(origin)
        reused = connection is not None
        if connection is None:
            connection = await self._connect(origin)
        now_s = asyncio.get_running_loop().time
        sent_s = now_s()
        reply = connection.request(_head(method, origin, target, headers, body), body)
        try:
            await reply.head()
        except WorkerResponseBroken as broken:
            stale = reused and connection.silent and now_s() < sent_s + STALE_S
            raise TryFailed(WorkerFailure.BROKEN, str(broken), stale) from broken
        except asyncio.CancelledError:
            reply.close()
            raise
        return reply

    async def send_again(self, method: bytes, url: str, target: bytes, headers: Headers, body: bytes) -> WorkerResponse:
        """As `send` on a new connection, after a try that was `stale`. Where no connection can be made any more, the
        worker may have been lost over that try, so its connection counts as BROKEN. Raises TryFailed."""
        try:
            return await self.send(method, url, target, headers, body, fresh=True)
        except TryFailed as failure:
            if failure.kind is WorkerFailure.CONNECT:
                failure.kind = WorkerFailure.BROKEN
            raise

    def forget(self, url: str) -> None:
        """Close the idle connections to this base URL."""
        for connection in self._idle.pop(Origin.of(url), ()):
            connection.abort()

    def close(self) -> None:
        """Close all idle connections."""
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in list(connections):
                connection.abort()

    def _take_idle(self, origin: Origin) -> _WorkerConnection | None:
        """The usable idle connection that was used last; None where there is none."""
        idle = self._idle.get(origin)
        oldest_s = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since_s > oldest_s:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin) -> _WorkerConnection:
        """A new connection to a worker. Where there are too many connections, or this machine lacks descriptors, memory
        or ports, an idle one is closed first. Raises TryFailed: ROUTER where that did not help, else CONNECT."""
        if self.connections >= self.max_connections:
            self._drop_idle()
        try:
            return await self._connect_once(origin)
        except OSError as error:
            if not descriptors.is_shortage(error):
                raise TryFailed(WorkerFailure.CONNECT, str(error)) from error
        self._drop_idle()
        await asyncio.sleep(0)  # asyncio needs two turns to close it
        await asyncio.sleep(0)
        try:
            return await self._connect_once(origin)
        except OSError as error:
            kind = WorkerFailure.ROUTER if descriptors.is_shortage(error) else WorkerFailure.CONNECT
            raise TryFailed(kind, str(error)) from error

    async def _connect_once(self, origin: Origin) -> _WorkerConnection:
        """Raises TryFailed where it takes too long, OSError where it fails."""
        idle = self._idle.setdefault(origin, collections.deque())
        context = self._tls if origin.tls else None
        limit = asyncio.timeout(self._connect_timeout_s)
        try:
            async with limit:
                _, connection = await connect(lambda: _WorkerConnection(self, idle), origin, context)
        except TimeoutError as error:
            if not limit.expired():  # the kernel's own timeout, an OSError
                raise TryFailed(WorkerFailure.CONNECT, str(error)) from error
            raise TryFailed(WorkerFailure.CONNECT, f"no connection in {self._connect_timeout_s:g} s") from None
        return connection

    def _drop_idle(self) -> None:
        """Close the oldest idle connection of the worker that has most of them."""
        idle = max(self._idle.values(), key=len, default=None)
        if idle:
            idle.popleft().abort()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _head(method: bytes, origin: Origin, target: bytes, headers: Headers, body: bytes) -> bytes:
    """The bytes before the body. Names and values come from a parser, so none contains the end of a line."""
    lines = [b"%b %b%b HTTP/1.1" % (method, origin.prefix, target), b"host: " + origin.authority]
    lines += [name + b": " + value for name, value in headers]
    if body or method == b"POST":
        lines.append(b"content-length: %d" % len(body))
    lines += (b"", b"")
    return b"\r\n".join(lines)


def _has_length(headers: Headers) -> bool:
    """Whether the headers say where the body ends; otherwise it ends with the connection."""
    return find(headers, b"content-length") is not None or find(headers, b"transfer-encoding") is not None
