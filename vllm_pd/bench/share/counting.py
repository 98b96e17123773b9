# SPDX-License-Identifier: Apache-2.0
"""Turns the requests of a trace into tokens: with a model's tokenizer, or without one into words or bytes."""
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from vllm_pd.bench.share.requests import TraceRequest
from vllm_pd.errors import ConfigError
from vllm_pd.protocol.hashes import pack_tokens
from vllm_pd.router.tokenizer import Prompt, Tokenizer, flattened

TOKEN_MASK = 0xFFFFFFFF
_WORD = re.compile(r"\s*\S+")
Count = Callable[[Prompt], Sequence[int] | None]


class CountedRequest(NamedTuple):
    """A request as packed tokens: those of its prompt, and those of prompt and answer, whose keys and values an engine
    has computed when the answer ends. That is all but the answer's last."""
    prompt: bytes
    computed: bytes


def tokenizer_count(name: str) -> Count:
    """Counts with the tokenizer of a model, its folder or name. Raises ConfigError where there is none."""
    try:
        return Tokenizer(name).tokens
    except Exception as error:
        raise ConfigError("--tokenizer", name, f"{error}: give the folder of a model with its tokenizer, or --unit "
                                               "words for none") from None


def unit_count(unit: str) -> Count:
    """Counts without a tokenizer: `words`, each with the white space before it, or `bytes` of UTF-8. A word's number is
    a hash of 32 bits, so that no list of words is kept. Two different words are taken for the same one with a chance of
    1 in 2^32."""
    split = _words if unit == "words" else lambda text: list(text.encode(errors="replace"))

    def count(prompt: Prompt) -> Sequence[int] | None:
        text = _text(prompt)
        return None if text is None else split(text)
    return count


def counted(request: TraceRequest, count: Count) -> CountedRequest | None:
    """The request's tokens; None where `count` has none for its prompt. Raises ConfigError for token ids that are none,
    and whatever `count` raises."""
    prompt = request.prompt
    if isinstance(prompt.prompt, list):
        packed = pack_tokens(prompt.prompt)
        return CountedRequest(packed, packed + pack_tokens((request.answer or [])[:-1]))
    tokens = count(prompt)
    if tokens is None:
        return None
    packed = pack_tokens(tokens)
    if request.answer is None:
        return CountedRequest(packed, packed)
    if prompt.messages is None:
        whole = msgspec.structs.replace(prompt, prompt=prompt.prompt + request.answer)
    else:
        answered = [*prompt.messages, {"role": "assistant", "content": request.answer}]
        whole = msgspec.structs.replace(prompt, messages=answered, add_generation_prompt=False)
    computed = pack_tokens((count(whole) or [])[:-1])
    return CountedRequest(packed, computed if computed.startswith(packed) else packed)


def _words(text: str) -> list[int]:
    return [xxh3_64_intdigest(word.encode(errors="replace")) & TOKEN_MASK for word in _WORD.findall(text.rstrip())]


def _text(prompt: Prompt) -> str | None:
    """The prompt's text; of a chat, the tools and then each message after its role. None where a part is no text."""
    if prompt.messages is None:
        return prompt.prompt
    parts = [msgspec.json.encode(prompt.tools).decode() + "\n"] if prompt.tools else []
    for message in map(flattened, prompt.messages):
        if message is None:
            return None
        calls = msgspec.json.encode(message["tool_calls"]).decode() if message.get("tool_calls") else ""
        parts.append(f"{message['role']}: {message['content']}{calls}\n")
    return "".join(parts)
