# SPDX-License-Identifier: Apache-2.0
"""Which tokens a prompt will have at the engines, found out beside the event loop, or in it where that is sooner.

Threads do it: the tokenizer's own code runs without the interpreter's lock, and one prompt after the other in the same
thread takes less time than each between other work. The queue before them is bounded, and so is the wait; a prompt that
is not ready in time, or that this can't tokenise, goes without. But the way to a thread and back is long for a short
prompt, so where little comes the loop does those itself, for no more of its time than `LOOP_REST` leaves. Of a prompt
with much that is new it does the beginning. Where that is enough to see where the prompt should go, because nobody
holds as much, the threads do the rest only if it is asked for. Nothing here changes a request.
"""
import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from vllm_pd.router.options import NO_TOKENIZER, RouterOptions
from vllm_pd.router.tokenizer import Prompt, Tokenizer

logger = logging.getLogger("vllm_pd.router")

MAX_QUEUED = 64
RETRY_S = (5.0, 60.0)  # first pause, longest
MAX_TEXT_BYTES = 1 << 19  # of a request whose prompt is text; a longer one could not be ready in time
MAX_PARSED_BYTES = 2 << 20  # token ids take 6 ms a MiB, of the loop; of a longer request only the model is looked for
BEGINNING_BYTES = 256
MAX_LOOP_BYTES = 4096  # of a request that the loop does itself: English takes 0.7 ms, the worst that was found 2 ms
MAX_BEGUN_BYTES = 1 << 16  # of a request of which the loop does the beginning
BEGINNING_S = 0.001  # of CPU time; it takes 0.1 to 0.5 ms, and where it took more the loop rests from it
LOOP_REST = 10.0  # times what such a one has taken, before the loop does another
LONGEST_REST_S = 0.1  # it may have taken long because the process stood still


class Tokenized(StrEnum):
    """What came of one prompt; the label of a counter."""
    DONE = "done"
    BEGUN = "begun"  # the beginning only, which was enough
    GIVEN = "given"  # the client sent token ids
    NONE = "none"  # nothing to tokenise: another kind of request, or content that is no text or brings its own program
    LONG = "long"
    NOT_LOADED = "not_loaded"
    BUSY = "busy"
    LATE = "late"
    FAILED = "failed"


class TokenizeRequest(NamedTuple):
    """`finish` is called with the prompt's ids, where they are found. `size_bytes` is the whole request's. `family`
    names the workers whose tokenizer it is for."""
    prompt: Prompt | None
    finish: Callable[[Sequence[int]], Any]
    size_bytes: int
    family: str = ""


class PartialTerms(NamedTuple):
    """May a prompt's beginning do? About `chars` more of it than is known, if `enough` says so of what `finish` made of
    that; it is asked in the loop."""
    chars: int
    enough: Callable[[Any], bool]


class TokenizeResult(NamedTuple):
    """How many tokens (a guess where only begun), and what `finish` made of them; None where nothing was found."""
    outcome: Tokenized
    tokens: int = 0
    made: Any = None


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


