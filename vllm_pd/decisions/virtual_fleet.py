# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: what would have become of the same requests with other roles. Pure.

Prompts wait in one queue, in the order in which they came; a prefill engine computes one at a time. A prefilled request
goes to the decode engine with the fewest; each has SEATS. All requests of a decode engine get their tokens at one pace,
`base_s + slope_s * requests` for each. An engine that changes its role takes nothing new, finishes what it has, and
works in the new one no sooner than `change_s` later. A request is good if its first token and its mean time between
tokens meet the targets.
"""
import heapq
from collections import deque

import msgspec

from vllm_pd.decisions.demand import Targets

MAX_WAITING = 2000  # requests of either queue: what comes then is lost
SEATS = 256  # of a decode engine
NEVER = float("inf")


class VirtualRequest(msgspec.Struct, frozen=True):
    """`prefill_s`: seconds of a prefill engine."""
    at_s: float
    prefill_s: float
    answer_tokens: float


class _Engine(msgspec.Struct):
    """`made`: how many tokens each request has got by `at_s` if it has been there from the beginning. `running`: a heap
    of (`made` at its end, number, request, its first token at). `plan`: the number of its event that counts."""
    prefills: bool
    goal: bool  # whether it is to prefill
    ready_s: float = 0.0
    job: VirtualRequest | None = None
    job_end_s: float = NEVER
    made: float = 0.0
    at_s: float = 0.0
    running: list[tuple[float, int, VirtualRequest, float]] = msgspec.field(default_factory=list)
    plan: int = 0

    @property
    def works(self) -> bool:
        return self.prefills is self.goal


class VirtualFleet:
    """`count` engines, of which `prefills` prefill at the beginning; at most `at_once` change at a time. Owned by one
    caller."""

    def __init__(self, count: int, prefills: int, targets: Targets, change_s: float, at_once: int) -> None:
        self._engines = [_Engine(number < prefills, number < prefills) for number in range(count)]
        self._targets, self._change_s, self._at_once = targets, change_s, at_once
        self._wanted = prefills
        self._now = 0.0
        self._base_s, self._slope_s = 0.0, 1.0
        self._coming: deque[VirtualRequest] = deque()
        self._prompts: deque[VirtualRequest] = deque()
        self._prefilled: deque[VirtualRequest] = deque()
        self._events: list[tuple[float, int, _Engine]] = []
        self._number = 0
        self._good = 0

    @property
    def prefills(self) -> int:
        """Engines that are to prefill: those that do and do not change, and those that change to it."""
        return sum(engine.goal for engine in self._engines)

    def want(self, prefills: int) -> None:
        """So many engines are to prefill; those with the least to finish change, as many at a time as may."""
        self._wanted = prefills

    def advance(self, requests: list[VirtualRequest], until_s: float, base_s: float, slope_s: float) -> int:
        """Let time pass with these further requests, in their order. Returns how many good ones have ended."""
        self._base_s, self._slope_s = max(base_s, 1e-9), max(slope_s, 1e-12)
        self._coming.extend(requests)
        self._good = 0
        self._events = []
        for engine in self._engines:
            self._plan(engine)
        self._change()
        self._give()
        while (now := min(self._coming[0].at_s if self._coming else NEVER,
                          self._events[0][0] if self._events else NEVER)) < until_s:
            self._now = max(self._now, now)
            if self._coming and self._coming[0].at_s <= now:
                self._arrive(self._coming.popleft())
            else:
                _, plan, engine = heapq.heappop(self._events)
                if plan == engine.plan:
                    self._end(engine)
            self._give()
        self._now = until_s
        for engine in self._engines:
            self._settle(engine)
        return self._good

    def _arrive(self, request: VirtualRequest) -> None:
        if len(self._prompts) < MAX_WAITING:
            self._prompts.append(request)

    def _end(self, engine: _Engine) -> None:
        """Of its job, of its request that is done first, or of its change."""
        if engine.job is not None:
            if len(self._prefilled) < MAX_WAITING:
                self._prefilled.append(engine.job)
            engine.job, engine.job_end_s = None, NEVER
        elif engine.running:
            self._settle(engine)
            _, _, request, first_s = heapq.heappop(engine.running)
            self._good += (first_s - request.at_s <= self._targets.ttft_s
                           and (self._now - first_s) / request.answer_tokens <= self._targets.itl_s)
        elif not engine.works and engine.ready_s <= self._now:
            engine.prefills = engine.goal
            self._change()
        self._plan(engine)

    def _settle(self, engine: _Engine) -> None:
        if engine.running:
            engine.made += (self._now - engine.at_s) / self._pace_s(engine)
        engine.at_s = self._now

    def _pace_s(self, engine: _Engine) -> float:
        return self._base_s + self._slope_s * len(engine.running)

    def _plan(self, engine: _Engine) -> None:
        """When the next thing ends there."""
        self._number += 1
        engine.plan = self._number
        if engine.job is not None:
            at_s = engine.job_end_s
        elif engine.running:
            at_s = engine.at_s + max(0.0, engine.running[0][0] - engine.made) * self._pace_s(engine)
        elif not engine.works:
            at_s = max(self._now, engine.ready_s)
        else:
            return
        heapq.heappush(self._events, (at_s, engine.plan, engine))

    def _change(self) -> None:
        changing = sum(not engine.works for engine in self._engines)
        more = self._wanted - self.prefills
        if not more or changing >= self._at_once:
            return
        able = [engine for engine in self._engines if engine.works and engine.goal is (more < 0)]
        able.sort(key=lambda engine: len(engine.running))
        for engine in able[:min(abs(more), self._at_once - changing)]:
            engine.goal, engine.ready_s = more > 0, self._now + self._change_s
            self._plan(engine)

    def _give(self) -> None:
        """Prompts to prefill engines that have none, and prefilled requests to decode engines."""
        if self._prompts:
            for engine in self._engines:
                if self._prompts and engine.job is None and engine.prefills and engine.goal:
                    engine.job = self._prompts.popleft()
                    engine.job_end_s = self._now + engine.job.prefill_s
                    self._plan(engine)
        while self._prefilled:
            able = [engine for engine in self._engines
                    if not engine.prefills and not engine.goal and len(engine.running) < SEATS]
            if not able:
                return
            self._begin(min(able, key=lambda engine: len(engine.running)), self._prefilled.popleft())

    def _begin(self, engine: _Engine, request: VirtualRequest) -> None:
        self._settle(engine)
        self._number += 1
        heapq.heappush(engine.running, (engine.made + request.answer_tokens, self._number, request, self._now))
        self._plan(engine)
