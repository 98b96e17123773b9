# SPDX-License-Identifier: Apache-2.0
"""Finding the worker for a request: its prompt's blocks, what is known of each worker, and the policy's word."""
import asyncio
import collections
import heapq
import random
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_pd.router import tokens
from vllm_pd.router.deferred import DeferredPrompt, DeferredPrompts
from vllm_pd.router.families import Families, Family
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import Candidate, Choice, PlacementRequest, Policy, RoutingPolicyConfig, choose
from vllm_pd.router.tokens import Tokenized, TokenizeRequest
from vllm_pd.router.workers import RouterWorker, Workers

if TYPE_CHECKING:
    from vllm_pd.events.messages import EngineLoad

STALE_LOAD_S = 3.0
UNDERWAY_S = 0.05  # a request that was sent so shortly before a load came is not in it
MAX_RECENT = 10_000
KEY_BYTES = 256
OPENING_BLOCKS = 3  # so much of a prompt that is new shows where it leaves what others have sent
CHARS_PER_TOKEN = 4  # of English
MAX_WEIGHED = 128  # workers for one request
MAX_HOLDERS = 32  # of these, those that hold most of its prompt
SESSION_HEADER = b"x-session-id"


Hashes = dict[int, list[int]]
Overlaps = dict[int, dict[str, int]]  # by the size of a block: worker -> blocks that it holds


class PlacementPlan(msgspec.Struct):
    """What placing a request goes by; made once, used for each try. `hashes` are the names of the prompt's blocks, by
    the size of a block, for the indexes of its `family`. Where there is an `opening`, they are only those of the first
    blocks, and the request's numbers are guesses; `worker` is where it went last."""
    request: PlacementRequest = PlacementRequest()
    model: str | None = None
    hashes: Hashes | None = None
    family: Family | None = None
    opening: DeferredPrompt | None = None
    worker: RouterWorker | None = None


