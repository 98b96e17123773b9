# SPDX-License-Identifier: Apache-2.0
"""The HTTP connection of the load generator: it sends a request and notes when each piece of the answer arrived.

The pieces are read only after the answer has ended, so that reading delays no arrival. No general HTTP client does
here, because the client shares the machine with what it measures: aiohttp needs two to three times the CPU time for a
request to a dummy engine, and would be the limit of the requests/s that `vllm-pd bench router` measures.
"""

import asyncio
import json
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import httptools
import msgspec

from vllm_pd.errors import PDError

ANSWER_TIMEOUT_S = 300.0
DECODER = msgspec.json.Decoder()


class LoadError(PDError):
    """An answer that did not come, or was not what was asked for."""


@dataclass(slots=True)
class HttpAnswer:
    """What came back over a connection. Times are `time.perf_counter()` seconds: when the request was written, when
    each piece of the body came, when the answer ended."""
    began_s: float
    header_lines: list[tuple[bytes, bytes]]
    pieces: list[tuple[float, bytes]]
    status: int = 0
    ended_s: float = 0.0

    @property
    def headers(self) -> dict[str, str]:
        """By name in lower case."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.header_lines}

    @property
    def body(self) -> bytes:
        return b"".join([piece for _, piece in self.pieces])

    def required(self) -> "HttpAnswer":
        """This answer. Raises LoadError unless its status is 200."""
        if self.status != 200:
            raise LoadError(f"status {self.status}: {self.body[:500].decode(errors='replace')}")
        return self

    def json(self) -> Any:
        """The body. Raises LoadError where it is no JSON."""
        try:
            return DECODER.decode(self.body)
        except msgspec.MsgspecError as error:
            raise LoadError(f"not an answer ({error!r}): {self.body[:200]!r}") from error

    def parts(self) -> list[Any]:
        """The JSON of each server-sent event of a stream. Raises LoadError where the stream is not one, or has no
        end."""
        *events, done, rest = [b"", *self.body.split(b"\n\n")]
        if done != b"data: [DONE]" or rest:
            raise LoadError(f"a stream that ends with {self.body[-80:]!r}")
        try:
            return [DECODER.decode(event.removeprefix(b"data: ")) for event in events[1:]]
        except msgspec.MsgspecError as error:
            raise LoadError(f"not a stream ({error!r}): {self.body[:200]!r}") from error

    def arrivals(self) -> Iterator[float]:
        """When the last byte of each event of a stream came, [DONE] excepted, in the order of `parts`."""
        pieces, end, piece_end, arrived_s = iter(self.pieces), 0, 0, 0.0
        for event in self.body.split(b"\n\n")[:-2]:
            end += len(event) + 2
            while piece_end < end:
                arrived_s, piece = next(pieces)
                piece_end += len(piece)
            yield arrived_s


class LoadConnection(asyncio.Protocol):
    """One HTTP/1.1 connection to a server. Owned by one task, which closes it at the end, by `close` or a `with` block.
    httptools calls the `on_...` methods."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer = HttpAnswer(0.0, [], [])
        self._over: asyncio.Future | None = None

    @classmethod
    async def open(cls, url: str) -> Self:
        """To the server at `url`, its base. Raises OSError where nobody listens."""
        parsed = urllib.parse.urlsplit(url)
        connect = asyncio.get_running_loop().create_connection
        return (await connect(lambda: cls(parsed.netloc), parsed.hostname, parsed.port or 80))[1]

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def exchange(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None,
                       timeout_s: float = ANSWER_TIMEOUT_S) -> HttpAnswer:
        """Sends one request with a body of JSON. The whole answer, whatever its status. Raises LoadError."""
        if self._transport.is_closing():
            raise LoadError("the connection was closed between two requests")
        own = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]) if headers else ""
        request = (f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n{own}"
                   f"Content-Length: {len(body)}\r\n\r\n").encode() + body
        self._parser = httptools.HttpResponseParser(self)
        self._over = asyncio.get_running_loop().create_future()
        self._answer = HttpAnswer(time.perf_counter(), [], [])
        self._transport.write(request)
        try:
            async with asyncio.timeout(timeout_s):
                await self._over
        except TimeoutError:
            self.close()
            raise LoadError(f"no end of an answer after {timeout_s:g} s") from None
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._over is None or self._over.done():
            return
        headers = self._answer.headers
        if headers and error is None and not {"content-length", "transfer-encoding"} & headers.keys():
            self.on_message_complete()  # an answer without a length ends with its connection
        else:
            self._over.set_exception(LoadError(f"the connection ended before the answer did ({error})"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._over.done():
                self._over.set_exception(LoadError(f"not an HTTP answer: {error}"))
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.header_lines.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._answer.pieces.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        if not self._over.done():
            self._answer.ended_s = time.perf_counter()
            self._answer.status = self._parser.get_status_code()
            self._over.set_result(None)


def call(url: str, method: str, path: str, body: Any = None, timeout_s: float = 10.0) -> Any:
    """The JSON that the server at `url` answers with; None for an empty answer. Raises LoadError unless the status is
    200, or OSError when nobody listens. Not for use in an event loop."""
    async def once() -> HttpAnswer:
        with await LoadConnection.open(url) as connection:
            return await connection.exchange(method, path, b"" if body is None else json.dumps(body).encode(),
                                             timeout_s=timeout_s)

    try:
        answer = asyncio.run(once()).required()
        return answer.json() if answer.body else None
    except LoadError as error:
        raise LoadError(f"{url}{path}: {error}") from None


def served_model(url: str) -> str:
    """The name of the first model that the engine at `url` serves."""
    return call(url, "GET", "/v1/models")["data"][0]["id"]
