# SPDX-License-Identifier: Apache-2.0
"""The forms of requests that clients of vLLM send: each route, each field, right and wrong, short and long prompts.

A prompt is *short*, so that a decode engine computes it, or *long*, so that it is handed over. The texts of two forms
never begin alike, so that no form finds the prefix of another one in a cache.
"""
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "tiny"
LONG_WORDS = 260  # more tokens than `MAX_LOCAL_PREFILL_TOKENS`, and well below the length of the model
WORDS = ("river", "clock", "window", "letter", "garden", "engine", "yellow", "train", "bridge", "paper", "winter",
         "music", "harbour", "apple", "mountain", "silver", "road", "teacher", "island", "kitchen")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look something up.", "parameters": SCHEMA}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class RequestForm:
    """One request. `body`: JSON, or bytes that are sent as they are, or None for none."""
    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_long(self) -> bool:
        """Whether its prompt is one to hand over."""
        return self.name.endswith(", long")

    @property
    def data(self) -> bytes | None:
        """The body as it is sent."""
        return self.body if self.body is None or isinstance(self.body, bytes) else json.dumps(self.body).encode()


# What a completion and a chat may say beside the prompt; the answer is greedy unless it says otherwise.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "usage in a stream": USAGE,
    "usage in each chunk": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "stream": {"stream": True},
    "seed": {"temperature": 0.9, "seed": 7},
    "seed, stream": {"temperature": 0.9, "seed": 7, **USAGE},
    "seed, top_p, top_k, min_p": {"temperature": 0.8, "seed": 3, "top_p": 0.8, "top_k": 30, "min_p": 0.05},
    "n 3": {"n": 3, "temperature": 0.9, "seed": 5},
    "n 3, stream": {"n": 3, "temperature": 0.9, "seed": 5, **USAGE},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"500": 80, "600": -100}},
    "bad_words": {"bad_words": ["the", "and"]},
    "allowed_token_ids": {"allowed_token_ids": [500, 501, 502, 503]},
    "stop": {"stop": ["a", "e"]},
    "stop in the answer": {"stop": ["a", "e"], "include_stop_str_in_output": True},
    "stop, stream": {"stop": ["a", "e"], **USAGE},
    "stop_token_ids": {"stop_token_ids": list(range(1000, 20000))},
    "min_tokens": {"stop_token_ids": list(range(1000, 20000)), "min_tokens": 4},
    "ignore_eos": {"ignore_eos": True},
    "one token": {"max_tokens": 1},
    "one token, stream": {"max_tokens": 1, **USAGE},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "token ids": {"return_token_ids": True},
    "token ids, stream": {"return_token_ids": True, **USAGE},
    "truncated": {"truncate_prompt_tokens": 20},
    "special tokens": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "JSON schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
                    "max_tokens": 24},
    "choice": {"structured_outputs": {"choice": ["red", "green"]}},
    "regex, stream": {"structured_outputs": {"regex": "[0-9]{3}"}, **USAGE},
    "priority": {"priority": 0},
    "user": {"user": "somebody"},
    "pd local": {"kv_transfer_params": {"pd": "local"}},
    "pd auto": {"kv_transfer_params": {"pd": "auto"}},
    "unknown field": {"no_such_field": 1},
}
COMPLETION_ONLY: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "logprobs 0": {"logprobs": 0},
    "logprobs, stream": {"logprobs": 2, **USAGE},
    "echo": {"echo": True},
    "echo, logprobs": {"echo": True, "logprobs": 1},
    "suffix": {"suffix": " end"},
    "request_id": {"request_id": "mine"},
}
CHAT_ONLY: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs, stream": {"logprobs": True, "top_logprobs": 2, **USAGE},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "tools": {"tools": [TOOL], "tool_choice": "none"},
    "tools auto": {"tools": [TOOL]},
    "a tool by name": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}},
                       "max_tokens": 24},
    "no generation prompt": {"add_generation_prompt": False},
    "continued message": {"continue_final_message": True, "add_generation_prompt": False},
    "template arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "reasoning_effort": {"reasoning_effort": "low"},
}
WRONG: dict[str, dict[str, Any]] = {
    "wrong model": {"model": "none"},
    "temperature is text": {"temperature": "hot"},
    "temperature below 0": {"temperature": -1},
    "top_p above 1": {"top_p": 2},
    "n 0": {"n": 0},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens beyond the model": {"max_tokens": 100_000},
    "min_tokens above max_tokens": {"min_tokens": 50},
    "stop is a number": {"stop": 5},
    "logit_bias beyond the vocabulary": {"logit_bias": {"9999999": 1}},
    "allowed_token_ids empty": {"allowed_token_ids": []},
    "a regex that is none": {"structured_outputs": {"regex": "(["}},
    "a schema that is none": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": {"type": 5}}}},
    "stream_options without a stream": {"stream_options": {"include_usage": True}},
    "prompt_logprobs in a stream": {"prompt_logprobs": 1, "stream": True},
    "truncated below -1": {"truncate_prompt_tokens": -5},
    "kv_transfer_params is text": {"kv_transfer_params": "fast"},
    "seed is a list": {"seed": [1]},
}
PROMPTS: dict[str, Any] = {
    "ids": list(range(700, 712)),
    "long ids": list(range(3000, 3400)),
    "two texts": ["The harbour of the old town", "A clock that nobody has repaired"],
    "two lists of ids": [list(range(800, 820)), list(range(900, 1300))],
    "empty text": "",
    "empty list": [],
    "no such id": [1, 2, 99_999_999],
    "a negative id": [1, -2, 3],
    "an id that is text": [1, "two"],
    "a number": 5,
    "null": None,
    "too long": list(range(1000, 4000)),
    "other scripts": "Καλημέρα, 世界! Привет, мир. 🙂 مرحبا",
    "control characters": "a\u0000b\u0007c\ud83d\ude42",
}
MESSAGES: dict[str, Any] = {
    "system": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who has built the bridge?"}],
    "several turns": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."},
                      {"role": "user", "content": "Three?"}],
    "developer": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Good day to you."}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "First part, "},
                                           {"type": "text", "text": "and next."}]}],
    "a picture": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}],
    "a tool's answer": [
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"n\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"}],
    "name": [{"role": "user", "name": "anna", "content": "Which road leads to the island?"}],
    "empty": [],
    "no role": [{"content": "x"}],
    "no such role": [{"role": "captain", "content": "x"}],
    "text": "x",
    "null": None,
    "content is a number": [{"role": "user", "content": 5}],
}


