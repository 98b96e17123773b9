# SPDX-License-Identifier: Apache-2.0
"""Which tokens a prompt will have at the engines, found out beside the event loop, or in it where that is sooner.

Threads do it: the tokenizer's own code runs without the interpreter's lock, and one prompt after the other in the same
thread takes less time than each between other work. The queue before them is bounded, and so is the wait; a prompt that
is not ready in time, or that this can't tokenise, goes without. But the way to a thread and back is long for a short
prompt, so where little comes the loop does those itself, for no more of its time than `LOOP_REST` leaves.
Nothing here changes a request.
"""
import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

import msgspec

from vllm_pd.router.options import NO_TOKENIZER, RouterOptions
from vllm_pd.router.pieces import Pieces

logger = logging.getLogger("vllm_pd.router")

MAX_QUEUED = 64
RETRY_S = (5.0, 60.0)  # first pause, longest
MAX_TEXT_BYTES = 1 << 19  # of a request whose prompt is text; a longer one could not be ready in time
MAX_PARSED_BYTES = 2 << 20  # token ids take 6 ms a MiB, of the loop; of a longer request only the model is looked for
BEGINNING_BYTES = 256
MAX_LOOP_BYTES = 4096  # of a request that the loop does itself: English takes 0.7 ms, the worst that was found 2 ms
LOOP_REST = 10.0  # times what such a one has taken, before the loop does another


class Tokenized(StrEnum):
    """What came of one prompt; the label of a counter."""
    DONE = "done"
    GIVEN = "given"  # the client sent token ids
    NONE = "none"  # nothing to tokenise: another kind of request, or content that is no text or brings its own program
    LONG = "long"
    NOT_LOADED = "not_loaded"
    BUSY = "busy"
    LATE = "late"
    FAILED = "failed"


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


class _Outline(msgspec.Struct):
    model: Any = None
    user: Any = None
    session_id: Any = None


_decoder = msgspec.json.Decoder(Prompt)
_outlines = msgspec.json.Decoder(_Outline)


def parse(body: bytes) -> Prompt | None:
    """None for what is no JSON object: the worker will say so. Of a request that is too long for it the first bytes
    stand for the prompt."""
    try:
        if len(body) > MAX_PARSED_BYTES:
            outline = _outlines.decode(body)
            return Prompt(outline.model, body[:BEGINNING_BYTES].decode(errors="replace"), user=outline.user,
                          session_id=outline.session_id)
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


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
        self._pieces = None if self._backend is None else Pieces(
            self._backend.get_added_tokens_decoder().values(), functools.partial(encode, self._backend))

    @property
    def quick(self) -> bool:
        """Whether the library's fast code does it, so that a short prompt may be done while others wait."""
        return self._backend is not None

    def tokens(self, prompt: Prompt) -> Sequence[int] | None:
        """The ids of the first prompt, None where there is no text in it. Raises whatever the library raises."""
        if prompt.messages is not None:
            return self._chat(prompt)
        text = prompt.prompt[0] if isinstance(prompt.prompt, list) and prompt.prompt else prompt.prompt
        if not isinstance(text, str):
            return None
        special = True if prompt.add_special_tokens is None else bool(prompt.add_special_tokens)
        return self._cut(self._ids(text, special), prompt)

    def _chat(self, prompt: Prompt) -> Sequence[int] | None:
        messages = [_flattened(message) for message in prompt.messages]
        if any(message is None for message in messages):
            return None
        tools = prompt.tools if prompt.tools and prompt.tool_choice != "none" else None
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=None, tokenize=False,
            add_generation_prompt=bool(prompt.add_generation_prompt) and not prompt.continue_final_message,
            continue_final_message=bool(prompt.continue_final_message), **(prompt.chat_template_kwargs or {}))
        return self._cut(self._ids(text, bool(prompt.add_special_tokens)), prompt)

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


