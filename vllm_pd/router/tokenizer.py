# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer with its chat template, as its engines use them: from a request to the ids of its prompt."""
import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_pd.router.token_cache import PartialTokens, TokenCache, guess, parts_between_words, place_to_cut, sample


class Prompt(msgspec.Struct):
    """The parts of a request's body that decide where it goes. Everything else is left alone."""
    model: Any = None
    prompt: Any = None
    messages: Any = None
    user: Any = None
    session_id: Any = None
    cache_salt: Any = None
    add_special_tokens: Any = None
    add_generation_prompt: Any = True
    continue_final_message: Any = False
    chat_template: Any = None
    chat_template_kwargs: Any = None
    tools: Any = None
    tool_choice: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    truncate_prompt_tokens: Any = None


def encode(backend: Any, texts: list[str], special: bool = False) -> list[list[int]]:
    """The ids of each text by the library's fast code, in two thirds of the time that its own wrapper takes: no
    offsets, no dictionary around them. `special`: with those that stand before and after a text."""
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]


class Tokenizer:
    """One model's, with its chat template. Safe to use from several threads."""

    def __init__(self, name: str) -> None:
        """Loads it. Raises whatever the library raises."""
        from transformers import AutoTokenizer
        self._tokenizer = AutoTokenizer.from_pretrained(name)
        self._backend = self._tokenizer.backend_tokenizer if self._tokenizer.is_fast else None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            plain, special = (encode(self._backend, ["a"], special)[0] for special in (False, True))
            self._ends_specially = special[len(special) - len(plain):] != plain
            self._parts = parts_between_words(functools.partial(encode, self._backend))
        self._pieces = None if self._backend is None else TokenCache(
            self._backend.get_added_tokens_decoder().values(), functools.partial(encode, self._backend))

    @property
    def quick(self) -> bool:
        """Whether the library's fast code does it, so that a short prompt may be done while others wait."""
        return self._backend is not None

    def tokens(self, prompt: Prompt) -> Sequence[int] | None:
        """The ids of the first prompt, None where there is no text in it. Raises whatever the library raises."""
        text, special = self._text(prompt)
        return None if text is None else self._cut(self._ids(text, special), prompt)

    def beginning(self, prompt: Prompt, chars: int) -> PartialTokens | None:
        """What is known of that prompt's ids, and those of about `chars` more of its text. None where that is not much
        less than all, or not to be had. Only of one that is `quick`. Raises whatever the library raises."""
        if not self._parts or prompt.truncate_prompt_tokens is not None or len(_newest(prompt)) < chars:
            return None
        text, special = self._text(prompt)
        if text is None:
            return None
        if not special:
            return self._pieces.beginning(text, chars)
        end = None if self._ends_specially else place_to_cut(text, chars)
        if end is None:
            return None
        [ids] = encode(self._backend, [text[:end]], True)
        later = sample(text, end)
        return PartialTokens(ids, len(ids) + guess(later, encode(self._backend, [later])[0], len(text) - end))

    def _text(self, prompt: Prompt) -> tuple[str | None, bool]:
        """(the text, None where there is none in it, whether special tokens go before and after it)."""
        if prompt.messages is not None:
            return self._rendered(prompt), bool(prompt.add_special_tokens)
        text = prompt.prompt[0] if isinstance(prompt.prompt, list) and prompt.prompt else prompt.prompt
        special = True if prompt.add_special_tokens is None else bool(prompt.add_special_tokens)
        return text if isinstance(text, str) else None, special

    def _rendered(self, prompt: Prompt) -> str | None:
        messages = [_flattened(message) for message in prompt.messages]
        if any(message is None for message in messages):
            return None
        tools = prompt.tools if prompt.tools and prompt.tool_choice != "none" else None
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=None, tokenize=False,
            add_generation_prompt=bool(prompt.add_generation_prompt) and not prompt.continue_final_message,
            continue_final_message=bool(prompt.continue_final_message), **(prompt.chat_template_kwargs or {}))

    def _ids(self, text: str, special: bool) -> Sequence[int]:
        if self._pieces is not None:
            return encode(self._backend, [text], True)[0] if special else self._pieces.ids(text)
        return self._tokenizer(text, add_special_tokens=special, return_attention_mask=False, verbose=False).input_ids

    @staticmethod
    def _cut(ids: Sequence[int], prompt: Prompt) -> Sequence[int] | None:
        """vLLM keeps the end of a prompt that it truncates; how much is left where it is told -1, only it knows."""
        if prompt.truncate_prompt_tokens is None:
            return ids
        return ids[-prompt.truncate_prompt_tokens:] if prompt.truncate_prompt_tokens > 0 else None


def _newest(prompt: Prompt) -> str:
    """What most likely has not been there before: the last message, or all."""
    last = prompt.prompt if prompt.messages is None else (_flattened(prompt.messages[-1]) or {}).get("content")
    return last if isinstance(last, str) else ""


def _flattened(message: Any) -> dict[str, Any] | None:
    """As vLLM gives it to templates that want strings: text parts joined, the arguments of tool calls as objects. None
    where a part is no text."""
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            return None
        content = "\n".join(part["text"] for part in content)
    message = {**message, "content": content}
    if message.get("role") == "assistant" and isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [{**call, "function": {**call["function"], "arguments": msgspec.json.decode(
            call["function"]["arguments"])}} for call in message["tool_calls"]]
    return message


