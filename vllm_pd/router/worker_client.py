# SPDX-License-Identifier: Apache-2.0
"""The connections to the workers: one request out, one answer back, in the bytes in which it comes.

HTTP/1.1 straight upon the parser that uvicorn uses too: a general client costs more time per request than all of the
rest of the router. It does no more than a proxy needs: no redirects, no cookies, no decompression, no proxies.

Life of a connection: `request` gives a `WorkerResponse` -> its end puts the connection among the idle ones, unless
either side wants it closed -> taken again, or closed when it has been idle for `KEEP_ALIVE_S`. A reply that is closed
before its end takes its connection with it, by which the worker learns that nobody waits for the rest.
"""
import asyncio
import collections
import functools
import ssl
import urllib.parse
from typing import NamedTuple

import httptools

from vllm_pd.router import descriptors
from vllm_pd.router.responses import Headers, RouterResponse, find
from vllm_pd.router.workers import WorkerFailure

KEEP_ALIVE_S = 4.0  # less than the 5 s after which vLLM's server hangs up
MAX_IDLE = 256  # connections to one worker
MAX_BUFFERED_BYTES = 1 << 18  # that have come and nobody has fetched; then the worker has to wait
MAX_HEAD_BYTES = 1 << 16
STALE_S = 0.5  # from sending to the news that the connection had been closed before


class TryFailed(Exception):
    """No answer came from this worker. `stale`: on a connection that had been used before and may have been closed
    meanwhile, so that it says nothing about the worker. `answer`: what it said instead, where it said something.
    `final`: the request is not to be tried elsewhere."""

    def __init__(self, kind: WorkerFailure, detail: str, stale: bool = False, answer: RouterResponse | None = None,
                 final: bool = False) -> None:
        super().__init__(detail)
        self.final = final
        self.kind = kind
        self.stale = stale
        self.answer = answer


class WorkerResponseBroken(Exception):
    """The answer ended before its end."""


class Origin(NamedTuple):
    """Where a worker is."""
    host: str
    port: int
    tls: bool
    authority: bytes
    prefix: bytes  # of its paths

    @classmethod
    @functools.lru_cache(8192)
    def of(cls, url: str) -> "Origin":
        """Of a worker's base URL, which has been checked."""
        parts = urllib.parse.urlsplit(url)
        return cls(parts.hostname, parts.port, parts.scheme == "https", parts.netloc.encode(), parts.path.encode())


