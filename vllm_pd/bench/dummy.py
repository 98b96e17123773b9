# SPDX-License-Identifier: Apache-2.0
"""A dummy engine, for measuring routers: `python -m vllm_pd.bench.dummy --port 8100`.

It speaks as much of the OpenAI API as a router needs, answers every prompt with ` t0 t1 t2 ...` up to `max_tokens`, as
a stream or in one piece, and waits before the first and each further token as long as it is configured. So a client can
tell from the text alone whether a token was lost, doubled or moved. It is written for little CPU time per request,
directly on an HTTP parser, because it shares the machine with what is measured.

A `DummyConnection` parses requests one after another. Each is answered by a task of its own, which is cancelled, and
counted as such, when the client goes. `POST /dummy` changes the delays, `GET /dummy` shows the counts. With
`--block-size` it also publishes as many KV events as an engine would (`dummy_events.MadeUpEvents`).
"""

import argparse
import asyncio
import itertools
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec
import uvloop

from vllm_pd.bench.dummy_events import MadeUpEvents
from vllm_pd.errors import ConfigError
from vllm_pd.events import notice

MAX_BODY_BYTES = 64 << 20
MAX_TOKENS = 100_000
CHARS_PER_TOKEN = 4  # for the usage of a prompt

STREAM_HEAD = (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
               b"Transfer-Encoding: chunked\r\n\r\n")


