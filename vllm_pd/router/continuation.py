# SPDX-License-Identifier: Apache-2.0
"""Goes on with a broken stream at another engine: which requests can, what is kept of a stream, how the rest is joined
to it. Pure.

`ContinuableStream.of` reads a request, and adds `return_token_ids` to it. `receive` takes what an engine sends and
returns what the client gets: whole events, without the token ids that it has not asked for. Events whose tokens have
brought no text yet (the first bytes of a character, special tokens) are held until text comes, so that what is out ends
with a whole character. When the stream breaks, they are dropped, and

- `end` returns what is missing, if that needs no engine: the end was out already, or all tokens are;
- `next_request` returns the request for the next engine. Where no token is out that is the client's own one, else a
  completion whose prompt is the prompt's token ids and those that are out, for the tokens that are left. Before that,
  `detokenize_request` has the next engine say the text of the last tokens that are out, and `is_out` compares. It is
  another one where an event of several tokens ends within a character, where an engine's parser has kept text back, and
  where the engines have different tokenizers. Then the stream ends.

A field of a request, or an event, that is not known here makes the stream one that is passed on and not continued.
"""
import re
from array import array
from collections import deque
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_pd.router.outline import all_fields
from vllm_pd.router.routes import CHAT, COMPLETIONS

MAX_CONTINUATIONS = 2  # of one stream
MAX_BODY_BYTES = 1 << 20  # of a request; most of its fields are only skimmed
MAX_EVENT_BYTES = 1 << 20  # the ids of MAX_TOKENS are shorter
MAX_TOKENS = 1 << 17  # of the prompt and the answer, 4 bytes each
MAX_HELD = 256  # events without text in a row
COMPARED = 12  # events, whose text the next engine is asked for
DEFAULT_MAX_TOKENS = 16  # of a completion
_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"

# Fields of a request that the continuation has, too, as the client wrote them.
_COPIED = frozenset((
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "priority", "cache_salt",
    "session_id", "user", "stream_interval", "seed", "stream_options"))
# It has others, or what they do is in the prompt's token ids.
_READ = frozenset((
    "stream", "max_tokens", "max_completion_tokens", "min_tokens", "return_token_ids", "request_id", "prompt",
    "messages", "add_special_tokens", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "documents", "length_penalty", "parallel_tool_calls"))
# Others would count or match only the tokens after the break, make several answers or more of one than its text, or are
# not known here. With these values, or null, they change nothing.
_WITHOUT_EFFECT = {
    "n": (b"1", ), "best_of": (b"1", ), "use_beam_search": (b"false", ), "echo": (b"false", ),
    "presence_penalty": (b"0", b"0.0"), "frequency_penalty": (b"0", b"0.0"), "stop": (b"[]", ), "bad_words": (b"[]", ),
    "top_logprobs": (b"0", ), "tool_choice": (b'"none"', ), "include_reasoning": (b"true", ),
    "spaces_between_special_tokens": (b"true", )}
_NULL, _TRUE = b"null", b"true"
_GREEDY = (b"0", b"0.0")

