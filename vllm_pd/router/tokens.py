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
MAX_BEGUN_BYTES = 1 << 16  # of a request of which the loop does the beginning, which takes 0.1 ms
MAX_BEGUN_MESSAGES = 64  # 0.3 ms
LOOP_REST = 10.0  # times what such a one has taken, before the loop does another


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


class Opening(NamedTuple):
    """May a prompt's beginning do? Its ids are to be those of about `chars` more than is known, and `enough` says of
    what `finish` made of them whether the others can wait."""
    chars: int
    enough: Callable[[Any], bool]


class Found(NamedTuple):
    """How many tokens (of one that is BEGUN about so many), and what `finish` made of them; None where nothing was
    found. Of one that is BEGUN `rest` makes it of all, or gives None where that can't be had."""
    outcome: Tokenized
    tokens: int = 0
    made: Any = None
    rest: Callable[[], Awaitable[Any]] | None = None


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

    async def tokens(self, prompt: Prompt | None, finish: Callable[[Sequence[int]], Any], size_bytes: int,
                     opening: Opening | None = None) -> Found:
        """What `finish` makes of the prompt's ids, in the thread that finds them. `size_bytes` is the whole request's.
        A client's own template is never run: nothing could end it."""
        if prompt is None or prompt.cache_salt is not None or prompt.mm_processor_kwargs or prompt.documents:
            return Found(Tokenized.NONE)
        if prompt.chat_template is not None:
            return Found(Tokenized.NONE)
        if size_bytes > MAX_PARSED_BYTES:
            return Found(Tokenized.LONG)
        given = _is_given(prompt.prompt)
        if not given and not (isinstance(prompt.messages, list) and prompt.messages or prompt.prompt):
            return Found(Tokenized.NONE)
        if not given and self._tokenizer is None:
            return Found(Tokenized.NOT_LOADED)
        if not given and size_bytes > MAX_TEXT_BYTES:
            return Found(Tokenized.LONG)
        try:
            found = self._here(prompt, given, finish, size_bytes, opening)
            if found is None and self._queued < MAX_QUEUED:
                found = await self._there(prompt, given, finish)
            return found or Found(Tokenized.BUSY)
        except TimeoutError:
            return Found(Tokenized.LATE)
        except Exception as error:  # a template may raise anything
            logger.debug("a prompt could not be tokenised: %r", error)
            return Found(Tokenized.FAILED)

    def close(self) -> None:
        """End the threads with what they are doing."""
        if self._loading is not None:
            self._loading.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _here(self, prompt: Prompt, given: bool, finish: Callable[[Sequence[int]], Any], size_bytes: int,
              opening: Opening | None) -> Found | None:
        """What the loop finds by itself; None where that is for the threads."""
        if not given and not self._tokenizer.quick:
            return None
        if opening is not None and not given and size_bytes <= MAX_BEGUN_BYTES:
            found = self._begun(prompt, finish, opening)
            if found is not None:
                return found
        began_s = time.monotonic()
        if began_s < self._rests_until_s or size_bytes > MAX_LOOP_BYTES:
            return None
        try:
            return self._work(prompt, given, finish)
        finally:
            ended_s = time.monotonic()
            self._rests_until_s = ended_s + LOOP_REST * (ended_s - began_s)

    def _begun(self, prompt: Prompt, finish: Callable[[Sequence[int]], Any], opening: Opening) -> Found | None:
        if len(prompt.messages or ()) > MAX_BEGUN_MESSAGES:
            return None
        beginning = self._tokenizer.beginning(prompt, opening.chars)
        if beginning is None:
            return None
        made = finish(beginning.ids)
        if not opening.enough(made):
            return None
        return Found(Tokenized.BEGUN, beginning.tokens, made, lambda: self._rest(prompt, finish))

    async def _rest(self, prompt: Prompt, finish: Callable[[Sequence[int]], Any]) -> Any:
        if self._queued >= MAX_QUEUED:
            return None
        try:
            return (await self._there(prompt, False, finish)).made
        except Exception as error:  # TimeoutError too: without it others of the kind may go elsewhere, no more
            logger.debug("the rest of a prompt could not be tokenised: %r", error)
            return None

    async def _there(self, prompt: Prompt, given: bool, finish: Callable[[Sequence[int]], Any]) -> Found:
        """By a thread. Raises TimeoutError besides."""
        self._queued += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._work, prompt, given, finish)
        work.add_done_callback(self._done)
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.shield(work)

    def _work(self, prompt: Prompt, given: bool, finish: Callable[[Sequence[int]], Any]) -> Found:
        ids = _given(prompt.prompt) if given else self._tokenizer.tokens(prompt)
        if not ids:
            return Found(Tokenized.NONE)
        return Found(Tokenized.GIVEN if given else Tokenized.DONE, len(ids), finish(ids))

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