class TokenPool:
    """The threads, and what they know. Belongs to the event loop; `close` ends it."""

    def __init__(self, options: RouterOptions, load: Callable[[str], Tokenizer] = Tokenizer) -> None:
        self._wanted = options.tokenizer
        self._timeout_s = options.tokenize_timeout_s
        self._threads = ThreadPoolExecutor(options.tokenize_threads, thread_name_prefix="router-tokens")
        self._load_with = load
        self._loading: dict[str, asyncio.Task] = {}  # by family; by "" where one was named, for all
        self._tokenizers: dict[str, Tokenizer] = {}
        self._problems: dict[str, str] = {}
        self._queued = 0
        self._rests_until_s = 0.0
        self._begins_no_more_until_s = 0.0
        if self._wanted not in (None, NO_TOKENIZER):
            self._start_loading("", self._wanted)

    @property
    def loaded(self) -> bool:
        """Whether prompts can be tokenised, of one family at least."""
        return bool(self._tokenizers)

    @property
    def problem(self) -> str:
        """What can't be loaded; empty where all could."""
        return "; ".join(self._problems.values())

    def offer(self, family: str, root: str | None) -> None:
        """A worker of that family has said what its model is. Taken where no tokenizer was named and the family has
        none."""
        if self._wanted is None and root and family not in self._loading:
            self._start_loading(family, root)

    def forget(self, family: str) -> None:
        """It has no workers any more."""
        if (loading := self._loading.pop(family, None)) is not None:
            loading.cancel()
        self._tokenizers.pop(family, None)
        self._problems.pop(family, None)

    def _of(self, family: str) -> Tokenizer | None:
        return self._tokenizers.get(family if self._wanted is None else "")

    async def tokens(self, asked: TokenizeRequest, beginning: PartialTerms | None = None) -> TokenizeResult:
        """What is asked. A client's own template is never run: nothing could end it."""
        prompt, size_bytes = asked.prompt, asked.size_bytes
        if prompt is None or prompt.cache_salt is not None or prompt.mm_processor_kwargs or prompt.documents:
            return TokenizeResult(Tokenized.NONE)
        if prompt.chat_template is not None:
            return TokenizeResult(Tokenized.NONE)
        if size_bytes > MAX_PARSED_BYTES:
            return TokenizeResult(Tokenized.LONG)
        given = _is_given(prompt.prompt)
        if not given and not (isinstance(prompt.messages, list) and prompt.messages or prompt.prompt):
            return TokenizeResult(Tokenized.NONE)
        if not given and self._of(asked.family) is None:
            return TokenizeResult(Tokenized.NOT_LOADED)
        if not given and size_bytes > MAX_TEXT_BYTES:
            return TokenizeResult(Tokenized.LONG)
        return await self._safely(self._anywhere(asked, given, beginning))

    async def whole(self, body: bytes, finish: Callable[[Sequence[int]], Any], family: str) -> TokenizeResult:
        """Of a request of which only the beginning was asked before: a thread reads it once more."""
        return await self._safely(self._there(
            lambda: self._work(TokenizeRequest(parse(body), finish, len(body), family))))

    def close(self) -> None:
        """End the threads with what they are doing."""
        for loading in self._loading.values():
            loading.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    async def _safely(finding: Awaitable[TokenizeResult]) -> TokenizeResult:
        try:
            return await finding
        except TimeoutError:
            return TokenizeResult(Tokenized.LATE)
        except Exception as error:  # a template may raise anything
            logger.debug("a prompt could not be tokenised: %r", error)
            return TokenizeResult(Tokenized.FAILED)

    async def _anywhere(self, asked: TokenizeRequest, given: bool, beginning: PartialTerms | None) -> TokenizeResult:
        found = None
        quick = not given and self._of(asked.family).quick
        if beginning is not None and quick:
            found = self._begun(asked, beginning)
        if found is None and (given or quick):
            found = self._here(asked)
        return found or await self._there(self._work, asked)

    def _begun(self, asked: TokenizeRequest, beginning: PartialTerms) -> TokenizeResult | None:
        """By the loop: the beginning, where that is enough. Quick but for odd texts, after which it rests."""
        if asked.size_bytes > MAX_BEGUN_BYTES or time.monotonic() < self._begins_no_more_until_s:
            return None
        began_s = time.thread_time()
        try:
            ids = self._of(asked.family).beginning(asked.prompt, beginning.chars)
            made = None if ids is None else asked.finish(ids.ids)
            return TokenizeResult(Tokenized.BEGUN, ids.tokens, made) if made and beginning.enough(made) else None
        finally:
            took_s = time.thread_time() - began_s
            if took_s > BEGINNING_S:
                self._begins_no_more_until_s = time.monotonic() + _rest_s(took_s)

    def _here(self, asked: TokenizeRequest) -> TokenizeResult | None:
        """By the loop, where that is short and it has rested."""
        began_s = time.monotonic()
        if asked.size_bytes > MAX_LOOP_BYTES or began_s < self._rests_until_s:
            return None
        try:
            return self._work(asked)
        finally:
            ended_s = time.monotonic()
            self._rests_until_s = ended_s + _rest_s(ended_s - began_s)

    async def _there(self, work: Callable[..., TokenizeResult], *given: Any) -> TokenizeResult:
        """By a thread, if there is room in its queue. Raises TimeoutError besides."""
        if self._queued >= MAX_QUEUED:
            return TokenizeResult(Tokenized.BUSY)
        task = asyncio.get_running_loop().run_in_executor(self._threads, work, *given)
        self._queued += 1
        task.add_done_callback(self._done)
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.shield(task)

    def _work(self, asked: TokenizeRequest) -> TokenizeResult:
        given = _is_given(asked.prompt.prompt)
        ids = _given(asked.prompt.prompt) if given else self._of(asked.family).tokens(asked.prompt)
        if not ids:
            return TokenizeResult(Tokenized.NONE)
        return TokenizeResult(Tokenized.GIVEN if given else Tokenized.DONE, len(ids), asked.finish(ids))

    def _done(self, work: asyncio.Future) -> None:
        self._queued -= 1
        if not work.cancelled():
            work.exception()  # heard, also where nobody waits any more

    def _start_loading(self, family: str, name: str) -> None:
        self._loading[family] = asyncio.get_running_loop().create_task(self._load(family, name))

    async def _load(self, family: str, name: str) -> None:
        pause_s, longest_s = RETRY_S
        while True:
            try:
                self._tokenizers[family] = await asyncio.to_thread(self._load_with, name)
                gc.freeze()  # the library is there to stay; to look through it each time takes 40 ms
                self._problems.pop(family, None)
                logger.info("prompts are tokenised with that of %s", name)
                return
            except Exception as error:  # of a library, for a folder of somebody else's: requests go without
                problem = f"the tokenizer of {name!r} can't be loaded: {error}"[:500]
                if problem != self._problems.get(family):
                    logger.error("%s; requests go without overlap, and it is tried again", problem)
                self._problems[family] = problem
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def _rest_s(took_s: float) -> float:
    """Of the loop, from prompts, after it has spent so much time on one."""
    return min(LOOP_REST * took_s, LONGEST_REST_S)


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
