# SPDX-License-Identifier: Apache-2.0
"""A small client of an engine's OpenAI API that hears the exact tokens and when each of them came.

Tokens are asked for as ids (`return_tokens_as_token_ids` with log-probabilities), because two answers of the same
text may still be different tokens. No proxy is ever used: the engines are on this machine.
"""

import http.client
import itertools
import json
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TOKEN_ID = "token_id:"
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Question:
    """One request. `prompt` is a text or a list of token ids for completions, a list of messages for chats."""
    prompt: Any
    max_tokens: int
    chat: bool = False
    stream: bool = False
    ignore_eos: bool = False

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The JSON of the request: greedy, with token ids, and with usage at the end of a stream."""
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens, "temperature": 0,
                                "ignore_eos": self.ignore_eos, "stream": self.stream,
                                "return_tokens_as_token_ids": True}
        if self.chat:
            body.update(messages=self.prompt, logprobs=True, top_logprobs=1)
        else:
            body.update(prompt=self.prompt, logprobs=1)
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body


@dataclass(frozen=True)
class Answer:
    """What came back. `arrivals_s` are the times since sending at which parts with tokens came, so `ttft_s` is the
    first; an answer that was not streamed has one arrival, its end."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    usage: tuple[int, int]  # prompt tokens, completion tokens
    arrivals_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """The inter-token latencies of a streamed answer."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals_s)]

    def same_as(self, other: "Answer") -> bool:
        """Whether a user could not tell the two apart, times aside."""
        return ((self.text, self.token_ids, self.finish_reason, self.usage)
                == (other.text, other.token_ids, other.finish_reason, other.usage))


class RequestError(RuntimeError):
    """The server refused a request; the message holds its status and its words."""


def ask(url: str, model: str, question: Question, timeout_s: float = TIMEOUT_S) -> Answer:
    """Sends one question to the engine at `url`. Raises RequestError, or OSError when nobody answers."""
    begin = time.perf_counter()
    text, token_ids, arrivals_s, finish_reason, usage = "", [], [], None, (0, 0)
    for part in _parts(url, question.path, question.body(model), timeout_s):
        now_s = time.perf_counter() - begin
        if "error" in part:
            raise RequestError(f"{url}{question.path}: {part['error']}")
        if part.get("usage"):
            usage = (part["usage"]["prompt_tokens"], part["usage"]["completion_tokens"])
        for choice in part["choices"]:
            new_text, new_ids = _content(choice, question)
            text += new_text
            token_ids += new_ids
            finish_reason = choice.get("finish_reason") or finish_reason
            if new_ids:
                arrivals_s.append(now_s)
    if not arrivals_s:
        raise RequestError(f"{url}{question.path}: an answer without a token")
    return Answer(text, tuple(token_ids), finish_reason, usage, tuple(arrivals_s))


def fetch(url: str, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
    """Status and body of GET `path`. Raises OSError when the server does not answer."""
    connection = _connect(url, timeout_s)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"{url}{path}: {error!r}") from error
    finally:
        connection.close()


def is_healthy(url: str, timeout_s: float = 2.0) -> bool:
    """Whether the server at `url` answers /health with success."""
    try:
        return fetch(url, "/health", timeout_s)[0] == 200
    except OSError:
        return False


def served_model(url: str) -> str:
    """The name of the first model that the engine serves."""
    status, body = fetch(url, "/v1/models")
    if status != 200:
        raise RequestError(f"{url}/v1/models: {status} {body[:200]}")
    return json.loads(body)["data"][0]["id"]


def tokenize(url: str, model: str, text: str) -> list[int]:
    """The ids of `text` as the engine's tokenizer sees them, special tokens included."""
    [reply] = _parts(url, "/tokenize", {"model": model, "prompt": text}, TIMEOUT_S)
    return reply["tokens"]


def detokenize(url: str, model: str, token_ids: list[int]) -> str:
    """The text of these tokens."""
    [reply] = _parts(url, "/detokenize", {"model": model, "tokens": token_ids}, TIMEOUT_S)
    return reply["prompt"]


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parsed = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parsed.hostname, parsed.port or 80, timeout=timeout_s)


def _parts(url: str, path: str, body: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    connection = _connect(url, timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RequestError(f"{url}{path}: {reply.status} {reply.read().decode(errors='replace')[:500]}")
        if not body.get("stream"):
            yield json.loads(reply.read())
            return
        for line in reply:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[len(b"data: "):])
    except http.client.HTTPException as error:
        raise ConnectionError(f"{url}{path}: {error!r}") from error
    finally:
        connection.close()


def _content(choice: dict[str, Any], question: Question) -> tuple[str, list[int]]:
    logprobs = choice.get("logprobs") or {}
    if question.chat:
        message = choice["delta"] if question.stream else choice["message"]
        return message.get("content") or "", [_token_id(entry["token"]) for entry in logprobs.get("content") or ()]
    return choice["text"], [_token_id(token) for token in logprobs.get("tokens") or ()]


def _token_id(token: str) -> int:
    return int(token.removeprefix(TOKEN_ID))
