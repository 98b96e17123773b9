# SPDX-License-Identifier: Apache-2.0
"""The load generator of every benchmark: generation requests of the OpenAI API, one by one or in a closed loop.

`generate` sends one over a `LoadConnection`, and `ask` one from outside an event loop; the answer has the arrival of
every token. `closed_loop` keeps a number of clients busy. For any other arrival process, start `generate` at the times
that the process gives, as `conversations` does.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_pd.bench.connection import ANSWER_TIMEOUT_S, HttpAnswer, LoadConnection, LoadError

TOKEN_ID = "token_id:"
CURE = "With `bench serve`, use --compare text"


@dataclass(frozen=True)
class GenerationRequest:
    """A greedy request for tokens. `prompt` is a text or a list of token ids for completions, a list of messages for
    chats. With `token_ids` the answer has the exact tokens, because two answers of the same text may still be different
    tokens; they are asked for as log-probabilities, which cost the engine time. `kv_transfer_params`: what a proxy
    adds for engines that get a prompt one after another."""
    prompt: Any
    max_tokens: int
    chat: bool = False
    stream: bool = False
    ignore_eos: bool = False
    token_ids: bool = True
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The request, to be encoded as JSON. A stream ends with usage."""
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens, "temperature": 0,
                                "ignore_eos": self.ignore_eos, "stream": self.stream,
                                "messages" if self.chat else "prompt": self.prompt}
        if self.token_ids:
            body["return_tokens_as_token_ids"] = True
            body |= {"logprobs": True, "top_logprobs": 1} if self.chat else {"logprobs": 1}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.kv_transfer_params is not None:
            body["kv_transfer_params"] = self.kv_transfer_params
        return body


@dataclass(frozen=True)
class GenerationAnswer:
    """What came back. `arrivals_s` are the seconds since the request began at which parts with tokens came: `ttft_s` is
    the first of them. An answer that was not streamed has one arrival, its end. `usage`: tokens of the prompt, and of
    the answer; (0, 0) where the server does not report it."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    usage: tuple[int, int]
    arrivals_s: tuple[float, ...]
    total_s: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """The times between the parts of a streamed answer. A part is usually one token; with several in each, these
        are not the times between tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals_s)]

    def same_as(self, other: "GenerationAnswer") -> bool:
        """Whether a user could not tell the two apart, times aside."""
        return ((self.text, self.token_ids, self.finish_reason, self.usage)
                == (other.text, other.token_ids, other.finish_reason, other.usage))


async def generate(connection: LoadConnection, model: str, request: GenerationRequest,
                   headers: Mapping[str, str] | None = None, began_s: float | None = None,
                   timeout_s: float = ANSWER_TIMEOUT_S) -> GenerationAnswer:
    """Sends one generation request. `began_s` (perf_counter): when it began, if that was before it is written. Raises
    LoadError, also where the server answers with an error or without a token."""
    body = json.dumps(request.body(model)).encode()
    answer = await connection.exchange("POST", request.path, body, headers, timeout_s)
    try:
        return _read(request, answer.required(), answer.began_s if began_s is None else began_s)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise LoadError(f"not an answer ({error!r}): {answer.body[:200]!r}") from error


def _read(request: GenerationRequest, answer: HttpAnswer, began_s: float) -> GenerationAnswer:
    """What an answer says. Raises LoadError, or any error of access where it is none."""
    text, token_ids, arrivals_s, finish_reason, usage = "", [], [], None, (0, 0)
    parts, arrivals = (answer.parts(), answer.arrivals()) if request.stream else ([answer.json()], [answer.ended_s])
    for part, arrived_s in zip(parts, arrivals, strict=True):
        if "error" in part:
            raise LoadError(f"{request.path}: {part['error']}")
        if part.get("usage"):
            usage = (part["usage"]["prompt_tokens"], part["usage"]["completion_tokens"])
        for choice in part["choices"]:
            new_text, new_ids = _content(choice, request)
            text += new_text
            token_ids += new_ids
            finish_reason = choice.get("finish_reason") or finish_reason
            if new_ids if request.token_ids else new_text or not request.chat:  # a chat begins with its role alone
                arrivals_s.append(arrived_s - began_s)
    if not arrivals_s:
        missing = f" id, but with text: the server gives no log-probabilities. {CURE}" if text else ""
        raise LoadError(f"{request.path}: an answer without a token{missing}")
    return GenerationAnswer(text, tuple(token_ids), finish_reason, usage, tuple(arrivals_s), answer.ended_s - began_s,
                            answer.headers)


