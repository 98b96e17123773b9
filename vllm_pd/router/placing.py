# SPDX-License-Identifier: Apache-2.0
"""Chooses the worker for a request, from the prompt's blocks and each worker's overlap and load, by the policy."""
import asyncio
import collections
import heapq
import random
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_128_hexdigest

from vllm_pd.router import responses, tokens
from vllm_pd.router.deferred import DeferredPrompt, DeferredPrompts
from vllm_pd.router.families import Families, Family
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.outline import BEGIN_BYTES, Outline, parse
from vllm_pd.router.policy import Candidate, Choice, PlacementRequest, Policy, RoutingPolicyConfig, choose
from vllm_pd.router.tokens import Tokenized, TokenizeRequest
from vllm_pd.router.workers import RouterWorker, Workers

if TYPE_CHECKING:
    from vllm_pd.events.messages import EngineLoad

STALE_LOAD_S = 3.0
LOAD_DELAY_S = 0.05  # a load report does not include requests sent less than this before it arrived
MAX_RECENT = 10_000
MAX_TURNS = 4096  # models and adapters
MAX_KEY_CHARS = 512  # of a longer session or user its hash stands for it
MAX_BLOCKS = 1 << 14  # of a prompt: what follows them hardly changes the choice, and the loop takes 0.6 us for each
PARTIAL_BLOCKS = 3  # so many blocks of new text show whether a prompt is one that others have sent
CHARS_PER_TOKEN = 4  # of English
MAX_WEIGHED = 128  # workers for one request
MAX_HOLDERS = 32  # of these, the ones that hold most of its prompt
SESSION_HEADER = b"x-session-id"


Hashes = dict[int, list[int]]  # block size -> the names of the prompt's blocks
Overlaps = dict[int, dict[str, int]]  # block size -> worker -> how many of the prompt's blocks it holds


class PlacementPlan(msgspec.Struct):
    """What is needed to place a request; made once, used for each try. `hashes` has the prompt's blocks for the indexes
    of its `family`. With `deferred` set, it has only the first blocks, and the numbers in `request` are estimates.
    `worker` is the decode engine that it was sent to last, `prefill_worker` the prefill engine before that. With
    `prefilled`, no decode engine has to compute the prompt."""
    request: PlacementRequest = PlacementRequest()
    model: str | None = None
    hashes: Hashes | None = None
    family: Family | None = None
    deferred: DeferredPrompt | None = None
    worker: RouterWorker | None = None
    prefill_worker: RouterWorker | None = None
    prefilled: bool = False


