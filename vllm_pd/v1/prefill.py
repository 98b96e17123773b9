# SPDX-License-Identifier: Apache-2.0
"""The prefill engine's half of the binding, for V1's requests: see `vllm_pd.handover.prefill`.

A job is an internal request of this engine, with an id of its own: it is batched with clients' requests, uses and fills
the prefix cache, and its output goes to nobody. When it has ended its blocks are fenced and the write is posted at
once, without a step. With `push_chunks` the whole blocks that a step has filled are fenced and leave when the output of
that step is processed. V1 schedules steps ahead and may preempt the request meanwhile, so what a step will have
computed is noted when it is scheduled, and forgotten if the request has been preempted since. Blocks that have left by
then stay right: they hold the same tokens' KV.

The last write of a job with a LoRA adapter waits until a look at the adapter's files that began after the job's last
step has found them as they were at their load (`vllm_pd.v1.adapter_files`). A batch has `max_loras` adapters at most. A
job whose adapter does not fit waits for a moment, while others pass it, and is given back then.

A drafter's KV of a token depends on the next one. Behind a job that is a prompt without its last token, that is the one
which this engine would sample; so it may sample the prompt's own only (`Grant.next_token`).
"""
from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import RequestStatus

from vllm_pd.decisions import job_order
from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.handover.fence import BlockFence
from vllm_pd.handover.jobs import JobStage, PeerJob, PrefillCapacity, PromptInTurn
from vllm_pd.handover.lookups import PrefixLookups
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.prefill import PrefillHandover
from vllm_pd.handover.progress import Progress
from vllm_pd.peer.prefill import PrefillSession
from vllm_pd.protocol.messages import Attempt
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v1.adapters import AdapterBook
from vllm_pd.v1.contract import StepShare
from vllm_pd.v1.groups import longest_hit, needs_next_token, usable_hit
from vllm_pd.v1.media import MediaBook

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

    from vllm_pd.v1.engine_access import EngineAccess


CHECK_S = 5.0  # how long a computed job waits for a look at the files of its adapter
UNFIT_S = 2.0  # how long a job waits for adapters of others to leave the batch


class ScheduledChunk(NamedTuple):
    """A step that computes a job, but not its end: how many tokens are computed after it, unless the request is
    preempted once more."""
    step: int
    attempt: Attempt
    tokens: int
    preemptions: int


class AdapterCheck(NamedTuple):
    """A job that is computed, in these rows, and waits for a look at the files of its adapter."""
    adapter: LoRARequest
    block_ids: list[int]
    computed_at: float  # on the monotonic clock