_Count = Annotated[int, Meta(ge=0)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _TextMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[_TextPart]
    name: str | None = None


class _ReadFields(msgspec.Struct):
    """The fields of a request that are read here."""
    model: str
    stream: bool
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: _Count | None = None
    prompt: msgspec.Raw = msgspec.Raw(_NULL)
    messages: list[_TextMessage] | None = None


_read_fields = msgspec.json.Decoder(_ReadFields)


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[_TokenId] | None = None


class _StreamUsage(msgspec.Struct):
    completion_tokens: _Count


class _StreamEvent(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    usage: _StreamUsage | None = None
    prompt_token_ids: list[_TokenId] | None = None


class _StreamFailure(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _FailureEvent(msgspec.Struct):
    error: _StreamFailure


class _Detokenized(msgspec.Struct):
    prompt: str


_events, _failures = msgspec.json.Decoder(_StreamEvent), msgspec.json.Decoder(_FailureEvent)
_detokenized = msgspec.json.Decoder(_Detokenized)
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_IDS = re.compile(rb'("(?:prompt_)?token_ids": ?)\[[\d, ]*\]')  # in a string the quotes would be escaped


class ContinuableStream:
    """See the module. `body` is the client's request as the first engine gets it. `model_len` is the longest prompt and
    answer of the engine that has it, in tokens, None where unknown. `error` is set where the engine has sent an error
    in place of the rest, or what can't be read in a continuation: the stream then counts as broken. Belongs to one
    request; nothing else may change what `receive` returns."""

    def __init__(self, path: str, body: bytes, read: _ReadFields, fields: dict[str, bytes]) -> None:
        self.body = body
        self.model_len: int | None = None
        self.error: str | None = None
        self._path = path
        self._asked_ids = fields.get("return_token_ids") == _TRUE
        if not self._asked_ids:
            self.body = body.rstrip()[:-1] + b',"return_token_ids":true}'
        self._most = read.max_tokens
        if path == CHAT and read.max_completion_tokens is not None:
            self._most = read.max_completion_tokens
        elif path == COMPLETIONS and self._most is None:
            self._most = DEFAULT_MAX_TOKENS
        self._least = read.min_tokens or 0
        self._options = read.stream_options or _StreamOptions()
        self._copied = {name: msgspec.Raw(value) for name, value in fields.items() if name in _COPIED}
        self._continuations = 0
        self._base: int | None = None  # tokens before the present engine's, if they are in its prompt
        self._buffer = bytearray()  # an event without its end
        self._usable = True  # all that came could be read
        self._passes = False  # what comes is not even split into events any more
        self._head: dict[str, Any] = {}  # of each event: id, object, created, model
        self._prompt: array | None = None
        self._out = array("I")  # the ids of the tokens that are out
        self._held: list[tuple[bytes, list[int]]] = []  # events, and their token ids
        self._tail: deque[tuple[list[int], str]] = deque(maxlen=COMPARED)  # the last ids that are out, and their text
        self._role_out = self._finished = self._usage_out = self._done = False

    @classmethod
    def of(cls, path: str, body: bytes) -> "ContinuableStream | None":
        """The stream that answers this request; None where it could not be continued."""
        if len(body) > MAX_BODY_BYTES or path not in (COMPLETIONS, CHAT):
            return None
        try:
            fields = {name: bytes(value) for name, value in all_fields(body).items()}
            read = _read_fields.decode(body)
        except _UNREADABLE:
            return None
        for name, value in fields.items():
            if value != _NULL and name not in _COPIED and name not in _READ and value not in _WITHOUT_EFFECT.get(
                    name, (b"false", ) if name == "logprobs" and path == CHAT else ()):
                return None
        one_text = _is_one_prompt(bytes(read.prompt)) if path == COMPLETIONS else bool(read.messages)
        both = bytes(read.prompt) != _NULL and read.messages is not None
        random = fields.get("seed", _NULL) != _NULL and fields.get("temperature") not in _GREEDY
        asks = fields.get("return_token_ids", _TRUE) == _TRUE
        return cls(path, body, read, fields) if read.stream and one_text and asks and not both and not random else None

    def receive(self, data: bytes) -> bytes:
        """The bytes for the client, perhaps none, of what the engine has sent."""
        if self._passes:
            return data
        searched = max(0, len(self._buffer) - 1)
        self._buffer += data
        ended = self._buffer.find(_END, searched) >= 0
        if b"\r" in data or not ended and len(self._buffer) > MAX_EVENT_BYTES:
            rest, self._buffer = bytes(self._buffer), bytearray()
            self._passes = not self._continuations
            return self._unreadable(rest)
        if not ended:
            return b""
        *events, rest = bytes(self._buffer).split(_END)
        self._buffer = bytearray(rest)
        out = []
        for event in events:
            if self.error is None:
                out.append(self._event(event))
        return b"".join(out)

    def rest(self) -> bytes:
        """The bytes for the client at the end of a complete answer."""
        rest, self._buffer = bytes(self._buffer), bytearray()
        return self._unreadable(rest) if rest else self._release()

    @property
    def can_go_on(self) -> bool:
        """Whether another engine can go on from here."""
        if not self._usable or self._finished or self._continuations >= MAX_CONTINUATIONS:
            return False
        return not self._out or self._prompt is not None and self._limit is not None

    def end(self) -> bytes | None:
        """After a break: what the client still has to get, where no engine is needed for it; else None."""
        if self._done:
            return b""
        used_up = self._limit is not None and len(self._out) >= self._limit
        wants_usage = self._options.include_usage and not self._usage_out
        if not self._usable or not (self._finished or used_up) or wants_usage and self._prompt is None:
            return None
        events = []
        if not self._finished:
            event = {**self._head, "choices": [self._choice("", "length", None, None)]}
            if self._options.include_usage and self._options.continuous_usage_stats:
                event["usage"] = self._usage(len(self._out))
            events.append(_written(event))
        if wants_usage:
            events.append(_written({**self._head, "choices": [], "usage": self._usage(len(self._out))}))
        return b"".join(events) + _DONE

    def next_request(self) -> tuple[str, bytes]:
        """After a break, where the stream `can_go_on`: path and body of the request for the next engine, whose answer
        `receive` gets from now on."""
        self._continuations += 1
        self._buffer.clear()
        self._held.clear()
        self.error = None
        if not self._out:
            return self._path, self.body
        self._base = len(self._out)
        body = {**self._copied, "prompt": [*self._prompt, *self._out], "stream": True, "return_token_ids": True,
                "max_tokens": self._limit - self._base}
        if self._least > self._base:
            body["min_tokens"] = self._least - self._base
        return COMPLETIONS, msgspec.json.encode(body)

    def detokenize_request(self) -> bytes | None:
        """The body of the request for the text of the last tokens that are out; None where no token is."""
        tokens = [token for ids, _ in self._tail for token in ids]
        return msgspec.json.encode({"model": self._copied["model"], "tokens": tokens}) if tokens else None

    def is_out(self, answer: bytes) -> bool:
        """Whether the answer to `detokenize_request` ends with the text that is out. It may begin with more: special
        tokens, for which there is no text; and less, as some tokenizers say no space at the beginning."""
        try:
            text = _detokenized.decode(answer).prompt
        except _UNREADABLE:
            return False
        return text.endswith("".join(said for _, said in self._tail).lstrip()) and not text.endswith("\ufffd")

    @property
    def _limit(self) -> int | None:
        """The most tokens of the answer; None where unknown."""
        if self._most is not None or self.model_len is None or self._prompt is None:
            return self._most
        return max(0, self.model_len - len(self._prompt))

    def _event(self, event: bytes) -> bytes:
        """The bytes for the client, perhaps none, of one event, which comes without its end. Where the stream can't be
        continued it is passed on unread, but in a continuation it has to be read, to be joined to the rest."""
        if not event or event.startswith(b":"):  # a comment
            return event + _END
        if not self._usable and not self._continuations:
            return self._without_ids(event) + _END
        if event == _DONE[:-2]:
            self._done = True
            return self._release() + _DONE
        try:
            if not event.startswith(b"data: "):
                raise ValueError
            return self._read(event, _events.decode(memoryview(event)[6:]))
        except _UNREADABLE:
            return self._failure(event)

    def _read(self, event: bytes, read: _StreamEvent) -> bytes:
        """The bytes for the client of an event that could be decoded. An event with text, or with the end of the
        answer, goes out with those that were held before it; one without is held. Notes what a continuation needs: the
        ids of the prompt and of all tokens that are out, and the text of the last of them."""
        if not self._head:
            self._head = {"id": read.id, "object": read.object, "created": read.created, "model": read.model}
        if not read.choices:
            self._usage_out = read.usage is not None
            self._usable = self._usable and not self._held
            return self._release() + self._for_client(event)
        choice = read.choices[0]
        in_deltas = self._path == CHAT and self._base is None
        text = choice.text
        if in_deltas and choice.delta is not None:
            text = choice.delta.content or ""
        ids = choice.token_ids or []
        prompt = choice.prompt_token_ids if read.prompt_token_ids is None else read.prompt_token_ids
        if self._prompt is None and prompt is not None:
            self._prompt = array("I", prompt)
        if len(read.choices) > 1 or choice.index or self._finished:
            return self._unreadable(event + _END)
        if in_deltas and choice.delta is not None and choice.delta.role is not None and not text and not ids:
            again, self._role_out = self._role_out, True
            return b"" if again else self._for_client(event)
        if text is None or text and not ids:
            return self._unreadable(event + _END)
        if not text and choice.finish_reason is None and len(self._held) < MAX_HELD:
            by_parser = in_deltas and choice.delta.content is None  # where nobody asks for ids it sends no such event
            self._held.append((b"" if by_parser and not self._asked_ids else self._for_client(event), ids))
            return b""
        if self._held:
            self._tail.clear()
        self._tail.append(([token for _, held in self._held for token in held] + ids, text))
        before = self._release()
        self._out.extend(ids)
        self._finished = choice.finish_reason is not None
        if len(self._out) + len(self._prompt or ()) > MAX_TOKENS:
            self._usable = False
        return before + self._for_client(event)

    def _failure(self, event: bytes) -> bytes:
        """An event that is no part of an answer: the engine's error, or unreadable."""
        try:
            failure = _failures.decode(memoryview(event)[6:]).error
        except _UNREADABLE:
            return self._unreadable(event + _END)
        if not self._continuations and (not self.can_go_on or 400 <= (failure.code or 0) < 500):
            return self._unreadable(event + _END)
        self.error = failure.message[:200] or "an error without a message"
        return b""

    def _unreadable(self, data: bytes) -> bytes:
        """Bytes that are not understood. The first engine's are passed on, as without this module."""
        self._usable = False
        if self._continuations:
            self.error = "an engine that went on with the answer sent what can't be read"
            return b""
        return self._release() + self._without_ids(data)

    def _release(self) -> bytes:
        """The events that were held. They are out now."""
        held, self._held = self._held, []
        for _, ids in held:
            self._out.extend(ids)
        return b"".join(event for event, _ in held)

    def _for_client(self, event: bytes) -> bytes:
        """An engine's event as the client gets it."""
        if not self._continuations:
            return self._without_ids(event) + _END
        value = msgspec.json.decode(memoryview(event)[6:])
        value |= self._head
        if self._base is not None:
            value.pop("metrics", None)
            if value.get("usage"):
                value["usage"] = self._usage(self._base + value["usage"]["completion_tokens"])
            value["choices"] = [self._choice(one["text"], one.get("finish_reason"), one.get("stop_reason"),
                                             one.get("token_ids")) for one in value["choices"]]
        return self._without_ids(_written(value))

    def _choice(self, text: str, finish_reason: str | None, stop_reason: Any, ids: list[int] | None) -> dict[str, Any]:
        """A choice of an event, as vLLM writes it for this path."""
        end = {"finish_reason": finish_reason} | ({"stop_reason": stop_reason}
                                                  if self._path == COMPLETIONS or finish_reason is not None else {})
        ids = ids if self._asked_ids else None
        if self._path == CHAT:
            return {"index": 0, "delta": {"content": text}, "logprobs": None, **end, "token_ids": ids}
        return {"index": 0, "text": text, "logprobs": None, **end, "prompt_token_ids": None, "token_ids": ids}

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = len(self._prompt)
        return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}

    def _without_ids(self, data: bytes) -> bytes:
        return data if self._asked_ids else _IDS.sub(rb"\1null", data)


def _is_one_prompt(prompt: bytes) -> bool:
    """Whether this value of `prompt` is one text or one list of token ids."""
    return prompt[:1] == b'"' or prompt[:1] == b"[" and prompt[1:].lstrip()[:1].isdigit()


def _written(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + _END