class WorkerResponse:
    """An answer, from its head on. It must be read to its end or closed."""

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
        """Wait for status and headers. Raises WorkerResponseBroken."""
        while not self.status:
            if self._error is not None:
                raise WorkerResponseBroken(self._error)
            await self._wait()

    async def chunk(self) -> bytes:
        """What has come since the last call, waited for; empty at the end. Raises WorkerResponseBroken."""
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
        """Whether its end shows otherwise than by the end of the connection."""
        return _has_length(self.headers)

    def close(self) -> None:
        """Hang up, unless the answer is complete: the worker then gives the request up."""
        if not self._complete:
            self._connection.abort()

    # What the connection tells.

    def began(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self._wake()

    def more(self, part: bytes) -> bool:
        """Whether it is enough for now."""
        self._parts.append(part)
        self._size += len(part)
        self._wake()
        return self._size > MAX_BUFFERED_BYTES

    def ended(self) -> None:
        self._complete = True
        self._wake()

    def broke(self, why: str) -> None:
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
    """One, with at most one request at a time. `idle` is where it goes in between."""

    def __init__(self, owner: "WorkerClient", idle: "collections.deque[_WorkerConnection]") -> None:
        self.idle_since_s = 0.0
        self._owner = owner
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: WorkerResponse | None = None
        self._headers: Headers = []
        self._head_bytes = 0
        self._lost = False
        self.silent = True  # since the last request

    @property
    def usable(self) -> bool:
        """Whether a request may be sent."""
        return not self._lost and not self._transport.is_closing()

    def request(self, head: bytes, body: bytes) -> WorkerResponse:
        """Send it; the reply belongs to the caller."""
        self._reply = reply = WorkerResponse(self)
        self._headers = []
        self._head_bytes = 0
        self.silent = True
        self._transport.write(head + body if len(body) < MAX_HEAD_BYTES else head)
        if len(body) >= MAX_HEAD_BYTES:
            self._transport.write(body)
        return reply

    def abort(self) -> None:
        """End it, whatever is under way."""
        self._lost = True
        if self._transport is not None:
            self._transport.abort()

    def resume(self) -> None:
        """Read on."""
        if self.usable:
            self._transport.resume_reading()

    # asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._owner.connections += 1

    def data_received(self, data: bytes) -> None:
        if self._reply is None:  # nobody has asked
            self.abort()
            return
        self.silent = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"not HTTP/1.1: {error}")

    def connection_lost(self, error: Exception | None) -> None:
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

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("its headers are too long")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # not the answer yet
            self._headers = []
        else:
            self._reply.began(status, self._headers)

    def on_body(self, part: bytes) -> None:
        if self._reply.more(part) and not self._transport.is_closing():
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        reply, self._reply = self._reply, None
        keep = len(self._idle) < MAX_IDLE and self._owner.connections <= self._owner.most_connections
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
    """The client of all workers. Belongs to the router's event loop. `tls` says whose certificates are believed. Beyond
    `most_connections` none is kept for later."""

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext, most_connections: int = 1 << 16) -> None:
        self.most_connections = most_connections
        self.connections = 0
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, collections.deque[_WorkerConnection]] = {}
        self._tls = tls

    async def send(self, method: bytes, url: str, target: bytes, headers: Headers, body: bytes,
                   fresh: bool = False) -> WorkerResponse:
        """Send a request to the worker of this base URL, on a new connection where it is to be a `fresh` one, and wait
        for the head of its answer. Raises TryFailed."""
        origin = Origin.of(url)
        connection = None if fresh else self._take(origin)
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

    def forget(self, url: str) -> None:
        """That worker is gone: close what is idle."""
        for connection in self._idle.pop(Origin.of(url), ()):
            connection.abort()

    def close(self) -> None:
        """Hang up where nothing is under way."""
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in list(connections):
                connection.abort()

    def _take(self, origin: Origin) -> _WorkerConnection | None:
        """The connection that was used last, of those that stand."""
        idle = self._idle.get(origin)
        oldest_s = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since_s > oldest_s:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin) -> _WorkerConnection:
        if self.connections >= self.most_connections:
            self._drop_idle()
        try:
            return await self._connect_once(origin)
        except OSError as error:
            if not descriptors.are_short(error):
                raise TryFailed(WorkerFailure.CONNECT, str(error)) from error
        self._drop_idle()
        await asyncio.sleep(0)  # in which it is closed
        await asyncio.sleep(0)
        try:
            return await self._connect_once(origin)
        except OSError as error:
            kind = WorkerFailure.ROUTER if descriptors.are_short(error) else WorkerFailure.CONNECT
            raise TryFailed(kind, str(error)) from error

    async def _connect_once(self, origin: Origin) -> _WorkerConnection:
        """Raises TryFailed where it takes too long, OSError where there is none."""
        idle = self._idle.setdefault(origin, collections.deque())
        context = self._tls if origin.tls else None
        limit = asyncio.timeout(self._connect_timeout_s)
        try:
            async with limit:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _WorkerConnection(self, idle), origin.host, origin.port, ssl=context)
        except TimeoutError as error:
            if not limit.expired():  # the kernel's own, an OSError
                raise TryFailed(WorkerFailure.CONNECT, str(error)) from error
            raise TryFailed(WorkerFailure.CONNECT, f"no connection in {self._connect_timeout_s:g} s") from None
        return connection

    def _drop_idle(self) -> None:
        """Close one that nobody uses, of the worker that has most."""
        idle = max(self._idle.values(), key=len, default=None)
        if idle:
            idle.popleft().abort()


def _head(method: bytes, origin: Origin, target: bytes, headers: Headers, body: bytes) -> bytes:
    """Everything before the body. Names and values come from a parser, so that none holds the end of a line."""
    lines = [b"%b %b%b HTTP/1.1" % (method, origin.prefix, target), b"host: " + origin.authority]
    lines += [name + b": " + value for name, value in headers]
    if body or method == b"POST":
        lines.append(b"content-length: %d" % len(body))
    lines += (b"", b"")
    return b"\r\n".join(lines)


def _has_length(headers: Headers) -> bool:
    """Whether an answer's end shows, so that the end of its connection is not it."""
    return find(headers, b"content-length") is not None or find(headers, b"transfer-encoding") is not None
