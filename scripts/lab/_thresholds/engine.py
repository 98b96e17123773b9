# SPDX-License-Identifier: Apache-2.0
"""A simulated engine: chunked prefill, first come first served, as engine V1 schedules, under a simulated clock.

Each step decodes one token of every request that decodes, and fills what is left of `batch_tokens` with prompt tokens,
oldest request first; of an engine whose requests have a `due_s`, what is due first. It takes `step_s`, and `decode_s`
and `token_s` for each request and each prompt token. The prefix cache keeps all that was computed, in whole blocks.
"""
import collections
import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class EngineSpeed:
    """How fast an engine is, in seconds and tokens. `moved_per_s`: tokens whose KV is written to another one."""
    step_s: float
    decode_s: float
    token_s: float
    batch_tokens: int
    moved_per_s: float
    seats: int = 256


class SimClock:
    """Calls in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Make this call so much later."""
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), call))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until this is so."""
        while not is_over():
            self.now, _, call = heapq.heappop(self._due)
            call()


@dataclass(eq=False)
class SimRequest:
    """A request on an engine. `hashes` are those of its prompt's full blocks, `computed` counts prompt tokens."""
    name: str
    prompt_tokens: int
    hashes: tuple[int, ...]
    answer_tokens: int
    token_came: Callable[[], None]
    computed: int = 0
    answered: int = 0
    settled: bool = False  # it is not asked again where it goes
    due_s: float = 0.0  # the lowest is computed first

    @property
    def left(self) -> int:
        """Prompt tokens to be computed."""
        return self.prompt_tokens - self.computed


@dataclass
class SimEngine:
    """One engine. `admits` gets the first waiting request and its prefix hit in tokens, and says whether this engine
    computes it; if not, `admits` must keep the request. `step_tokens`: the most prompt tokens of a step, as far as
    `batch_tokens` allows. `stepped` gets the begin of a step in seconds and the tokens of each request in it, 1 for a
    decode."""
    clock: SimClock
    speed: EngineSpeed
    admits: Callable[[SimRequest, int], bool] = lambda request, cached_tokens: True
    stepped: Callable[[float, list[int]], None] = lambda began_at, tokens: None
    step_tokens: Callable[[], int] | None = None
    waiting: collections.deque[SimRequest] = field(default_factory=collections.deque)
    running: list[SimRequest] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)
    busy: bool = False

    def add(self, request: SimRequest, first: bool = False) -> None:
        """A request comes."""
        (self.waiting.appendleft if first else self.waiting.append)(request)
        self._go_on()

    def hit(self, hashes: Iterable[int], prompt_tokens: int) -> int:
        """Cached tokens of a prompt; at least one token is always computed."""
        blocks = sum(1 for _ in itertools.takewhile(self.cached.__contains__, hashes))
        return min(blocks * BLOCK_TOKENS, prompt_tokens - 1)

    @property
    def decodes(self) -> int:
        """How many requests decode."""
        return sum(not request.left for request in self.running)

    def _go_on(self) -> None:
        if not self.busy and (self.running or self.waiting):
            self.busy = True
            self.clock.after(0.0, self._step)

    def _step(self) -> None:
        batch = [(request, 1) for request in self.running if not request.left]
        room = self.speed.batch_tokens - len(batch)
        if self.step_tokens is not None:
            room = min(room, self.step_tokens())
        begun = [request for request in self.running if request.left]
        for request in sorted((*begun, *self.waiting), key=lambda one: one.due_s):
            if room <= 0:
                break
            if request not in begun:
                if len(self.running) >= self.speed.seats:
                    continue
                self.waiting.remove(request)
                cached_tokens = self.hit(request.hashes, request.prompt_tokens)
                if not request.settled and not self.admits(request, cached_tokens):
                    continue
                request.settled = True
                request.computed = max(request.computed, cached_tokens)
                self.running.append(request)
            batch.append((request, min(room, request.left)))
            room -= batch[-1][1]
        batch = [one for one in batch if one[1]]
        if not batch:
            self.busy = False
            return
        prompt_tokens = sum(tokens for request, tokens in batch if request.left)
        decodes = sum(not request.left for request, _ in batch)
        took_s = self.speed.step_s + self.speed.decode_s * decodes + self.speed.token_s * prompt_tokens
        began_at = self.clock.now
        self.clock.after(took_s, lambda: self._ended(began_at, batch))

    def _ended(self, began_at: float, batch: list[tuple[SimRequest, int]]) -> None:
        self.stepped(began_at, [tokens for _, tokens in batch])
        for request, tokens in batch:
            if request.left:
                request.computed += tokens
                if request.left:
                    continue
            self.cached.update(request.hashes)
            request.answered += 1
            if request.answered >= request.answer_tokens:
                self.running.remove(request)
            request.token_came()
        self.busy = False
        self._go_on()