class TokenPool:
    """The threads, and what they know. Belongs to the event loop; `close` ends it."""

    def __init__(self, options: RouterOptions, load: Callable[[str], Tokenizer] = Tokenizer) -> None:
        self._wanted = options.tokenizer
        self._timeout_s = options.tokenize_timeout_s
        self._threads = ThreadPoolExecutor(options.tokenize_threads, thread_name_prefix="router-tokens")
        self._load_with = load
        self._loading: asyncio.Task | None = None
        self._tokenizer: Tokenizer | None = None
        self._queued = 0
        self._rests_until_s = 0.0
        self.problem = ""
        if self._wanted not in (None, NO_TOKENIZER):
            self._begin(self._wanted)

    @property
    def loaded(self) -> bool:
        """Whether prompts can be tokenised."""
        return self._tokenizer is not None

    def offer(self, root: str | None) -> None:
        """A worker has said what its model is. Taken where no tokenizer was named and none is there."""
        if self._wanted is None and root and self._tokenizer is None and self._loading is None:
            self._begin(root)

    async def tokens(self, prompt: Prompt | None, finish: Callable[[Sequence[int]], Any],
                     size_bytes: int) -> tuple[Tokenized, int, Any]:
        """(what came of it, how many tokens, what `finish` made of them, in the thread that found them, or None).
        `size_bytes` is the whole request's. A client's own template is never run: nothing could end it."""
        if prompt is None or prompt.cache_salt is not None or prompt.mm_processor_kwargs or prompt.documents:
            return Tokenized.NONE, 0, None
        if prompt.chat_template is not None:
            return Tokenized.NONE, 0, None
        if size_bytes > MAX_PARSED_BYTES:
            return Tokenized.LONG, 0, None
        given = _is_given(prompt.prompt)
        if not given and not (isinstance(prompt.messages, list) and prompt.messages or prompt.prompt):
            return Tokenized.NONE, 0, None
        if not given and self._tokenizer is None:
            return Tokenized.NOT_LOADED, 0, None
        if not given and size_bytes > MAX_TEXT_BYTES:
            return Tokenized.LONG, 0, None
        try:
            if self._may_do_here(given, size_bytes):
                count, made = self._do_here(prompt, given, finish)
            elif self._queued < MAX_QUEUED:
                count, made = await self._do_there(prompt, given, finish)
            else:
                return Tokenized.BUSY, 0, None
        except TimeoutError:
            return Tokenized.LATE, 0, None
        except Exception as error:  # a template may raise anything
            logger.debug("a prompt could not be tokenised: %r", error)
            return Tokenized.FAILED, 0, None
        if not count:
            return Tokenized.NONE, 0, None
        return (Tokenized.GIVEN if given else Tokenized.DONE), count, made

    def close(self) -> None:
        """End the threads with what they are doing."""
        if self._loading is not None:
            self._loading.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _may_do_here(self, given: bool, size_bytes: int) -> bool:
        return (size_bytes <= MAX_LOOP_BYTES and (given or self._tokenizer.quick)
                and time.monotonic() >= self._rests_until_s)

    def _do_here(self, prompt: Prompt, given: bool, finish: Callable[[Sequence[int]], Any]) -> tuple[int, Any]:
        began_s = time.monotonic()
        try:
            return self._work(prompt, given, finish)
        finally:
            ended_s = time.monotonic()
            self._rests_until_s = ended_s + LOOP_REST * (ended_s - began_s)

    async def _do_there(self, prompt: Prompt, given: bool,
                        finish: Callable[[Sequence[int]], Any]) -> tuple[int, Any]:
        """Raises TimeoutError besides."""
        self._queued += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._work, prompt, given, finish)
        work.add_done_callback(self._done)
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.shield(work)

    def _work(self, prompt: Prompt, given: bool, finish: Callable[[Sequence[int]], Any]) -> tuple[int, Any]:
        ids = _given(prompt.prompt) if given else self._tokenizer.tokens(prompt)
        return (len(ids), finish(ids)) if ids else (0, None)

    def _done(self, work: asyncio.Future) -> None:
        self._queued -= 1
        if not work.cancelled():
            work.exception()  # heard, also where nobody waits any more

    def _begin(self, name: str) -> None:
        self._loading = asyncio.get_running_loop().create_task(self._load(name))

    async def _load(self, name: str) -> None:
        pause_s, longest_s = RETRY_S
        while True:
            try:
                self._tokenizer = await asyncio.to_thread(self._load_with, name)
                self.problem = ""
                logger.info("prompts are tokenised with that of %s", name)
                return
            except Exception as error:  # of a library, for a folder of somebody else's: requests go without
                problem = f"the tokenizer of {name!r} can't be loaded: {error}"[:500]
                if problem != self.problem:
                    logger.error("%s; requests go without overlap, and it is tried again", problem)
                self.problem = problem
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def _is_given(prompt: Any) -> bool:
    """Whether the first prompt came as token ids, as far as its first shows."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    return isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int


def _given(prompt: list[Any]) -> list[int]:
    """The first prompt, all of it token ids. Raises ValueError. Takes 0.1 s for a million."""
    ids = prompt[0] if isinstance(prompt[0], list) else prompt
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ValueError("not all are token ids")
    return ids
