# SPDX-License-Identifier: Apache-2.0
"""The load generator: requests over connections that stay open, each answer checked to the letter and timed.

A `LoadConnection` is one connection to one target and carries one request at a time. It times the first byte of the
answer's body and its end, both from just before the request is written, and then compares the text with what a dummy
says (`worker.answer_text`): what comes back cut, doubled or mixed up is an error, not a fast answer.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httptools
import msgspec

from vllm_pd.bench.dummy import answer_text
from vllm_pd.errors import PDError

ANSWER_TIMEOUT_S = 60.0
WORDS = ("river", "stone", "cloud", "paper", "light", "music", "seven", "green", "north", "table", "under", "again")
WORDS_PER_TOKEN = 0.75
DRAWN = 256  # texts that follow the numbers
_NUMBER = "#number#"


class LoadError(PDError):
    """An answer that did not come, or was not what the worker has said."""


@dataclass(frozen=True)
class RequestShape:
    """What a request asks for. `prompt_tokens` is reckoned, the prompt being English words."""
    tokens: int
    prompt_tokens: int
    stream: bool = False
    chat: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True)
class RequestTiming:
    """One answer. A stream's `first_s` is its first event's; otherwise the first byte's of the body."""
    first_s: float
    total_s: float


def make_bodies(shape: RequestShape, model: str, draw: random.Random) -> Iterator[bytes]:
    """Requests without end. Each prompt begins with a number of its own, so that nobody has seen it before."""
    drawn = [make_body(shape, model, draw, _NUMBER).split(_NUMBER.encode()) for _ in range(DRAWN)]
    for number in itertools.count():
        before, after = drawn[number % DRAWN]
        yield b"%b%d%b" % (before, number, after)


def make_body(shape: RequestShape, model: str, draw: random.Random, first: str = "") -> bytes:
    """The JSON of one request; `first` is what its prompt begins with."""
    words = draw.choices(WORDS, k=max(1, int(shape.prompt_tokens * WORDS_PER_TOKEN)))
    prompt = " ".join([first, *words] if first else words)
    asked = {"messages": [{"role": "user", "content": prompt}]} if shape.chat else {"prompt": prompt}
    return msgspec.json.encode({"model": model, **asked, "max_tokens": shape.tokens, "temperature": 0,
                                "stream": shape.stream})


class LoadConnection(asyncio.Protocol):
    """One connection that asks. Owned by one task; `close` it at the end."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._over: asyncio.Future | None = None
        self._began = self._first = 0.0
        self._body: list[bytes] = []

    @classmethod
    async def open(cls, host: str, port: int) -> "LoadConnection":
        """Raises OSError where nobody listens."""
        return (await asyncio.get_running_loop().create_connection(cls, host, port))[1]

    def close(self) -> None:
        self._transport.close()

    async def ask(self, shape: RequestShape, body: bytes, name: str = "") -> RequestTiming:
        """Sends one request, with `name` as its X-Request-Id. Raises LoadError unless the whole answer has come."""
        if self._transport.is_closing():
            raise LoadError("the connection was closed between two requests")
        self._parser = httptools.HttpResponseParser(self)
        self._over = asyncio.get_running_loop().create_future()
        self._body, self._first = [], 0.0
        head = (f"POST {shape.path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
                f"X-Request-Id: {name}\r\nContent-Length: {len(body)}\r\n\r\n")
        data = head.encode() + body
        self._began = time.perf_counter()
        self._transport.write(data)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                ended = await self._over
        except TimeoutError:
            self.close()
            raise LoadError(f"no end of an answer after {ANSWER_TIMEOUT_S:.0f} s") from None
        status, answer = self._parser.get_status_code(), b"".join(self._body)
        if status != 200:
            raise LoadError(f"status {status}: {answer[:200]!r}")
        check(shape, answer)
        return RequestTiming(self._first - self._began, ended - self._began)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(LoadError(f"the connection ended before the answer did ({error})"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._over.done():
                self._over.set_exception(LoadError(f"not an HTTP answer: {error}"))
            self.close()

    def on_body(self, body: bytes) -> None:
        if not self._body:
            self._first = time.perf_counter()
        self._body.append(body)

    def on_message_complete(self) -> None:
        if not self._over.done():
            self._over.set_result(time.perf_counter())


def check(shape: RequestShape, answer: bytes) -> None:
    """Raises LoadError unless `answer` is the whole body that a dummy gives to a request of this shape."""
    try:
        text = "".join(map(_said, _stream_parts(answer) if shape.stream else [msgspec.json.decode(answer)]))
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError) as error:
        raise LoadError(f"not an answer ({error!r}): {answer[:200]!r}") from error
    if text != answer_text(shape.tokens):
        raise LoadError(f"{shape.tokens} tokens were asked for, the text is {text[:100]!r} ... {text[-30:]!r}")


def _stream_parts(answer: bytes) -> list[Any]:
    *events, done, rest = [b"", *answer.split(b"\n\n")]
    if done != b"data: [DONE]" or rest:
        raise LoadError(f"a stream that ends with {answer[-80:]!r}")
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events[1:]]


def _said(part: dict[str, Any]) -> str:
    choice = part["choices"][0]
    for key in ("delta", "message"):
        if key in choice:
            return choice[key].get("content") or ""
    return choice["text"]


@dataclass
class LoadSlice:
    """What one target did in one slice of time under a closed loop."""
    timings: list[RequestTiming]
    errors: list[str]
    took_s: float

    @property
    def requests_per_s(self) -> float:
        return len(self.timings) / self.took_s


async def saturate(targets: Sequence[tuple[str, int]], shape: RequestShape, bodies: Iterator[bytes], concurrency: int,
                   for_s: float, pause_s: float = 0.0, draw: random.Random | None = None) -> LoadSlice:
    """`concurrency` lines, spread over `targets`, each asking again when it has its answer, for `for_s` seconds and at
    least once. Before each request a line rests for up to `pause_s`, drawn from `draw`, so that the lines do not walk
    in step. An error ends its line's part."""
    draw = draw or random.Random(0)
    lines = [await LoadConnection.open(*targets[number % len(targets)]) for number in range(concurrency)]
    timings: list[RequestTiming] = []
    errors: list[str] = []
    began = time.perf_counter()

    async def keep_asking(number: int, line: LoadConnection) -> None:
        turn = 0
        while not turn or time.perf_counter() - began < for_s:
            if pause_s:
                await asyncio.sleep(draw.uniform(0, pause_s))
            try:
                timings.append(await line.ask(shape, next(bodies), f"bench-{number}-{turn}"))
            except LoadError as error:
                errors.append(str(error))
                return
            turn += 1

    try:
        await asyncio.gather(*(keep_asking(number, line) for number, line in enumerate(lines)))
        return LoadSlice(timings, errors, time.perf_counter() - began)
    finally:
        for line in lines:
            line.close()