class RecentlySent:
    """What was sent to one worker since its last word about its load."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sent: collections.deque[tuple[float, int]] = collections.deque()

    def sent(self, now_s: float, count: int) -> None:
        """A request with so many tokens that the worker does not hold."""
        self._sent.append((now_s, count))
        self.tokens += count
        if len(self._sent) > MAX_RECENT:
            self.tokens -= self._sent.popleft()[1]

    def told(self, when_s: float) -> None:
        """It has told its load then."""
        while self._sent and self._sent[0][0] < when_s:
            self.tokens -= self._sent.popleft()[1]


class Placer:
    """Belongs to the router's event loop. `load_of` says what a worker last told of its load, and how long ago."""

    def __init__(self, options: RouterOptions, config: RoutingPolicyConfig, workers: Workers, pool: tokens.TokenPool,
                 metrics: RouterMetrics, load_of: Callable[[str], "tuple[EngineLoad | None, float]"],
                 rng: random.Random | None = None) -> None:
        self.config = config
        self.families = Families()
        self.ranks: dict[str, list[str]] = {}  # of workers with several data-parallel ranks: their names in the index
        self._options = options
        self._workers = workers
        self._pool = pool
        self._metrics = metrics
        self._load_of = load_of
        self._rng = rng or random.Random()
        self._recent: dict[str, RecentlySent] = collections.defaultdict(RecentlySent)
        self._turn = 0
        self._openings = DeferredPrompts()
        self._now = asyncio.get_running_loop().time
        workers.on_leave.append(self._left)
        metrics.show_indexes(self.families.indexes)

    async def plan(self, headers: list[tuple[bytes, bytes]], body: bytes, generates: bool) -> PlacementPlan:
        """Look at a request; at its prompt only where that may matter."""
        self._turn += 1
        policy = self.config.policy
        if not body:
            return PlacementPlan(PlacementRequest(turn=self._turn))
        prompt = tokens.parse(body)
        model = prompt.model if prompt is not None and isinstance(prompt.model, str) else None
        if policy is Policy.CONSISTENT_HASH:
            return PlacementPlan(PlacementRequest(key=_key(headers, prompt), turn=self._turn), model)
        if policy is not Policy.KV or not generates or len(self._workers) < 2:
            return PlacementPlan(PlacementRequest(turn=self._turn), model)
        family = self.families.of_model(model, self._workers)
        if family is None or not family.indexes:
            return PlacementPlan(PlacementRequest(turn=self._turn), model)
        adapter = self._adapter(family, model)
        indexes = dict(family.indexes)
        asked = TokenizeRequest(prompt, lambda ids: {size: index.hashes(ids, adapter)
                                                     for size, index in indexes.items()}, len(body), family.name)
        beginning = tokens.PartialTerms(OPENING_BLOCKS * CHARS_PER_TOKEN * max(indexes),
                                     lambda hashes: self._is_left(family, hashes))
        found = await self._pool.tokens(asked, beginning)
        self._metrics.tokenized.labels(found.outcome.value).inc()
        plan = PlacementPlan(self._request(family, found), model, found.made, family)
        if found.outcome is Tokenized.BEGUN:
            plan.opening = DeferredPrompt(found.made[min(found.made)][-1],
                                   lambda: self._place_rest(plan, body, asked.finish))
        elif found.made:
            for task in self._openings.go_on(found.made[min(found.made)]):
                await asyncio.shield(task)
        return plan

    def _request(self, family: Family, found: tokens.TokenizeResult) -> PlacementRequest:
        return PlacementRequest(found.tokens, found.tokens // min(family.indexes), turn=self._turn)

    def _is_left(self, family: Family, found: Hashes) -> bool:
        """Whether no worker holds all of these blocks, so that none holds what comes after them."""
        if not all(found.values()) or self._openings.go_on(found[min(found)]):
            return False
        now_s = self._now()
        return all(max(family.index(size).matches(hashes, now_s).values(), default=0) < len(hashes)
                   for size, hashes in found.items())

    def place(self, plan: PlacementPlan, tried: Collection[RouterWorker]) -> tuple[RouterWorker, Choice] | None:
        """The next worker for it; None where none may get it. What goes there counts as held and as load at once."""
        able = self._workers.candidates(plan.model, tried)
        now_s = self._now()
        overlaps = self._overlaps(plan, now_s)
        candidates = [self._candidate(worker, overlaps, plan) for worker in self._some(able, overlaps)]
        choice = choose(self.config, plan.request, candidates, self._rng)
        if choice is None:
            return None
        worker = self._workers.get(choice.worker)
        if self.config.policy in (Policy.KV, Policy.LEAST_LOAD):
            _, block_size = _most(overlaps, worker.url)
            new_tokens = plan.request.prompt_tokens - choice.overlap_blocks * block_size
            self._recent[worker.url].sent(now_s, max(0, new_tokens))
        self._expect(worker, plan, now_s + self._options.expected_s)
        if plan.opening is not None:
            self._openings.put(plan.opening, now_s + self._options.expected_s)
        plan.worker = worker
        self._metrics.decisions.labels(choice.policy.value, choice.reason.value).inc()
        self._metrics.prompt_blocks.inc(choice.prompt_blocks)
        self._metrics.overlap_blocks.inc(choice.overlap_blocks)
        return worker, choice

    def _overlaps(self, plan: PlacementPlan, now_s: float) -> Overlaps:
        """How many of its blocks each worker holds, whichever of its ranks gets the request."""
        found: Overlaps = {}
        for size, hashes in (plan.hashes or {}).items():
            held = found[size] = plan.family.index(size).matches(hashes, now_s)
            for url in self.ranks.keys() & plan.family.members:
                held[url] = min(held.get(name, 0) for name in self.ranks[url])
        return found

    def _some(self, able: list[RouterWorker], overlaps: Overlaps) -> list[RouterWorker]:
        """Of very many those that hold most of the prompt, and some that are drawn, for to weigh them all takes long.
        Among so many there is one with next to nothing to do."""
        if len(able) <= MAX_WEIGHED or self.config.policy in (Policy.ROUND_ROBIN, Policy.CONSISTENT_HASH):
            return able
        some = dict.fromkeys(self._rng.sample(able, MAX_WEIGHED - MAX_HOLDERS))
        among = set(able)
        for held in overlaps.values():
            for url in heapq.nlargest(MAX_HOLDERS // len(overlaps), held, key=held.get):
                worker = self._workers.get(url)
                if worker in among:
                    some[worker] = None
        return list(some)

    def _expect(self, worker: RouterWorker, plan: PlacementPlan, until_s: float) -> None:
        """What goes there will be held there; by which of several ranks nobody knows."""
        if not plan.hashes or worker.url in self.ranks or worker.url not in plan.family.members:
            return
        known = [size for size in plan.hashes if worker.url in plan.family.index(size)]
        size = known[0] if known else min(plan.hashes)
        plan.family.index(size).expect(worker.url, plan.hashes[size], until_s)

    async def _place_rest(self, plan: PlacementPlan, body: bytes, finish: Callable[[Sequence[int]], list[int]]) -> None:
        """All blocks of a prompt count as held where its first ones still do."""
        first, opening = plan.hashes, plan.opening
        found = await self._pool.whole(body, finish, plan.family.name)
        self._metrics.rests.labels(found.outcome.value).inc()
        plan.opening = None
        if not found.made:
            return
        plan.hashes, plan.request = found.made, self._request(plan.family, found)
        held = [size for size, hashes in first.items()
                if plan.family.index(size).matches(hashes, self._now()).get(plan.worker.url) == len(hashes)]
        if held:
            self._expect(plan.worker, plan, opening.until_s)

    def _candidate(self, worker: RouterWorker, overlaps: Overlaps, plan: PlacementPlan) -> Candidate:
        if self.config.policy in (Policy.ROUND_ROBIN, Policy.CONSISTENT_HASH):
            return Candidate(worker.url)
        overlap, size = _most(overlaps, worker.url)
        blocks = plan.request.prompt_tokens // size if size else 0
        load, age_s = self._load_of(worker.url)
        if load is None or age_s > STALE_LOAD_S:
            return Candidate(worker.url, overlap, len(worker.flights), prompt_blocks=blocks)
        recent = self._recent[worker.url]
        recent.told(self._now() - age_s - UNDERWAY_S)
        return Candidate(worker.url, overlap, len(worker.flights), load, recent.tokens, blocks)

    def _adapter(self, family: Family, model: str | None) -> str | None:
        """The name of the LoRA adapter that is asked for; None for the base model."""
        if model is None or model in family.names:
            return None
        known = any(model in worker.models and model not in worker.base_models for worker in self._workers)
        return model if known else None

    def forget(self, url: str) -> None:
        """That worker has left."""
        ended = self.families.leave(url)
        if ended is not None:
            self._pool.forget(ended.name)
            for index in ended.indexes.values():
                self._metrics.ended(index)

    def close(self) -> None:
        """Forget what was put off."""
        self._openings.close()

    def _left(self, worker: RouterWorker) -> None:
        self._recent.pop(worker.url, None)


def _most(overlaps: Overlaps, url: str) -> tuple[int, int]:
    """(blocks, their size) of what the worker holds most of; (0, 0) where it holds nothing."""
    most = 0, 0
    for size, held in overlaps.items():
        blocks = held.get(url, 0)
        if blocks * size > most[0] * most[1]:
            most = blocks, size
    return most


def _key(headers: list[tuple[bytes, bytes]], prompt: tokens.Prompt | None) -> str:
    """What a consistent hash goes by: the session, the user, or how the prompt begins."""
    for name, value in headers:
        if name == SESSION_HEADER:
            return value.decode("latin-1")
    if prompt is None:
        return ""
    for named in (prompt.session_id, prompt.user):
        if isinstance(named, str) and named:
            return named
    begin = prompt.messages if prompt.messages is not None else prompt.prompt
    return msgspec.json.encode(begin)[:KEY_BYTES].decode(errors="replace")