class RecentlySent:
    """The prompt tokens sent to one worker since its last load report; only those that the worker does not hold."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sent: collections.deque[tuple[float, int]] = collections.deque()

    def add(self, now_s: float, count: int) -> None:
        """Record that a request with `count` such tokens was sent."""
        self._sent.append((now_s, count))
        self.tokens += count
        if len(self._sent) > MAX_RECENT:
            self.tokens -= self._sent.popleft()[1]

    def forget_before(self, time_s: float) -> None:
        """Forget what was sent before `time_s`: a load report includes it."""
        while self._sent and self._sent[0][0] < time_s:
            self.tokens -= self._sent.popleft()[1]


class Placer:
    """Places requests. `load_of` returns a worker's last load report and its age in seconds. Belongs to the router's
    event loop."""

    def __init__(self, options: RouterOptions, config: RoutingPolicyConfig, workers: Workers, pool: tokens.TokenPool,
                 metrics: RouterMetrics, load_of: Callable[[str], "tuple[EngineLoad | None, float]"],
                 rng: random.Random | None = None) -> None:
        self.config = config
        self.families = Families()
        self.ranks: dict[str, list[str]] = {}  # worker with several ranks -> their names in the index
        self._options = options
        self._workers = workers
        self.pool = pool
        self._metrics = metrics
        self._load_of = load_of
        self._rng = rng or random.Random()
        self._recent: dict[str, RecentlySent] = collections.defaultdict(RecentlySent)
        self._turns: collections.Counter[tuple[bool, str | None]] = collections.Counter()
        self.deferred = DeferredPrompts()
        self._now = asyncio.get_running_loop().time
        workers.on_leave.append(self._forget_recent)
        metrics.indexes.present = self.families.indexes

    async def plan(self, headers: list[tuple[bytes, bytes]], body: bytes, completes: bool,
                   generates: bool = True) -> PlacementPlan:
        """Read what is needed to place a request. The prompt is tokenised only where the policy needs that.
        `completes`: the request is a completion. `generates`: its answer takes a step of an engine."""
        outline = parse(body) if body else None
        model = outline.model if outline is not None else None
        turn = self._turn(generates, model)
        policy = self.config.policy
        if not body:
            return PlacementPlan(PlacementRequest(turn=turn))
        if policy is Policy.CONSISTENT_HASH:
            return PlacementPlan(PlacementRequest(key=_key(headers, outline, body), turn=turn), model)
        if policy is not Policy.KV or not completes or not self._workers.has_choice:
            return PlacementPlan(PlacementRequest(turn=turn), model)
        family = self.families.of_model(model, self._workers)
        if family is None or not family.indexes:
            return PlacementPlan(PlacementRequest(turn=turn), model)
        adapter = self._adapter(family, model)
        indexes = dict(family.indexes)
        request = TokenizeRequest(
            outline, lambda ids: {size: index.hashes(ids[:MAX_BLOCKS * size], adapter)
                                  for size, index in indexes.items()}, len(body), family.name)
        partial = tokens.PartialTerms(PARTIAL_BLOCKS * CHARS_PER_TOKEN * max(indexes),
                                      lambda hashes: self._is_unknown(family, hashes))
        result = await self.pool.tokenize(request, partial)
        self._metrics.tokenized.labels(result.outcome.value).inc()
        plan = PlacementPlan(self._request(family, result), model, result.made, family)
        if result.outcome is Tokenized.BEGUN:
            plan.deferred = DeferredPrompt(result.made[min(result.made)][-1],
                                           lambda: self._finish_deferred(plan, body, request.finish))
        elif result.made:
            for task in self.deferred.finish_matching(result.made[min(result.made)]):
                await asyncio.shield(task)
        return plan

    def _request(self, family: Family, result: tokens.TokenizeResult) -> PlacementRequest:
        return PlacementRequest(result.tokens, result.tokens // min(family.indexes))

    def _is_unknown(self, family: Family, found: Hashes) -> bool:
        """Whether no worker holds all of these first blocks of a prompt: then none holds any block after them. If a
        deferred prompt has the same first blocks, they are known, and finishing that one begins."""
        if not all(found.values()) or self.deferred.finish_matching(found[min(found)]):
            return False
        now_s = self._now()
        return all(max(family.index(size).beginnings(hashes, now_s).values(), default=0) < len(hashes)
                   for size, hashes in found.items())

    def place(self, plan: PlacementPlan, tried: Collection[RouterWorker]) -> tuple[RouterWorker, Choice] | None:
        """The next worker for a request, and why; None where no worker may get it. `tried` are left out. From now on
        the prompt counts as load on that worker, and its blocks as held there."""
        placed = self._place(plan, self._workers.candidates(plan.model, tried))
        if placed is not None:
            plan.worker, choice = placed
            self._metrics.decisions.labels(choice.policy.value, choice.reason.value).inc()
            self._metrics.prompt_blocks.inc(choice.prompt_blocks)
            self._metrics.overlap_blocks.inc(choice.overlap_blocks)
        return placed

    def place_prefill(self, plan: PlacementPlan, tried: Collection[RouterWorker] = ()) -> RouterWorker | None:
        """The prefill engine for a request, chosen as `place` chooses a decode engine; None where none may get it.
        `tried` are left out. It is not counted as a decision: the request goes to a decode engine, too."""
        placed = self._place(plan, self._workers.candidates(plan.model, tried, prefills=True))
        plan.prefill_worker = None if placed is None else placed[0]
        return plan.prefill_worker

    def alternatives(self, plan: PlacementPlan, tried: Collection[RouterWorker], most: int) -> list[RouterWorker]:
        """The workers, `most` at most, that would be next for a request if those in `tried` failed, the best first.
        Nothing is noted of the request there."""
        found: list[RouterWorker] = []
        left_out = set(tried)
        if most:
            overlaps = self._overlaps(plan, self._now())
        while len(found) < most:
            choice = self._choose(plan, self._workers.candidates(plan.model, left_out), overlaps)
            if choice is None:
                break
            found.append(self._workers.get(choice.worker))
            left_out.add(found[-1])
        return found

    def _place(self, plan: PlacementPlan, able: list[RouterWorker]) -> tuple[RouterWorker, Choice] | None:
        """Choose one of these workers, as `place`, and note what will be there: the prompt's new tokens as load, its
        blocks as expected, and the part of it that is still to be tokenised. Sets no metric."""
        now_s = self._now()
        overlaps = self._overlaps(plan, now_s)
        choice = self._choose(plan, able, overlaps)
        if choice is None:
            return None
        worker = self._workers.get(choice.worker)
        if self.config.policy in (Policy.KV, Policy.LEAST_LOAD) and not plan.prefilled:
            _, block_size = _largest_overlap(overlaps, worker.url)
            new_tokens = plan.request.prompt_tokens - choice.overlap_blocks * block_size
            self._recent[worker.url].add(now_s, max(0, new_tokens))
        self._expect(worker, plan, now_s + self._options.expected_s)
        if plan.deferred is not None:
            self.deferred.add(plan.deferred, now_s + self._options.expected_s)
        return worker, choice

    def _choose(self, plan: PlacementPlan, able: list[RouterWorker], overlaps: Overlaps) -> Choice | None:
        candidates = [self._candidate(worker, overlaps, plan) for worker in self._sampled(able, overlaps)]
        return choose(self.config, plan.request, candidates, self._rng)

    def _turn(self, generates: bool, model: str | None) -> int:
        """The request's number among its like, for round robin. Each model that an engine serves has turns of its own,
        because it has engines of its own; so have requests that don't generate, which often come in pairs with others.
        """
        like = generates, model if self._workers.is_known(model) else None
        if like not in self._turns and len(self._turns) >= MAX_TURNS:
            self._turns.clear()
        self._turns[like] += 1
        return self._turns[like]

    def _overlaps(self, plan: PlacementPlan, now_s: float) -> Overlaps:
        """The overlap with each worker. Of one with several ranks it is the smallest, as any rank may get the
        request."""
        found: Overlaps = {}
        for size, hashes in (plan.hashes or {}).items():
            held = found[size] = plan.family.index(size).matches(hashes, now_s)
            for url in self.ranks.keys() & plan.family.members:
                held[url] = min(held.get(name, 0) for name in self.ranks[url])
        return found

    def _sampled(self, able: list[RouterWorker], overlaps: Overlaps) -> list[RouterWorker]:
        """At most MAX_WEIGHED of the workers, because to score very many takes long: those that hold most of the
        prompt, and others at random, among which there is probably one with little load."""
        if len(able) <= MAX_WEIGHED or self.config.policy in (Policy.ROUND_ROBIN, Policy.CONSISTENT_HASH):
            return able
        sampled = dict.fromkeys(self._rng.sample(able, MAX_WEIGHED - MAX_HOLDERS))
        able_set = set(able)
        for held in overlaps.values():
            for url in heapq.nlargest(MAX_HOLDERS // len(overlaps), held, key=held.get):
                worker = self._workers.get(url)
                if worker in able_set:
                    sampled[worker] = None
        return list(sampled)

    def _expect(self, worker: RouterWorker, plan: PlacementPlan, until_s: float) -> None:
        """Count the prompt's blocks as held by the worker. Not with several ranks: it is unknown which one gets
        them."""
        if not plan.hashes or worker.url in self.ranks or worker.url not in plan.family.members:
            return
        known = [size for size in plan.hashes if worker.url in plan.family.index(size)]
        size = known[0] if known else min(plan.hashes)
        plan.family.index(size).expect(worker.url, plan.hashes[size], until_s)

    async def _finish_deferred(self, plan: PlacementPlan, body: bytes,
                               finish: Callable[[Sequence[int]], Hashes]) -> None:
        """Tokenise all of a deferred prompt. If its first blocks still count as held by its workers, all of them do
        from now on."""
        first, deferred = plan.hashes, plan.deferred
        result = await self.pool.tokenize_deferred(body, finish, plan.family.name)
        self._metrics.deferred.labels(result.outcome.value).inc()
        plan.deferred = None
        if not result.made:
            return
        plan.hashes, plan.request = result.made, self._request(plan.family, result)
        matches = [(plan.family.index(size).beginnings(hashes, self._now()), len(hashes))
                   for size, hashes in first.items()]
        for worker in (plan.prefill_worker, plan.worker):
            if worker is not None and any(held.get(worker.url) == count for held, count in matches):
                self._expect(worker, plan, deferred.until_s)

    def _candidate(self, worker: RouterWorker, overlaps: Overlaps, plan: PlacementPlan) -> Candidate:
        if self.config.policy in (Policy.ROUND_ROBIN, Policy.CONSISTENT_HASH):
            return Candidate(worker.url)
        overlap, size = _largest_overlap(overlaps, worker.url)
        blocks = plan.request.prompt_tokens // size if size else 0
        load, age_s = self._load_of(worker.url)
        if load is None or age_s > STALE_LOAD_S:
            return Candidate(worker.url, overlap, len(worker.in_flight), prompt_blocks=blocks)
        recent = self._recent[worker.url]
        recent.forget_before(self._now() - age_s - LOAD_DELAY_S)
        return Candidate(worker.url, overlap, len(worker.in_flight), load, recent.tokens, blocks)

    def _adapter(self, family: Family, model: str | None) -> str | None:
        """The name of the LoRA adapter that a request for `model` needs; None for the base model."""
        if model is None or model in family.names:
            return None
        known = any(model in worker.models and model not in worker.base_models for worker in self._workers)
        return model if known else None

    def forget(self, url: str) -> None:
        """Drop what is known of a worker that has left or changed its model, and its family with the last worker."""
        ended = self.families.leave(url)
        if ended is not None:
            self.pool.forget(ended.name)
            for index in ended.indexes.values():
                self._metrics.indexes.retire(index)

    def close(self) -> None:
        """Forget the deferred prompts."""
        self.deferred.close()

    def _forget_recent(self, worker: RouterWorker) -> None:
        self._recent.pop(worker.url, None)


def _largest_overlap(overlaps: Overlaps, url: str) -> tuple[int, int]:
    """(blocks, block size) of the worker's largest overlap in tokens; (0, 0) where it holds nothing."""
    largest = 0, 0
    for size, held in overlaps.items():
        blocks = held.get(url, 0)
        if blocks * size > largest[0] * largest[1]:
            largest = blocks, size
    return largest


def _key(headers: list[tuple[bytes, bytes]], outline: Outline | None, body: bytes) -> str:
    """The key for consistent hashing: the session, else the user, else the start of the prompt, or of a body that has
    none. It is short, because it is hashed with the name of each worker."""
    session = responses.find(headers, SESSION_HEADER)
    if session is not None:
        key = session.decode("latin-1")
    elif outline is None:
        key = body[:BEGIN_BYTES].decode("latin-1")
    else:
        key = outline.session_id or outline.user or outline.begin.decode("latin-1")
    return key if len(key) <= MAX_KEY_CHARS else xxh3_128_hexdigest(key.encode(errors="surrogatepass"))