class DummyDelays(msgspec.Struct):
    """How long the first token takes, and each further one, in seconds."""
    first_s: float = 0.0
    gap_s: float = 0.0


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class DummyRequest(msgspec.Struct):
    """What of a request for a completion or a chat changes the answer."""
    prompt: Any = ""
    messages: list[dict[str, Any]] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # of a stream

    @property
    def tokens(self) -> int:
        """The length of the answer."""
        asked = 16 if self.max_tokens is None else self.max_tokens
        return min(max(1, asked if self.max_completion_tokens is None else self.max_completion_tokens), MAX_TOKENS)

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt: exact for token ids, an estimate for text."""
        said = self.prompt or [message.get("content") or "" for message in self.messages]
        if isinstance(said, list) and said and isinstance(said[0], int):
            return len(said)
        return max(1, sum(map(len, said if isinstance(said, list) else [said])) // CHARS_PER_TOKEN)


REQUEST = msgspec.json.Decoder(DummyRequest)
DELAYS = msgspec.json.Decoder(DummyDelays)


def answer_text(tokens: int) -> str:
    """What a dummy says in `tokens` tokens."""
    return "".join(f" t{number}" for number in range(tokens))


@dataclass
class DummyEngine:
    """What all connections of one dummy share: settings and counts."""
    model: str = "dummy"
    delays: DummyDelays = field(default_factory=DummyDelays)
    events: MadeUpEvents | None = None
    requests: int = 0
    answered: int = 0
    cancelled: int = 0
    open: int = 0
    numbers: itertools.count = field(default_factory=itertools.count)

    def page(self, path: str) -> Any | None:
        """What a GET of `path` is answered with, to be encoded as JSON; None for a path that is not there."""
        if path in ("/health", "/ping"):
            return {}
        if path == "/health_generate":
            return {"choices": [{"index": 0, "text": " t0"}]}
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0,
                                                "owned_by": "vllm-pd", "root": self.model, "max_model_len": 131072}]}
        if path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info"):
            return {"model_path": self.model, "served_model_name": self.model, "is_generation": True}
        if path == notice.PATH and self.events is not None:
            return self.events.notice()
        if path == "/dummy":
            return {"requests": self.requests, "answered": self.answered, "cancelled": self.cancelled,
                    "open": self.open}
        return None


class DummyAnswer:
    """One answer, as bytes of JSON."""

    def __init__(self, dummy: DummyEngine, request: DummyRequest, chat: bool, request_id: str) -> None:
        self._request, self._chat, self._model = request, chat, dummy.model
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id or next(dummy.numbers)}"
        self._created = int(time.time())

    def whole(self) -> bytes:
        """The answer in one piece."""
        text = answer_text(self._request.tokens)
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return self._part("chat.completion" if self._chat else "text_completion",
                          [{"index": 0, **said, "logprobs": None, "finish_reason": "length"}], self._usage())

    def events(self) -> list[bytes]:
        """The answer as server-sent events: one for each token (the last has the finish reason), usage if asked for."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        parts = []
        for number in range(self._request.tokens):
            text = f" t{number}"
            reason = "length" if number == self._request.tokens - 1 else None
            role = {} if number else {"role": "assistant"}
            said = {"delta": {**role, "content": text}} if self._chat else {"text": text}
            if self._request.return_token_ids:
                prompt = {} if number else {"prompt_token_ids": list(range(self._request.prompt_tokens))}
                said |= {"token_ids": [number], **prompt}
            parts.append(self._part(kind, [{"index": 0, **said, "logprobs": None, "finish_reason": reason}]))
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            parts.append(self._part(kind, [], self._usage()))
        return [b"data: %b\n\n" % part for part in (*parts, b"[DONE]")]

    def _usage(self) -> dict[str, int]:
        prompt, answer = self._request.prompt_tokens, self._request.tokens
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def _part(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        return msgspec.json.encode({"id": self._id, "object": kind, "created": self._created, "model": self._model,
                                    "choices": choices, **({} if usage is None else {"usage": usage})})


class DummyConnection(asyncio.Protocol):
    """One client's connection. httptools calls the `on_...` methods."""

    def __init__(self, dummy: DummyEngine) -> None:
        self._dummy = dummy
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task | None = None
        self._keep = True
        self._url, self._request_id, self._body, self._body_bytes = b"", "", [], 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._request_id, self._body, self._body_bytes = b"", "", [], 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._transport.close()
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._task is not None:  # a request before the last answer has ended: no router does that
            self._transport.close()
            return
        self._keep = self._parser.should_keep_alive()
        path = self._url.decode("latin-1").partition("?")[0]
        body = b"".join(self._body)
        if path in ("/v1/completions", "/v1/chat/completions"):
            self._generate(path, body)
        elif path == "/dummy" and body:
            self._change(body)
        elif (page := self._dummy.page(path)) is not None:
            self._reply(msgspec.json.encode(page))
        else:
            self._reply(b'{"error":{"message":"not found","code":404}}', b"404 Not Found")

    def _change(self, body: bytes) -> None:
        """Answer `POST /dummy`: from now on the delays are those of `body`."""
        try:
            self._dummy.delays = DELAYS.decode(body)
        except msgspec.MsgspecError as error:
            self._refuse(error)
        else:
            self._reply(b"{}")

    def _generate(self, path: str, body: bytes) -> None:
        """Answer a completion or a chat, in a task of its own."""
        try:
            request = REQUEST.decode(body)
        except msgspec.MsgspecError as error:
            self._refuse(error)
            return
        self._dummy.requests += 1
        self._dummy.open += 1
        answer = DummyAnswer(self._dummy, request, path.startswith("/v1/chat"), self._request_id)
        if self._dummy.events is not None:
            self._dummy.events.answered(request.prompt_tokens + request.tokens)
        self._task = asyncio.get_running_loop().create_task(self._answer(request, answer))
        self._task.add_done_callback(self._answered)

    async def _answer(self, request: DummyRequest, answer: DummyAnswer) -> None:
        """Writes an answer, whole or as a stream of chunks, after the pauses that an engine would need for its tokens.
        The events after the last token come without one."""
        delays = self._dummy.delays
        if not request.stream:
            await _pause(delays.first_s + delays.gap_s * (request.tokens - 1))
            self._reply(answer.whole())
            return
        write = self._transport.write
        write(STREAM_HEAD)
        for number, event in enumerate(answer.events()):
            if number < request.tokens:
                await _pause(delays.gap_s if number else delays.first_s)
            write(b"%x\r\n%b\r\n" % (len(event), event))
        write(b"0\r\n\r\n")
        self._end()

    def _answered(self, task: asyncio.Task) -> None:
        self._dummy.open -= 1
        if task.cancelled():
            self._dummy.cancelled += 1
        elif task.exception() is not None:
            self._transport.close()
            asyncio.get_running_loop().call_exception_handler({"message": "an answer failed",
                                                               "exception": task.exception()})
        else:
            self._dummy.answered += 1

    def _refuse(self, error: Exception) -> None:
        said = {"object": "error", "message": str(error), "type": "BadRequestError", "code": 400}
        self._reply(msgspec.json.encode(said), b"400 Bad Request")

    def _reply(self, body: bytes, status: bytes = b"200 OK") -> None:
        self._transport.write(b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                              % (status, len(body), body))
        self._end()

    def _end(self) -> None:
        """After the whole answer is written, the next request may come."""
        self._task = None
        if not self._keep:
            self._transport.close()


async def _pause(delay_s: float) -> None:
    if delay_s > 0:
        await asyncio.sleep(delay_s)


async def serve(dummy: DummyEngine, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError where the port is taken."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    server = await loop.create_server(lambda: DummyConnection(dummy), host, port, backlog=1024)
    async with server:
        await over.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A dummy engine, for measuring routers.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="dummy", help="the name it serves")
    parser.add_argument("--first-s", type=float, default=0.0, help="how long the first token takes")
    parser.add_argument("--gap-s", type=float, default=0.0, help="how long each further token takes")
    parser.add_argument("--block-size", type=int, default=0, help="publish KV events of such blocks, made up; 0: none")
    options = parser.parse_args()
    if options.block_size < 0:
        raise ConfigError("--block-size", options.block_size, "write tokens, or 0 for no events")
    for key, value in (("--first-s", options.first_s), ("--gap-s", options.gap_s)):
        if not 0 <= value < float("inf"):
            raise ConfigError(key, value, "write seconds, 0 or more")
    events = MadeUpEvents(options.block_size) if options.block_size else None
    dummy = DummyEngine(options.model, DummyDelays(options.first_s, options.gap_s), events)
    try:
        uvloop.run(serve(dummy, options.host, options.port))
    finally:
        if events is not None:
            events.close()


if __name__ == "__main__":
    main()