def _content(choice: dict[str, Any], request: GenerationRequest) -> tuple[str, list[int]]:
    """Text and token ids that a part of an answer adds."""
    logprobs = choice.get("logprobs") or {}
    if request.chat:
        said = choice["delta"] if request.stream else choice["message"]
        text, tokens = said.get("content") or "", [entry["token"] for entry in logprobs.get("content") or ()]
    else:
        text, tokens = choice["text"], logprobs.get("tokens") or ()
    return text, [_token_id(token) for token in tokens] if request.token_ids else []


def _token_id(token: str) -> int:
    """The id of a token of the log-probabilities. Raises LoadError where the server has put the token's text there."""
    number = token.removeprefix(TOKEN_ID)
    if number == token or not number.isdecimal():
        raise LoadError(f"no token ids came, but the token {token!r}: the server ignores return_tokens_as_token_ids. "
                        f"{CURE}")
    return int(number)


def ask(url: str, model: str, request: GenerationRequest, timeout_s: float = ANSWER_TIMEOUT_S) -> GenerationAnswer:
    """Sends one generation request to the server at `url`, over a connection of its own that counts as part of it.
    Raises LoadError, or OSError when nobody listens. Not for use in an event loop."""
    async def once() -> GenerationAnswer:
        began_s = time.perf_counter()
        with await LoadConnection.open(url) as connection:
            return await generate(connection, model, request, began_s=began_s, timeout_s=timeout_s)

    return asyncio.run(once())


@dataclass(frozen=True)
class RequestTiming:
    """One answer, in seconds since its request was written: the first piece of its body, and its end."""
    first_s: float
    total_s: float


@dataclass
class LoadSlice:
    """What one target did in one slice of time under a closed loop."""
    timings: list[RequestTiming]
    errors: list[str]
    took_s: float

    @property
    def requests_per_s(self) -> float:
        return len(self.timings) / self.took_s


async def closed_loop(urls: Sequence[str], send: Callable[[LoadConnection, str], Awaitable[RequestTiming]],
                      clients: int, for_s: float, pause_s: float = 0.0, draw: random.Random | None = None) -> LoadSlice:
    """`clients` clients, spread over the servers at `urls`, each with a connection of its own, each sending again when
    it has its answer, for `for_s` seconds and at least once. Raises OSError where nobody listens.

    `send` gets the connection and the request's name, and may raise LoadError, which ends this client's part. Before
    each request a client pauses for up to `pause_s`, drawn from `draw`, so that clients do not run in step."""
    draw = draw or random.Random(0)
    connections: list[LoadConnection] = []
    found = LoadSlice([], [], 0.0)
    began = 0.0

    async def keep_sending(number: int, connection: LoadConnection) -> None:
        turn = 0
        while not turn or time.perf_counter() - began < for_s:
            if pause_s:
                await asyncio.sleep(draw.uniform(0, pause_s))
            try:
                found.timings.append(await send(connection, f"bench-{number}-{turn}"))
            except LoadError as error:
                found.errors.append(str(error))
                return
            turn += 1

    try:
        for number in range(clients):
            connections.append(await LoadConnection.open(urls[number % len(urls)]))
        began = time.perf_counter()
        await asyncio.gather(*(keep_sending(number, connection) for number, connection in enumerate(connections)))
        found.took_s = time.perf_counter() - began
        return found
    finally:
        for connection in connections:
            connection.close()
