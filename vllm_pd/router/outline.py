# SPDX-License-Identifier: Apache-2.0
"""What the router reads of a request's body, in a time that no body can make long.

JSON is only scanned at first: each field stays as it was written. That takes at most 6 ms a MiB. To decode a field can
take 300 ms a MiB, and twenty times its memory (lists in lists). In a thread it would stop the event loop all the same,
because the decoder keeps the interpreter's lock. So a name is decoded only if it is short, and a prompt only where it
is tokenised, within the bounds below.

Of a body over MAX_SCANNED_BYTES only the two ends are read: clients write the names before or after the prompt. A name
is found there with certainty: with the key as its first field, the end of the body is a JSON object only if the key
belongs to the body itself and not to an object within it. The same holds for the beginning and its last field.
"""
import functools
import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from vllm_pd.router.tokenizer import Prompt

MAX_SCANNED_BYTES = 2 << 20
END_BYTES = 1 << 16  # of a longer body, from its beginning and before its end
MAX_KEYS_TRIED = 8  # at each of them
MAX_NAME_BYTES = 4096  # of a model, user or session
BEGIN_BYTES = 256  # of the prompt
MAX_REST_BYTES = 1 << 18  # of all fields that are not long ones: for each field a dict takes 0.5 us
MAX_CONTAINERS = 1 << 15  # lists and objects, of which each takes 0.6 us; a chat has some for each message
PIECE_BYTES = 1 << 18  # of token ids that are decoded at once

_NULL = Raw(b"null")
_EMPTY = (b"null", b"false", b"0", b'""', b"[]", b"{}")
_NESTED = ("messages", "tools", "chat_template_kwargs", "tool_choice")
_SCALARS = ("add_special_tokens", "add_generation_prompt", "continue_final_message", "truncate_prompt_tokens")
_KEY = rb'[{,]\s*"(?:model|user|session_id)"\s*:'
_key_at_end, _key_at_begin = re.compile(_KEY), re.compile(_KEY + rb'\s*"(?:[^"\\]|\\.){0,1024}"')
_form_model = re.compile(rb'name="model"\r\n\r\n([^\r\n]{1,1024})\r\n')


class _Names(msgspec.Struct):
    model: Raw = _NULL
    user: Raw = _NULL
    session_id: Raw = _NULL


class _Fields(_Names):
    """The fields of `Prompt`."""
    prompt: Raw = _NULL
    messages: Raw = _NULL
    cache_salt: Raw = _NULL
    add_special_tokens: Raw = _NULL
    add_generation_prompt: Raw = Raw(b"true")
    continue_final_message: Raw = Raw(b"false")
    chat_template: Raw = _NULL
    chat_template_kwargs: Raw = _NULL
    tools: Raw = _NULL
    tool_choice: Raw = _NULL
    documents: Raw = _NULL
    mm_processor_kwargs: Raw = _NULL
    truncate_prompt_tokens: Raw = _NULL


_names, _fields = msgspec.json.Decoder(_Names), msgspec.json.Decoder(_Fields)
_all_fields = msgspec.json.Decoder(dict[str, Raw])
_text, _texts = msgspec.json.Decoder(str), msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, lt=1 << 31)]])
# A function in Python, at which another thread gets the interpreter's lock: some floats take 9 us each.
_any = msgspec.json.Decoder(float_hook=lambda text: float(text))
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Outline:
    """What was read of one body. `model`, `user` and `session_id` are None where they are no text, or a long one.
    `begin`: the first bytes of the prompt as they were written; of a body that was not scanned, of the body."""

    def __init__(self, names: _Names, begin: bytes, fields: _Fields | None = None) -> None:
        self.model, self.user, self.session_id = map(_name, (names.model, names.user, names.session_id))
        self.begin = begin
        self._fields = fields

    @property
    def is_scanned(self) -> bool:
        """Whether the prompt is known. Only then the rest may be asked for."""
        return self._fields is not None

    @property
    def depends_on_more(self) -> bool:
        """Whether its tokens, or their blocks, depend on more than the text or ids and the model's own template."""
        fields = self._fields
        return (fields.cache_salt != _NULL or fields.chat_template != _NULL
                or bytes(fields.documents) not in _EMPTY or bytes(fields.mm_processor_kwargs) not in _EMPTY)

    @property
    def has_ids(self) -> bool:
        """Whether the first prompt is a list of token ids, judged by its first element."""
        return self._opening.lstrip(b"[")[:1].isdigit() and self._opening[:1] == b"["

    @property
    def has_text(self) -> bool:
        """Whether there are messages, or a prompt that may be text."""
        messages = bytes(self._fields.messages)
        if messages[:1] == b"[":
            return messages[1:].lstrip()[:1] != b"]"
        return bytes(self._fields.prompt) not in _EMPTY

    @property
    def _opening(self) -> bytes:
        """The first bytes of the prompt without whitespace."""
        return b"".join(bytes(memoryview(self._fields.prompt)[:BEGIN_BYTES]).split())

    def ids(self) -> list[int]:
        """The token ids of the first prompt, which `has_ids`. Raises MsgspecError where an element is none. Takes 10 ms
        a MiB, and lets other threads run meanwhile."""
        raw = bytes(self._fields.prompt)
        start, end = re.compile(rb"[\[\s]*").match(raw).end(), raw.index(b"]")
        found: list[int] = []
        while start < end:
            comma = raw.find(b",", min(start + PIECE_BYTES, end), end)
            piece_end = end if comma < 0 else comma
            found += _ids.decode(b"[" + raw[start:piece_end] + b"]")
            start = piece_end + 1
        return found

    @functools.cached_property
    def prompt(self) -> Prompt:
        """All that a tokenizer needs of a prompt without token ids. Raises MsgspecError, and ValueError where there are
        too many lists and objects. Takes at most 50 ms a MiB."""
        fields = self._fields
        nested = [bytes(getattr(fields, name)) for name in _NESTED]
        if sum(raw.count(b"[") + raw.count(b"{") for raw in nested) > MAX_CONTAINERS:
            raise ValueError("too many lists and objects")
        return Prompt(prompt=_prompt_text(bytes(fields.prompt)),
                      **dict(zip(_NESTED, map(_any.decode, nested), strict=True)),
                      **{name: _scalar(getattr(fields, name)) for name in _SCALARS})