def long_text(name: str) -> str:
    """A text for the form of this name: more tokens than a decode engine computes itself."""
    draw = random.Random(name)
    return " ".join(draw.choice(WORDS) for _ in range(LONG_WORDS))


def _texts(name: str) -> Iterator[tuple[str, str]]:
    yield f"{name}, short", f"{name}: the capital of France is"
    yield f"{name}, long", long_text(name)


def _generating() -> Iterator[RequestForm]:
    """Each field with both kinds of prompts, as a completion and as a chat."""
    base = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    for say, fields in {**SAMPLING, **COMPLETION_ONLY}.items():
        for name, text in _texts(f"completion, {say}"):
            yield RequestForm(name, "/v1/completions", {**base, "prompt": text, **fields})
    for say, fields in {**SAMPLING, **CHAT_ONLY}.items():
        for name, text in _texts(f"chat, {say}"):
            messages = [{"role": "user", "content": text}]
            if say == "continued message":
                messages.append({"role": "assistant", "content": "It is"})
            yield RequestForm(name, "/v1/chat/completions", {**base, "messages": messages, **fields})
    for say, fields in WRONG.items():
        yield RequestForm(f"completion, {say}", "/v1/completions", {**base, "prompt": long_text(say), **fields})
        yield RequestForm(f"chat, {say}", "/v1/chat/completions",
                          {**base, "messages": [{"role": "user", "content": long_text(say + "c")}], **fields})
    for say, prompt in PROMPTS.items():
        yield RequestForm(f"completion, {say}", "/v1/completions", {**base, "prompt": prompt})
    for say, messages in MESSAGES.items():
        yield RequestForm(f"chat, {say}", "/v1/chat/completions", {**base, "messages": messages})


