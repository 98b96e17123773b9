# SPDX-License-Identifier: Apache-2.0
"""Tokenises prompts as the engines will, without holding up the event loop. Nothing here changes a request.

Threads tokenise: the tokenizer's code releases the interpreter's lock. Their queue is bounded, and so is the wait; a
prompt that is not ready in time, or can't be tokenised, is routed without overlap.

The event loop tokenises a short prompt itself, because the way to a thread and back would take longer. After each one
it rests from that for `LOOP_REST` times as long. Of a prompt with much new text it tokenises only the first part. Where
that is enough to place the prompt (`vllm_pd.router.deferred`), a thread does the rest only if it is needed later.
"""
import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, NamedTuple

from vllm_pd.router.options import NO_TOKENIZER, RouterOptions
from vllm_pd.router.outline import Outline, parse
from vllm_pd.router.tokenizer import Tokenizer

logger = logging.getLogger("vllm.pd.router")

MAX_QUEUED = 64
RETRY_S = (5.0, 60.0)  # first pause, longest
MAX_TEXT_BYTES = 1 << 19  # of a request whose prompt is text; a longer one could not be ready in time
MAX_LOOP_BYTES = 4096  # of a request that the loop tokenises itself: English takes 0.7 ms, the worst found 2 ms
MAX_PARTIAL_BYTES = 1 << 16  # of a request whose first part the loop tokenises
PARTIAL_CPU_S = 0.001  # a first part takes 0.1 to 0.5 ms of CPU; after one that took more the loop rests
LOOP_REST = 10.0  # the loop rests for so many times what a prompt has taken
MAX_REST_S = 0.1  # a prompt may have taken long only because the process was suspended


class Tokenized(StrEnum):
    """The outcome for one prompt; the label of a counter."""
    DONE = "done"
    BEGUN = "begun"  # only the first part, which was enough
    GIVEN = "given"  # the client sent token ids
    NONE = "none"  # nothing to tokenise: not a prompt, no text, or a request with its own chat template
    LONG = "long"  # over a size limit
    NOT_LOADED = "not_loaded"
    BUSY = "busy"  # the queue was full
    LATE = "late"
    FAILED = "failed"


class TokenizeRequest(NamedTuple):
    """A prompt to tokenise. `finish` is called with its token ids, in the loop or in a thread; what it returns is the
    result's `made`. `size_bytes` is the size of the whole request. `family` names the tokenizer."""
    outline: Outline | None
    finish: Callable[[Sequence[int]], Any]
    size_bytes: int
    family: str = ""


class PartialTerms(NamedTuple):
    """When the first part of a prompt is enough: tokenise about `chars` of what is not cached, and ask `is_enough`, in
    the loop, about what `finish` made of that."""
    chars: int
    is_enough: Callable[[Any], bool]


class TokenizeResult(NamedTuple):
    """The number of tokens (an estimate where BEGUN), and what `finish` made of them, None where there are none."""
    outcome: Tokenized
    tokens: int = 0
    made: Any = None