def parse(body: bytes) -> Outline | None:
    """The outline of a request's body. None for a body that is neither a JSON object nor a form; the worker will answer
    with an error."""
    try:
        if body.startswith(b"--"):  # a form, as of audio; its text fields come before or after the file
            return Outline(_Names(_model_of_form(body)), body[:BEGIN_BYTES])
        if len(body) > MAX_SCANNED_BYTES:
            return Outline(_names_at_ends(body), body[:BEGIN_BYTES])
        fields = _fields.decode(body)
        asked = fields.prompt if fields.messages == _NULL else fields.messages
        return Outline(fields, bytes(memoryview(asked)[:BEGIN_BYTES]), fields)
    except UNREADABLE:
        return None


def all_fields(body: bytes) -> dict[str, Raw]:
    """All fields of a JSON object, each as it was written. Raises MsgspecError, RecursionError, and ValueError where
    those that are not usually long have more than MAX_REST_BYTES. Scans the body once or twice."""
    if len(body) > MAX_REST_BYTES:
        long = _fields.decode(body)
        known = sum(memoryview(raw).nbytes for raw in (long.prompt, long.messages, long.tools, long.documents))
        if len(body) - known > MAX_REST_BYTES:
            raise ValueError("too many fields")
    return _all_fields.decode(body)


def _name(raw: Raw) -> str | None:
    value = memoryview(raw)
    if value.nbytes > MAX_NAME_BYTES or value[:1] != b'"':
        return None
    return _text.decode(raw)


def _scalar(raw: Raw) -> Any:
    """A value that should be a number, a boolean or null; as text where it is none of these."""
    value = bytes(memoryview(raw)[:64])
    return value.decode(errors="replace") if value[:1] in (b'"', b"[", b"{") else _any.decode(raw)


def _prompt_text(raw: bytes) -> Any:
    """The text, or texts, of this value of `prompt`; None where it is neither."""
    return _text.decode(raw) if raw[:1] == b'"' else _texts.decode(raw) if raw[:1] == b"[" else None


def _model_of_form(body: bytes) -> Raw:
    found = _form_model.search(body[:END_BYTES]) or _form_model.search(body[-END_BYTES:])
    return _NULL if found is None else Raw(msgspec.json.encode(found[1].decode()))


def _names_at_ends(body: bytes) -> _Names:
    """The names at the ends of a long body. Of a field that comes twice, engines use the last one."""
    first, last = body[:END_BYTES], body[-END_BYTES:]
    keys = [found.start() for found in _key_at_end.finditer(last)][-MAX_KEYS_TRIED:]
    at_end = _first_object(b"{" + last[start + 1:] for start in keys)
    ends = [found.end() for _, found in zip(range(MAX_KEYS_TRIED), _key_at_begin.finditer(first), strict=False)]
    at_begin = _first_object(first[:end] + b"}" for end in reversed(ends))
    return _Names(*(getattr(at_begin if getattr(at_end, name) == _NULL else at_end, name)
                    for name in _Names.__struct_fields__))


def _first_object(candidates: Iterable[bytes]) -> _Names:
    """The names in the first of these that is a JSON object."""
    for one in candidates:
        try:
            return _names.decode(one)
        except UNREADABLE:
            continue
    return _Names()
