# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer and chat template, used as its engines use them: turns a request into its prompt's token ids."""
import functools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import msgspec

from vllm_pd.router.token_cache import PartialTokens, TokenCache, can_cut_between_words, estimated, place_to_cut

# The environment in which a process that loads tokenizers should run; transformers reads it when it is imported.
LIBRARY = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0"}  # half a gigabyte that no tokenizer needs


class Prompt(msgspec.Struct):
    """The fields of a request's body that the router reads. All other fields are ignored."""
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
    """The ids of each text. `backend` is a `tokenizers.Tokenizer`. `special`: with the special tokens before and after
    a text. Takes two thirds of the time of transformers' wrapper, which also computes offsets."""
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]


class Tokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, name: str) -> None:
        """Load the model `name`, a folder or a name on the hub: by transformers, as the engines do, where that is
        installed. Raises whatever transformers or `FileTokenizer` raise."""
        if find_spec("transformers") is not None:
            from transformers import AutoTokenizer
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        else:
            from vllm_pd.router.tokenizer_files import FileTokenizer
            self._tokenizer = FileTokenizer(name)
        self._backend = self._tokenizer.backend_tokenizer if self._tokenizer.is_fast else None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            plain, special = (encode(self._backend, ["a"], special)[0] for special in (False, True))
            self._adds_special_end = special[len(special) - len(plain):] != plain
            self._cuts_between_words = can_cut_between_words(functools.partial(encode, self._backend))
        self.cache = None if self._backend is None else TokenCache(
            self._backend.get_added_tokens_decoder().values(), functools.partial(encode, self._backend))

    @property
    def is_fast(self) -> bool:
        """Whether this is one of the library's fast tokenizers. The event loop itself may use such a one for short
        prompts."""
        return self._backend is not None

    def tokens(self, prompt: Prompt) -> Sequence[int] | None:
        """The ids of the request's first prompt, None where it is no text. Raises whatever the library raises."""
        text, special = self._text(prompt)
        return None if text is None else self._truncated(self._ids(text, special), prompt)

    def partial(self, prompt: Prompt, chars: int) -> PartialTokens | None:
        """The cached ids at the start of the prompt, and those of about `chars` of the text behind them. None where
        that would be most of the prompt, or can't be done. Only for a tokenizer that `is_fast`. Raises whatever the
        library raises."""
        if not self._cuts_between_words or prompt.truncate_prompt_tokens is not None or len(_last_text(prompt)) < chars:
            return None
        text, special = self._text(prompt)
        if text is None:
            return None
        if not special:
            return self.cache.partial(text, chars)
        end = None if self._adds_special_end else place_to_cut(text, chars)
        if end is None:
            return None
        [ids] = encode(self._backend, [text[:end]], True)
        return estimated(ids, text, end, functools.partial(encode, self._backend))

    def _text(self, prompt: Prompt) -> tuple[str | None, bool]:
        """(the text of the first prompt or None where it is no text, whether special tokens go before and after it)."""
        if prompt.messages is not None:
            return self._rendered(prompt), bool(prompt.add_special_tokens)
        text = prompt.prompt[0] if isinstance(prompt.prompt, list) and prompt.prompt else prompt.prompt
        special = True if prompt.add_special_tokens is None else bool(prompt.add_special_tokens)
        return text if isinstance(text, str) else None, special

    def _rendered(self, prompt: Prompt) -> str | None:
        messages = [flattened(message) for message in prompt.messages]
        if any(message is None for message in messages):
            return None
        tools = prompt.tools if prompt.tools and prompt.tool_choice != "none" else None
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=None, tokenize=False,
            add_generation_prompt=bool(prompt.add_generation_prompt) and not prompt.continue_final_message,
            continue_final_message=bool(prompt.continue_final_message), **(prompt.chat_template_kwargs or {}))

    def _ids(self, text: str, special: bool) -> Sequence[int]:
        if self.cache is not None:
            return encode(self._backend, [text], True)[0] if special else self.cache.ids(text)
        return self._tokenizer(text, add_special_tokens=special, return_attention_mask=False, verbose=False).input_ids

    @staticmethod
    def _truncated(ids: Sequence[int], prompt: Prompt) -> Sequence[int] | None:
        """vLLM truncates a prompt at its start. With -1 it chooses the length itself, so None is returned."""
        if prompt.truncate_prompt_tokens is None:
            return ids
        return ids[-prompt.truncate_prompt_tokens:] if prompt.truncate_prompt_tokens > 0 else None


def _last_text(prompt: Prompt) -> str:
    """The text that is most likely new: a chat's last message, else the whole prompt."""
    last = prompt.prompt if prompt.messages is None else (flattened(prompt.messages[-1]) or {}).get("content")
    return last if isinstance(last, str) else ""


def flattened(message: Any) -> dict[str, Any] | None:
    """The message as vLLM gives it to chat templates: its text parts joined into one string, the arguments of its tool
    calls as objects. None where a part is no text."""
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