class TokenPool:
    """The tokenizers of all families, and the threads that run them. Belongs to the event loop."""

    def __init__(self, options: RouterOptions, load: Callable[[str], Tokenizer] = Tokenizer) -> None:
        self._configured = options.tokenizer
        self._timeout_s = options.tokenize_timeout_s
        self._threads = ThreadPoolExecutor(options.tokenize_threads, thread_name_prefix="router-tokens")
        self._load_with = load
        self._loading: dict[str, asyncio.Task] = {}  # by family; "" for a configured tokenizer, which serves all
        self._tokenizers: dict[str, Tokenizer] = {}
        self._problems: dict[str, str] = {}
        self._queued = 0
        self._rests_until_s = 0.0
        self._partial_rests_until_s = 0.0
        if self._configured not in (None, NO_TOKENIZER):
            self._start_loading("", self._configured)

    @property
    def loaded(self) -> bool:
        """Whether at least one tokenizer is loaded."""
        return bool(self._tokenizers)

    @property
    def problem(self) -> str:
        """Why tokenizers could not be loaded; empty where there is no problem."""
        return "; ".join(self._problems.values())

    def load_for(self, family: str, root: str | None) -> None:
        """Load the tokenizer of the model `root` (a folder or name) for a family, unless it has one already or a
        tokenizer was configured."""
        if self._configured is None and root and family not in self._loading:
            self._start_loading(family, root)

    def forget(self, family: str) -> None:
        """Drop the tokenizer of a family that has no workers any more."""
        if (loading := self._loading.pop(family, None)) is not None:
            loading.cancel()
        self._tokenizers.pop(family, None)
        self._problems.pop(family, None)

    def _tokenizer_of(self, family: str) -> Tokenizer | None:
        return self._tokenizers.get(family if self._configured is None else "")

    async def tokenize(self, request: TokenizeRequest, partial: PartialTerms | None = None) -> TokenizeResult:
        """Tokenise a prompt; with `partial`, its first part only where that is enough. Never raises. A client's own
        chat template is not run, because it is a program that nothing could stop."""
        outline = request.outline
        if outline is not None and not outline.is_scanned:
            return TokenizeResult(Tokenized.LONG)
        if outline is None or outline.depends_on_more:
            return TokenizeResult(Tokenized.NONE)
        given = outline.has_ids
        if not given and not outline.has_text:
            return TokenizeResult(Tokenized.NONE)
        if not given and self._tokenizer_of(request.family) is None:
            return TokenizeResult(Tokenized.NOT_LOADED)
        if not given and request.size_bytes > MAX_TEXT_BYTES:
            return TokenizeResult(Tokenized.LONG)
        return await self._caught(self._in_loop_or_thread(request, given, partial))

    async def tokenize_deferred(self, body: bytes, finish: Callable[[Sequence[int]], Any],
                                family: str) -> TokenizeResult:
        """Tokenise the whole prompt of a request of which only the first part was tokenised, in a thread, which parses
        the body again. Never raises."""
        return await self._caught(self._in_thread(
            lambda: self._work(TokenizeRequest(parse(body), finish, len(body), family))))

    def close(self) -> None:
        """Stop loading, and end the threads after what they are doing now."""
        for loading in self._loading.values():
            loading.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    async def _caught(result: Awaitable[TokenizeResult]) -> TokenizeResult:
        try:
            return await result
        except TimeoutError:
            return TokenizeResult(Tokenized.LATE)
        except Exception as error:  # a chat template may raise anything
            logger.debug("a prompt could not be tokenised: %r", error)
            return TokenizeResult(Tokenized.FAILED)

    async def _in_loop_or_thread(self, request: TokenizeRequest, given: bool,
                                 partial: PartialTerms | None) -> TokenizeResult:
        result = None
        is_fast = not given and self._tokenizer_of(request.family).is_fast
        if partial is not None and is_fast:
            result = self._partial(request, partial)
        if result is None and (given or is_fast):
            result = self._in_loop(request)
        return result or await self._in_thread(self._work, request)

    def _partial(self, request: TokenizeRequest, partial: PartialTerms) -> TokenizeResult | None:
        """Tokenise the first part, in the loop. None where that is not enough or not possible. Unusual texts may take
        long; then the loop rests from this."""
        if request.size_bytes > MAX_PARTIAL_BYTES or time.monotonic() < self._partial_rests_until_s:
            return None
        began_s = time.thread_time()
        try:
            ids = self._tokenizer_of(request.family).partial(request.outline.prompt, partial.chars)
            made = None if ids is None else request.finish(ids.ids)
            return TokenizeResult(Tokenized.BEGUN, ids.tokens, made) if made and partial.is_enough(made) else None
        finally:
            took_s = time.thread_time() - began_s
            if took_s > PARTIAL_CPU_S:
                self._partial_rests_until_s = time.monotonic() + _rest_s(took_s)

    def _in_loop(self, request: TokenizeRequest) -> TokenizeResult | None:
        """Tokenise a short request in the loop. None for a longer one, or while the loop rests."""
        began_s = time.monotonic()
        if request.size_bytes > MAX_LOOP_BYTES or began_s < self._rests_until_s:
            return None
        try:
            return self._work(request)
        finally:
            ended_s = time.monotonic()
            self._rests_until_s = ended_s + _rest_s(ended_s - began_s)

    async def _in_thread(self, work: Callable[..., TokenizeResult], *args: Any) -> TokenizeResult:
        """Call `work` in a thread; BUSY where the queue is full. Raises TimeoutError, and whatever `work` raises."""
        if self._queued >= MAX_QUEUED:
            return TokenizeResult(Tokenized.BUSY)
        task = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        self._queued += 1
        task.add_done_callback(self._done)
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.shield(task)

    def _work(self, request: TokenizeRequest) -> TokenizeResult:
        outline = request.outline
        given = outline.has_ids
        ids = outline.ids() if given else self._tokenizer_of(request.family).tokens(outline.prompt)
        if not ids:
            return TokenizeResult(Tokenized.NONE)
        return TokenizeResult(Tokenized.GIVEN if given else Tokenized.DONE, len(ids), request.finish(ids))

    def _done(self, work: asyncio.Future) -> None:
        self._queued -= 1
        if not work.cancelled():
            work.exception()  # retrieved also where nothing waits any more, so that asyncio does not log it

    def _start_loading(self, family: str, name: str) -> None:
        self._loading[family] = asyncio.get_running_loop().create_task(self._load(family, name))

    async def _load(self, family: str, name: str) -> None:
        """The task that loads the tokenizer of a family, in a thread, and tries again until it can, with pauses as
        RETRY_S says. A problem is logged when it is another one than before."""
        pause_s, longest_s = RETRY_S
        while True:
            try:
                self._tokenizers[family] = await asyncio.to_thread(self._load_with, name)
                gc.freeze()  # the library stays loaded; each collection of its objects would take 40 ms
                self._problems.pop(family, None)
                logger.info("prompts are tokenised with the tokenizer of %s", name)
                return
            except Exception as error:  # of transformers, for files of an operator: requests are routed without overlap
                problem = f"the tokenizer of {name!r} can't be loaded: {error}"[:500]
                if problem != self._problems.get(family):
                    logger.error("%s; requests are routed without overlap until it loads; it is tried again", problem)
                self._problems[family] = problem
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def _rest_s(took_s: float) -> float:
    """How long the loop rests after a prompt that took `took_s`."""
    return min(LOOP_REST * took_s, MAX_REST_S)
