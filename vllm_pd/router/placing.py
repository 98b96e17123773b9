# SPDX-License-Identifier: Apache-2.0
"""Finding the worker for a request: its prompt's blocks, what is known of each worker, and the policy's word."""
import asyncio
import collections
import random
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_pd.router import tokens
from vllm_pd.router.index import PrefixIndex
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.openings import Opening, Openings
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import Candidate, Choice, Policy, PolicyConfig, Request, choose
from vllm_pd.router.tokens import Asked, Tokenized
from vllm_pd.router.workers import Worker, Workers

if TYPE_CHECKING:
    from vllm_pd.events.messages import EngineLoad

STALE_LOAD_S = 3.0
UNDERWAY_S = 0.05  # a request that was sent so shortly before a load came is not in it
MAX_RECENT = 10_000
KEY_BYTES = 256
OPENING_BLOCKS = 3  # so much of a prompt that is new shows where it leaves what others have sent
CHARS_PER_TOKEN = 4  # of English
SESSION_HEADER = b"x-session-id"


class Plan(msgspec.Struct):
    """What placing a request goes by; made once, used for each try. Where there is an `opening`, `hashes` are only
    those of the prompt's first blocks, and the request's numbers are guesses; `worker` is where it went last."""
    request: Request = Request()
    model: str | None = None
    hashes: list[int] | None = None
    opening: Opening | None = None
    worker: Worker | None = None


class Recent:
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
    """Belongs to the router's event loop. `index` is None until the size of a block is known; `load_of` says what a
    worker last told of its load, and how long ago."""

    def __init__(self, options: RouterOptions, config: PolicyConfig, workers: Workers, pool: tokens.TokenPool,
                 metrics: RouterMetrics, load_of: Callable[[str], "tuple[EngineLoad | None, float]"],
                 rng: random.Random | None = None) -> None:
        self.config = config
        self.index: PrefixIndex | None = None
        self.ranks: dict[str, list[str]] = {}  # of workers with several data-parallel ranks: their names in the index
        self._options = options
        self._workers = workers
        self._pool = pool
        self._metrics = metrics
        self._load_of = load_of
        self._rng = rng or random.Random()
        self._recent: dict[str, Recent] = collections.defaultdict(Recent)
        self._turn = 0
        self._openings = Openings()
        self._now = asyncio.get_running_loop().time
        workers.on_leave.append(self._left)
        metrics.show_index(lambda: self.index)

    async def plan(self, headers: list[tuple[bytes, bytes]], body: bytes, generates: bool) -> Plan:
        """Look at a request; at its prompt only where that may matter."""
        self._turn += 1
        policy = self.config.policy
        if not body:
            return Plan(Request(turn=self._turn))
        prompt = tokens.parse(body)
        model = prompt.model if prompt is not None and isinstance(prompt.model, str) else None
        if policy is Policy.CONSISTENT_HASH:
            return Plan(Request(key=_key(headers, prompt), turn=self._turn), model)
        if policy is not Policy.KV or not generates or self.index is None or len(self._workers) < 2:
            return Plan(Request(turn=self._turn), model)
        index, adapter = self.index, self._adapter(model)
        asked = Asked(prompt, lambda ids: index.hashes(ids, adapter), len(body))
        beginning = tokens.Beginning(OPENING_BLOCKS * CHARS_PER_TOKEN * index.block_size, self._is_left)
        found = await self._pool.tokens(asked, beginning)
        self._metrics.tokenized.labels(found.outcome.value).inc()
        plan = Plan(self._request(found), model, found.made)
        if found.outcome is Tokenized.BEGUN:
            plan.opening = Opening(found.made[-1], lambda: self._place_rest(plan, body, asked.finish))
        elif found.made:
            for task in self._openings.go_on(found.made):
                await asyncio.shield(task)
        return plan

    def _request(self, found: tokens.Found) -> Request:
        return Request(found.tokens, found.tokens // self.index.block_size, turn=self._turn)

    def _is_left(self, hashes: list[int]) -> bool:
        """Whether no worker holds all of these blocks, so that none holds what comes after them."""
        if not hashes or self._openings.go_on(hashes):
            return False
        return max(self.index.matches(hashes, self._now()).values(), default=0) < len(hashes)

    def place(self, plan: Plan, tried: Collection[Worker]) -> tuple[Worker, Choice] | None:
        """The next worker for it; None where none may get it. What goes there counts as held and as load at once."""
        able = self._workers.candidates(plan.model, tried)
        now_s = self._now()
        overlaps = self._overlaps(plan.hashes, now_s) if plan.hashes and self.index is not None else {}
        choice = choose(self.config, plan.request, [self._candidate(worker, overlaps) for worker in able], self._rng)
        if choice is None:
            return None
        worker = next(one for one in able if one.url == choice.worker)
        if self.config.policy in (Policy.KV, Policy.LEAST_LOAD):
            block_size = self.index.block_size if self.index is not None else 0
            new_tokens = plan.request.prompt_tokens - choice.overlap_blocks * block_size
            self._recent[worker.url].sent(now_s, max(0, new_tokens))
        if plan.hashes and worker.url not in self.ranks:
            self.index.expect(worker.url, plan.hashes, now_s + self._options.expected_s)
        if plan.opening is not None:
            self._openings.put(plan.opening, now_s + self._options.expected_s)
        plan.worker = worker
        self._metrics.decisions.labels(choice.policy.value, choice.reason.value).inc()
        self._metrics.prompt_blocks.inc(choice.prompt_blocks)
        self._metrics.overlap_blocks.inc(choice.overlap_blocks)
        return worker, choice

    def _overlaps(self, hashes: list[int], now_s: float) -> dict[str, int]:
        """How many of these blocks each worker holds, whichever of its ranks gets the request."""
        found = self.index.matches(hashes, now_s)
        for url, names in self.ranks.items():
            found[url] = min(found.get(name, 0) for name in names)
        return found

    async def _place_rest(self, plan: Plan, body: bytes, finish: Callable[[Sequence[int]], list[int]]) -> None:
        """All blocks of a prompt count as held where its first ones still do."""
        first, opening = plan.hashes, plan.opening
        found = await self._pool.whole(body, finish)
        self._metrics.rests.labels(found.outcome.value).inc()
        plan.opening = None
        if not found.made:
            return
        plan.hashes, plan.request = found.made, self._request(found)
        if self.index.matches(first, self._now()).get(plan.worker.url) == len(first):
            self.index.expect(plan.worker.url, found.made, opening.until_s)

    def _candidate(self, worker: Worker, overlaps: dict[str, int]) -> Candidate:
        if self.config.policy in (Policy.ROUND_ROBIN, Policy.CONSISTENT_HASH):
            return Candidate(worker.url)
        overlap = overlaps.get(worker.url, 0)
        load, age_s = self._load_of(worker.url)
        if load is None or age_s > STALE_LOAD_S:
            return Candidate(worker.url, overlap, len(worker.flights))
        recent = self._recent[worker.url]
        recent.told(self._now() - age_s - UNDERWAY_S)
        return Candidate(worker.url, overlap, len(worker.flights), load, recent.tokens)

    def _adapter(self, model: str | None) -> str | None:
        """The name of the LoRA adapter that is asked for; None for the base model."""
        if model is None or not any(model in worker.models - worker.base_models for worker in self._workers):
            return None
        return model

    def close(self) -> None:
        """Forget what was put off."""
        self._openings.close()

    def _left(self, worker: Worker) -> None:
        self._recent.pop(worker.url, None)


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