def _other_apis() -> Iterator[RequestForm]:
    """Responses, Anthropic's messages, and what computes no answer."""
    for stream in (False, True):
        for name, text in _texts(f"responses{', stream' * stream}"):
            yield RequestForm(name, "/v1/responses", {"model": MODEL, "input": text, "max_output_tokens": 8,
                                                      "temperature": 0, "stream": stream})
        for name, text in _texts(f"messages{', stream' * stream}"):
            yield RequestForm(name, "/v1/messages", {"model": MODEL, "max_tokens": 8, "temperature": 0,
                                                     "stream": stream,
                                                     "messages": [{"role": "user", "content": text}]})
    responses = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}
    for say, body in {"a list": {"input": [{"role": "user", "content": "Where is the garden?"}]},
                      "instructions": {"input": "Where is it?", "instructions": "Be short."},
                      "no input": {}, "no such answer before": {"input": "x", "previous_response_id": "resp_none"},
                      "input is a number": {"input": 5}}.items():
        yield RequestForm(f"responses, {say}", "/v1/responses", {**responses, **body})
    anthropic = {"model": MODEL, "max_tokens": 8, "temperature": 0,
                 "messages": [{"role": "user", "content": "A road?"}]}
    for say, body in {"system": {"system": "Be short."}, "stop_sequences": {"stop_sequences": ["a", "e"]},
                      "no max_tokens": {"max_tokens": None}, "no messages": {"messages": []},
                      "wrong model": {"model": "none"}}.items():
        yield RequestForm(f"messages, {say}", "/v1/messages", {**anthropic, **body})
    yield RequestForm("count_tokens", "/v1/messages/count_tokens", {"model": MODEL, "messages": anthropic["messages"]})
    yield RequestForm("count_tokens, no messages", "/v1/messages/count_tokens", {"model": MODEL})
    for path, body in {"/tokenize": {"prompt": "The old clock"}, "/detokenize": {"tokens": [500, 600]},
                       "/v1/completions/render": {"prompt": "The old clock"},
                       "/v1/chat/completions/render": {"messages": anthropic["messages"]}}.items():
        yield RequestForm(path, path, {"model": MODEL, **body})
    yield RequestForm("tokenize, a chat", "/tokenize", {"model": MODEL, "messages": anthropic["messages"]})
    yield RequestForm("tokenize, wrong model", "/tokenize", {"model": "none", "prompt": "x"})
    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/v1/audio/transcriptions"):
        yield RequestForm(f"{path} of a model that generates", path, {"model": MODEL, "input": "x"})


def _http() -> Iterator[RequestForm]:
    """What is HTTP's: methods, types, bodies that are none."""
    body = {"model": MODEL, "prompt": "The mountain road", "max_tokens": 4, "temperature": 0}
    for path in ("/v1/models", "/health", "/version", "/ping"):
        yield RequestForm(f"GET {path}", path, method="GET")
    yield RequestForm("GET of a completion", "/v1/completions", method="GET")
    yield RequestForm("PUT of a completion", "/v1/completions", body, method="PUT")
    yield RequestForm("no such path", "/v1/none", body)
    yield RequestForm("a query", "/v1/completions?a=1", body)
    yield RequestForm("no body", "/v1/completions")
    for say, data in {"empty": b"", "not JSON": b"{\"model\": ", "a list": b"[]", "text": b"\"x\"", "null": b"null",
                      "a number": b"5", "not UTF-8": b"{\"prompt\": \"\xff\xfe\"}", "a byte order mark":
                      b"\xef\xbb\xbf" + json.dumps(body).encode(), "a key twice":
                      json.dumps(body).encode()[:-1] + b", \"max_tokens\": 2}", "NaN":
                      json.dumps(body).encode()[:-1] + b", \"temperature\": NaN}"}.items():
        yield RequestForm(f"body: {say}", "/v1/completions", data)
    yield RequestForm("no content type", "/v1/completions", json.dumps(body).encode(), headers={"Content-Type": ""})
    yield RequestForm("a form", "/v1/completions", b"prompt=x",
                      headers={"Content-Type": "application/x-www-form-urlencoded"})
    yield RequestForm("a charset", "/v1/completions", body, headers={"Content-Type": "application/json; charset=utf-8"})
    yield RequestForm("an id of its own", "/v1/completions", body, headers={"X-Request-Id": "mine"})
    yield RequestForm("headers of OpenAI's client", "/v1/completions", body, headers={
        "Authorization": "Bearer none", "User-Agent": "OpenAI/Python 1.0", "X-Stainless-Retry-Count": "0"})


def all_forms() -> list[RequestForm]:
    """All forms, in the order in which they are sent. Their names are unique."""
    return [*_generating(), *_other_apis(), *_http()]