class InternalRequests(PrefillHandover):
    """All jobs that a V1 engine has from peers."""

    def __init__(self, config: PDConfig, session: PrefillSession, scheduler: Scheduler, access: EngineAccess,
                 capacity: PrefillCapacity, fence: BlockFence, metrics: PDMetrics, speed: StepSpeed,
                 adapters: AdapterBook, media: MediaBook) -> None:
        self._adapters, self._media = adapters, media
        self._scheduler = scheduler
        self._access = access
        self._fence = fence
        self._rows = capacity.rows
        self._heeds_next_token = needs_next_token(scheduler, capacity.rows)
        self._attempts: dict[str, Attempt] = {}  # by request id, until the request's last output was dropped
        self._hits: dict[str, int] = {}  # by request id: the prefix hit, from the look-up to the allocation
        self._lookups: PrefixLookups | None = None
        self._parked: dict[Attempt, Request] = {}  # while a read fills their blocks
        self._aborting = False
        self._pushes_chunks = config.push_chunks
        self._chunks: collections.deque[ScheduledChunk] = collections.deque()  # of steps in flight
        self._checks: dict[Attempt, AdapterCheck] = {}
        self._unfit_since: dict[Attempt, float] = {}  # jobs that wait because of `max_loras`
        super().__init__(config, session, capacity, metrics, speed)

    def take_lookups_out_of(self, stats: SchedulerStats) -> None:
        """V1 has counted our requests' prefix look-ups since the last call in `stats`: count them no more."""
        if self._lookups is not None:
            self._lookups.take_out_of(stats)
            self._lookups = None

    def is_internal(self, request_id: str) -> bool:
        """Whether a request of this id is, or just was, one of ours."""
        return request_id in self._attempts

    @property
    def has_requests_here(self) -> bool:
        """Whether any request is one of ours."""
        return bool(self._attempts)

    def forget(self, request_id: str) -> None:
        """The last output of this request was dropped."""
        self._attempts.pop(request_id, None)
        self._hits.pop(request_id, None)

    def match(self, request: Request, cached_tokens: int) -> int:
        """How many tokens after the `cached_tokens` are to be read from the job's peer."""
        attempt = self._attempts[request.request_id]
        if not self.wants_prefix(attempt, cached_tokens):
            self._hits[request.request_id] = usable_hit(self._scheduler, self._rows, request, cached_tokens)
            return 0
        self._hits[request.request_id] = cached_tokens
        return self._jobs[attempt].prefill.cached_blocks * self._block_size - cached_tokens

    def wants_prefix(self, attempt: Attempt, cached_tokens: int) -> bool:
        """Not with an adapter: what the peer has cached would be this engine's, whatever its files were meanwhile. Nor
        with media, whose cached blocks there go by the ids of clients."""
        job = self._jobs.get(attempt)
        return (job is not None and not job.prefill.scope.adapter and not job.prefill.scope.media
                and super().wants_prefix(attempt, cached_tokens))

    def allocated(self, request: Request, tables: tuple[list[int], ...], remote_tokens: int) -> None:
        """The request has these blocks of each group. `remote_tokens`: more than 0 where it is being parked for the
        read."""
        attempt = self._attempts[request.request_id]
        cached_tokens = self._hits.pop(request.request_id, None)
        if cached_tokens is not None and not request.num_preemptions:  # V1 counts it now, see its SchedulerStats
            self._lookups = (self._lookups or PrefixLookups()) + PrefixLookups(
                1, request.num_tokens, cached_tokens, 1, request.num_tokens - cached_tokens, remote_tokens)
        if remote_tokens > 0:
            block_ids = tables[self._rows.lead]  # the only group: with several no prefix is read
            self._fence.hold(attempt, block_ids)
            self._parked[attempt] = request
            self.read_prefix(attempt, block_ids, cached_tokens)

    def leave(self, attempt: Attempt) -> Request | None:
        """The read of this attempt has ended. Returns its request; None where that was aborted."""
        return self._parked.pop(attempt, None)

    @property
    def step_tokens(self) -> int:
        """At least a block where V1 has a prompt's part of a step end with one: with less left it would compute none.
        """
        whole = self._scheduler.block_size if self._scheduler.need_mamba_block_aligned_split else 0
        return min(self._batch_tokens, max(super().step_tokens, whole))

    def arrange(self) -> StepShare | None:
        """Bring the requests that have a turn into that order: those that wait, and, behind the clients that decode,
        those that run. Returns what the step that is about to be scheduled is to compute; None: what V1 would."""
        prompts = self.begun
        if not prompts:
            return None
        scheduler = self._scheduler
        turns = {one.request_id: self.turn(one) for one in prompts}
        begun = {one.request_id: one for one in sorted(prompts, key=lambda one: turns[one.request_id])}
        self._arrange_waiting(turns)
        running = scheduler.running
        decoding = [one for one in running if one.request_id not in begun and not one.is_prefill_chunk]
        prefilling = [one for one in running if one.request_id in begun or one.is_prefill_chunk]
        ours = {one.request_id for one in prefilling if one.request_id in begun}
        jobs = [one for one in begun.values() if one.request_id in ours]
        waiting = [one for one in begun.values() if one.request_id not in ours]
        in_turn = iter(jobs)
        running[:] = decoding + [next(in_turn).request if one.request_id in ours else one for one in prefilling]
        if scheduler.max_num_encoder_input_tokens or not scheduler.scheduler_config.enable_chunked_prefill:
            return None  # V1 may have to compute the tokens of an image, or a whole prompt, in one step
        tokens = self.step_tokens
        others = sum(one.request_id not in turns for one in (*prefilling, *scheduler.waiting))
        passing = [self.tokens_left(one) for one in self.passing(jobs, waiting, turns)  # of others none passes another
                   if (others < 2 or self.is_internal(one.request_id)) and self._has_room(one, prefilling)]
        return StepShare(min(self._batch_tokens, tokens + len(decoding) * (1 + scheduler.num_spec_tokens)),
                         job_order.tokens_of_each(tokens, max(passing), len(prefilling)) if passing else 0)

    def _arrange_waiting(self, turns: dict[str, job_order.Turn]) -> None:
        if all(map(self.is_internal, turns)):
            return  # jobs are begun in their turn
        waiting = self._scheduler.waiting
        before = list(waiting)
        after = job_order.in_turn(before, lambda one: turns.get(one.request_id))
        if after != before:
            waiting.remove_requests(before)
            for one, arrived in zip(after, [one.arrival_time for one in before], strict=True):
                one.arrival_time = arrived  # by which V1 orders those of equal priority
                waiting.add_request(one)

    def _has_room(self, job: PromptInTurn, prefilling: list[Request]) -> bool:
        """Whether V1 would begin this job, or the request before it, now: beside those that are being computed, and
        without taking blocks that they will need. A job that a read has brought some tokens has its blocks."""
        scheduler, blocks_of = self._scheduler, self._capacity.blocks_of
        if len(scheduler.running) >= scheduler.max_num_active_reqs:
            return False
        if job.request.num_computed_tokens:
            return True
        first = next(iter(scheduler.waiting), job.request)
        needed = blocks_of(first.num_tokens) + sum(
            blocks_of(one.num_tokens) - blocks_of(one.num_computed_tokens) for one in prefilling)
        return needed <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def scheduled(self, step: int, request_ids: Collection[str]) -> None:
        """This step was scheduled. It computes these requests."""
        self.drop_computed(request_ids)
        for attempt, job in self._jobs.items() if self._pushes_chunks else ():
            request = job.request
            if (job.state is JobStage.COMPUTING and job.request_id in request_ids
                    and request.num_computed_tokens < request.num_tokens):
                self._chunks.append(ScheduledChunk(step, attempt, request.num_computed_tokens, request.num_preemptions))

    def step_done(self, step: int) -> bool:
        """The output of this step was processed. Returns whether some blocks of jobs hold their KV now, and may
        leave."""
        found = False
        while self._chunks and self._chunks[0].step <= step:
            chunk = self._chunks.popleft()
            job = self._jobs.get(chunk.attempt)
            if job is None or job.state is not JobStage.COMPUTING or job.request.num_preemptions != chunk.preemptions:
                continue
            tables = self._scheduler.kv_cache_manager.get_block_ids(job.request_id)
            whole = tables[self._rows.lead][:chunk.tokens // self._block_size]  # other groups' rows leave at the end
            block_ids = whole[job.prefill.cached_blocks + job.writes.added:]
            if block_ids and not job.writes.is_closed:
                self._fence.hold(chunk.attempt, block_ids)
                self.chunk_computed(chunk.attempt, block_ids)
                found = True
        return found

    def finished(self, request: Request, tables: tuple[list[int], ...], progress: Progress) -> None:
        """One of our requests has ended, and still has its blocks, those of each group."""
        attempt = self._attempts[request.request_id]
        if self._parked.pop(attempt, None) is not None:
            self.aborted(attempt)
        job = self._jobs.get(attempt)
        if job is None or self._aborting:
            return
        if request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
            self.lost(attempt, f"its request ended as {request.status.name}", progress)
            return
        first = job.prefill.cached_blocks
        try:
            block_ids = self._rows.pick(tables, len(job.prefill.token_ids), first)
            self._fence.hold(attempt, block_ids[first + job.writes.added:first + len(job.prefill.block_ids)])
        except Exception as error:
            self.lost(attempt, f"its blocks can't be held: {error}", progress)
            raise
        if request.lora_request is None:
            self.computed(attempt, block_ids, progress)
        else:
            job.state = JobStage.CHECKING
            self._checks[attempt] = AdapterCheck(request.lora_request, block_ids, time.monotonic())
            self._adapters.look()

    def give_back_namesakes(self, adapter: LoRARequest, progress: Progress) -> None:
        """A client's request has come with this adapter. Jobs with one of the same name and another number, which was
        loaded before, can't be in a batch with it."""
        loras = {attempt: self._jobs[attempt].request.lora_request for attempt in self.computing}
        self.give_back([attempt for attempt, one in loras.items() if one is not None
                        and one.lora_name == adapter.lora_name and one.lora_int_id != adapter.lora_int_id],
                       "its LoRA adapter was loaded anew", progress)

    @property
    def checks_due(self) -> float | None:
        """When the first check has waited long enough, on the monotonic clock."""
        return min((one.computed_at + CHECK_S for one in self._checks.values()), default=None)

    def check_adapters(self, progress: Progress) -> None:
        """Go on with the jobs whose adapter was looked at, and give back those that wait too long for theirs."""
        now = time.monotonic()
        for attempt, check in list(self._checks.items()):
            job = self._jobs.get(attempt)
            is_unchanged = self._adapters.unchanged_since(check.adapter, check.computed_at)
            if job is None or job.state is not JobStage.CHECKING:
                del self._checks[attempt]  # it was cancelled
            elif is_unchanged:
                del self._checks[attempt]
                self.computed(attempt, check.block_ids, progress)
            elif is_unchanged is not None or now >= check.computed_at + CHECK_S:
                del self._checks[attempt]
                what = "could not be looked at" if is_unchanged is None else "have changed"
                self.lost(attempt, f"the files of its LoRA adapter {what}", progress)
        unfit = [attempt for attempt in (*self.queued, *self.waiting) if not self._fits(self._jobs[attempt])]
        self._unfit_since = {attempt: self._unfit_since.get(attempt, now) for attempt in unfit}
        over = [attempt for attempt, since in self._unfit_since.items() if now >= since + UNFIT_S]
        self.give_back(over, f"its LoRA adapter is one more than max_loras={self._adapters.max_loras}", progress)

    def set_credits(self) -> None:
        """Tell the protocol how many more jobs this engine takes: none while it is paused or ends."""
        if self._access.takes_requests:
            super().set_credits()
        else:
            self._session.set_credits(0, is_paused=True)

    def _add_request(self, job: PeerJob) -> Request:
        """The request of V1 that computes this job. Raises ValueError where it can not run here."""
        tokens = len(job.prefill.token_ids)
        longest = min(self._scheduler.max_model_len, (self._scheduler.cache_config.num_gpu_blocks - 1)
                      * self._block_size) - max(1, self._scheduler.num_lookahead_tokens)  # its token, or a drafter's
        if tokens > longest:
            raise ValueError(f"its {tokens} tokens are more than the {longest} of this engine")
        if (blocks := self._capacity.blocks_of(tokens)) >= self._scheduler.cache_config.num_gpu_blocks:
            raise ValueError(f"it needs {blocks} blocks, which are all of this engine's")
        if not self._access.takes_requests:
            raise ValueError("this engine is paused or ends")
        if job.request_id in self._scheduler.requests:
            raise ValueError(f"there is a request {job.request_id}")
        digest = job.prefill.scope.adapter
        next_token = job.prefill.next_token if self._heeds_next_token else None
        adapter = self._adapters.request(digest) if digest else None
        features = self._media.features(job.prefill.scope, job.prefill.media, tokens, self._scheduler)
        job.prefill = msgspec.structs.replace(job.prefill, media=())  # its tensors have it now
        self._attempts[job.request_id] = job.prefill.attempt
        try:
            return self._access.add(EngineCoreRequest(
                request_id=job.request_id, prompt_token_ids=job.prefill.token_ids, mm_features=features or None,
                sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False,
                                               allowed_token_ids=None if next_token is None else [next_token]),
                pooling_params=None, arrival_time=time.time(), lora_request=adapter,
                cache_salt=job.prefill.scope.salt or None, data_parallel_rank=None, priority=job.prefill.priority))
        except Exception:
            self.forget(job.request_id)
            raise

    def _fits(self, job: PeerJob) -> bool:
        """Whether V1 may compute its adapter beside those of the batch, of which there are `max_loras` at most. A job
        that is yet to begin leaves room for what waits in V1, too, so that jobs never starve clients. V1 knows adapters
        by number in some places and by name in others, so no two of one name may be in a batch."""
        if not job.prefill.scope.adapter:
            return True
        scheduler = self._scheduler
        if job.request is not None:
            adapter, others = job.request.lora_request, scheduler.running  # V1 has the last word
        else:
            try:
                adapter = self._adapters.request(job.prefill.scope.adapter)
            except ValueError:
                return True  # it is refused when it begins
            others = (*scheduler.running, *scheduler.waiting)
        return self._adapters.fits(adapter, others) and not any(
            one.lora_request is not None and one.lora_request.lora_name == adapter.lora_name
            and one.lora_request.lora_int_id != adapter.lora_int_id for one in others)

    def _abort_request(self, job: PeerJob) -> None:
        self._aborting = True
        try:
            self._scheduler.finish_requests(job.request_id, RequestStatus.FINISHED_ABORTED)
        finally:
            self._aborting = False
        self.forget(job.request_id)

    def _is_waiting(self, job: PeerJob) -> bool:
        return job.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    def _is_ready(self, prompt: PromptInTurn) -> bool:
        return prompt.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.RUNNING)

    def _tokens_left(self, prompt: PromptInTurn) -> int:
        return prompt.request.num_tokens - prompt.request.num_computed_tokens

    def _cached_tokens(self, prompt: PromptInTurn) -> int:
        if self._rows.state_tokens or self._rows.sizes:
            return longest_hit(self._scheduler, prompt.request)
        find = self._scheduler.kv_cache_manager.block_pool.get_cached_block
        hits = itertools.takewhile(lambda name: find(name, [self._rows.lead]) is not None, prompt.request.block_hashes)
        return self._block_size * sum(1 for _ in hits)

    @property
    def _by_priority(self) -> bool:
        return self._scheduler.scheduler_config.policy == "priority"
