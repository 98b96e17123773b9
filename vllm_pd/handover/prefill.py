# SPDX-License-Identifier: Apache-2.0
"""The prefill engine's half of a binding: jobs of peers as requests of this engine.

Life of a job: it waits for its turn (QUEUED, see `vllm_pd.decisions.job_order`) and becomes a request for one token
(COMPUTING); when that has finished, its blocks are held and `computed` is called; the binding posts the write with the
requests that it takes (SENDING). When it ends, the end is reported to the peer at once, in the thread that saw it, and
the step loop frees the blocks later. Whatever goes wrong on the way, the peer gets a message and the blocks are freed.

A binding may send the first blocks while the rest is computed: it holds them and calls `chunk_computed` after each step
(`vllm_pd.protocol.writes`). Then a job has several writes, one at a time. The next one is posted by the thread that
sees the end of the one before, for a step may take long. The peer gets its message when the last of them has ended.

Where the peer has more of the prompt in its prefix cache than this engine, and reading that is quicker than computing
it, the request is parked before it is computed, and the read goes into its pending blocks (READING). When it has ended
they enter this engine's prefix cache and the request waits again, in front. That is so only if the read succeeded and
the lease is still valid: of a read that failed, or ended too late, nothing is kept.

A client's prompt that this engine is to keep (prefill first) has its turn among the jobs, but is the scheduler's from
the beginning: it is in `begun` until a step computes the last of it.

A transfer that failed may still land (`Finished.may_land`). After a write the peer learns that, and keeps its blocks
until this engine is dead; what was sent from here may be reused at once. After a read the job is given up, and takes
no place among the others; the blocks that the read may fill stay set aside until the peer is dead.
"""
from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from vllm_pd.decisions import job_order
from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.decisions.prefix import PrefixCost, PrefixReads
from vllm_pd.handover.jobs import (
    NOT_COMPUTED,
    JobStage,
    OpenTransfer,
    PeerJob,
    PrefillCapacity,
    PromptInTurn,
    read_key,
    write_key,
)
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.progress import ArrivalNotice, Progress
from vllm_pd.peer.prefill import PrefillSession
from vllm_pd.protocol.actions import AddPeer, Cancelled, DropPeer, Event, Prefill
from vllm_pd.protocol.messages import Attempt, Timings
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer import requests as transfer

logger = logging.getLogger("vllm.pd")


class PrefillHandover(ABC):
    """All jobs that this engine has from peers. Used from the step loop only, except `report_end`. None come before the
    first `set_credits`. A binding derives from it and says what a request of its engine is (at the end)."""

    def __init__(self, config: PDConfig, session: PrefillSession, capacity: PrefillCapacity, metrics: PDMetrics,
                 speed: StepSpeed) -> None:
        self._session = session
        self._speed = speed
        self._metrics = metrics
        self._max_jobs = config.max_prefill_jobs
        self._most_reading_blocks = int(config.max_parked_fraction * capacity.total_blocks)
        self.quarantined_blocks = 0  # which peers may still write, as a decode engine
        self._order = config.job_order
        self._batch_tokens = capacity.batch_tokens
        self._jobs: dict[Attempt, PeerJob] = {}
        self._to_keep: dict[str, PromptInTurn] = {}  # clients' prompts that are to be kept, by request id
        self._open: dict[str, OpenTransfer] = {}  # by key, until the step loop has seen the end
        self._writes_lock = threading.Lock()  # for `PeerJob.writes` and `cancelled`, and between a write and its cancel
        # Executes transfer requests at once, in any thread. None: they travel with steps, and a job has one write.
        self.execute: Callable[[list[transfer.TransferRequest]], None] | None = None
        self.after_step = 0  # the last step whose output was processed, for `transfer.Write`
        self._requests: list[transfer.TransferRequest] = []
        self._unproven_reads: list[PeerJob] = []  # whose reads may land in our blocks
        self.prefix_cost = PrefixCost(PrefixReads(config.prefix_reads)
                                      if capacity.caching and not config.is_two_sided else PrefixReads.NEVER,
                                      capacity.token_bytes, speed)
        self._capacity = capacity
        self._block_size = capacity.rows.block_size
        self._ranks = capacity.ranks

    @property
    def sending(self) -> bool:
        """Whether a write or a read is under way, or its end is not processed yet."""
        return bool(self._open)

    @property
    def unproven_blocks(self) -> int:
        """How many blocks are set aside for reads that have failed and may still land."""
        return sum(job.parked_blocks for job in self._unproven_reads)

    @property
    def _lasting_blocks(self) -> int:
        """How many blocks may be set aside for as long as both this engine and a peer live."""
        return self.unproven_blocks + self.quarantined_blocks + self._session.lasting_hold_blocks()

    @property
    def requests_here(self) -> int:
        """Jobs that are requests of the engine which it has not computed yet."""
        return sum(job.request is not None and job.state in NOT_COMPUTED for job in self._jobs.values())

    @property
    def idle(self) -> bool:
        """Whether a step has nothing to do here: no job, no client's prompt in turn, no transfer request."""
        return not (self._jobs or self._to_keep or self._requests)

    @property
    def has_requests(self) -> bool:
        """Whether the next step has transfer requests for the worker."""
        return bool(self._requests) or any(job.state is JobStage.COMPUTED for job in self._jobs.values())

    @property
    def queued(self) -> list[Attempt]:
        """The jobs that wait for their turn."""
        return [attempt for attempt, job in self._jobs.items() if job.state is JobStage.QUEUED]

    @property
    def waiting(self) -> list[Attempt]:
        """The jobs that have had their turn, and wait for their first step."""
        return [attempt for attempt in self.computing if self._is_waiting(self._jobs[attempt])]

    @property
    def computing(self) -> list[Attempt]:
        """The jobs that have had their turn and are not computed yet; those that read their beginning are not among
        them."""
        return [attempt for attempt, job in self._jobs.items() if job.state is JobStage.COMPUTING]

    @property
    def unsent(self) -> list[Attempt]:
        """The jobs that are computed, and whose last write goes with the next step."""
        return [attempt for attempt, job in self._jobs.items() if job.state is JobStage.COMPUTED]

    @property
    def reading(self) -> list[Attempt]:
        """The jobs that read their beginning, and would be computed then."""
        return [attempt for attempt, job in self._jobs.items() if job.state is JobStage.READING and not job.cancelled]

    @property
    def step_tokens(self) -> int:
        """How many tokens a step with jobs computes, at most."""
        return job_order.step_tokens(self._speed.tokens_per_s, self._order.step_s, self._batch_tokens)

    def turn(self, prompt: PromptInTurn) -> job_order.Turn:
        """The prompt's place in the order of jobs."""
        return job_order.Turn(prompt.priority if self._by_priority else 0, self._order.due_s(
            prompt.started_at, prompt.new_tokens, self._speed.tokens_per_s))

    @property
    def begun(self) -> list[PromptInTurn]:
        """The prompts in turn that the scheduler has and may compute, and that are not computed yet."""
        return [*(job for job in self._jobs.values() if job.state is JobStage.COMPUTING),
                *filter(self._is_ready, self._to_keep.values())]

    def begin(self) -> None:
        """Add the requests of those queued jobs that the next step would compute, in their turn. Clients' prompts don't
        count: where one of them finds no room, the jobs behind it are given back."""
        while queued := [job for job in self._jobs.values() if job.state is JobStage.QUEUED and self._fits(job)]:
            job = min(queued, key=self.turn)
            begun = [self._begun_job(one) for one in self._jobs.values() if one.state is JobStage.COMPUTING]
            if not job_order.may_begin(self.turn(job), begun, self.step_tokens):
                return
            self._begin(job)

    def passing(self, running: list[PromptInTurn], waiting: Iterable[PromptInTurn],
                turns: Mapping[str, job_order.Turn]) -> list[PromptInTurn]:
        """Those of the `waiting` prompts, all begun, that the next step would begin before the end of one that is
        `running`. Both are in the order of their `turns`, which are by request id."""
        found: list[PromptInTurn] = []
        tokens, place = 0, 0  # how many are left before this prompt, and how many of the `running` that counts
        for prompt in waiting if running else ():
            turn = turns[prompt.request_id]
            if turn >= turns[running[-1].request_id]:
                break
            while turns[running[place].request_id] <= turn:
                tokens += self.tokens_left(running[place])
                place += 1
            if tokens >= self.step_tokens:
                break
            found.append(prompt)
            tokens += self.tokens_left(prompt)
        return found

    def tokens_left(self, prompt: PromptInTurn) -> int:
        """How many tokens of a prompt that has begun have to be computed yet."""
        left = self._tokens_left(prompt)
        return left if left < prompt.tokens else max(1, left - prompt.cached_tokens)

    def _begun_job(self, prompt: PromptInTurn) -> job_order.BegunJob:
        return job_order.BegunJob(self.turn(prompt), self.tokens_left(prompt))

    def add_prompt(self, request_id: str, request: Any, tokens: int, priority: int) -> None:
        """A client's request has come with a prompt of so many tokens, which is to be kept: it is computed in its
        turn."""
        prompt = PromptInTurn(request_id=request_id, started_at=time.monotonic(), priority=priority, tokens=tokens,
                              new_tokens=tokens, request=request)
        prompt.cached_tokens = self._cached_tokens(prompt)
        prompt.new_tokens = max(1, tokens - prompt.cached_tokens)
        self._to_keep[request_id] = prompt

    def drop_prompt(self, request_id: str) -> None:
        """This request has ended. No effect for any other."""
        self._to_keep.pop(request_id, None)

    def drop_computed(self, request_ids: Collection[str]) -> None:
        """A step was scheduled that computes these requests. Those whose prompt it ends have no turn any more."""
        for request_id in self._to_keep.keys() & set(request_ids):
            if self._tokens_left(self._to_keep[request_id]) <= 0:
                del self._to_keep[request_id]

    @property
    def job_tokens(self) -> int:
        """Tokens of the jobs that are not computed yet, without what their decode engines have cached. What is cached
        here counts: it is known of a job when it begins, and the broker compares whole jobs with those it offered."""
        return sum(job.new_tokens for job in self._jobs.values() if job.state in NOT_COMPUTED)

    def give_back(self, attempts: Iterable[Attempt], reason: str, progress: Progress) -> None:
        """Give up these jobs, of which no write is under way: their decode engines try another peer."""
        for attempt in attempts:
            logger.info("job %s is given back: %s", attempt, reason)
            job = self._jobs[attempt]
            if job.state is JobStage.READING:
                job.lost_because = reason  # the peer hears it when the read has ended
                self._abort_request(job)  # which calls `aborted`
            else:
                self._drop(job, reason, progress)

    def set_credits(self) -> None:
        """Tell the protocol how many more jobs this engine takes, and how many tokens those have that it has to
        compute. To be called after events were handled."""
        taken = sum(not job.cancelled for job in self._jobs.values())  # the others may wait for a peer that is stopped
        self._session.set_credits(max(0, self._max_jobs - taken), self.job_tokens)

    def handle(self, event: Event, progress: Progress) -> None:
        """Handle an event of the protocol."""
        if isinstance(event, Prefill):
            self._take(event)
            self.begin()
        elif isinstance(event, Cancelled):
            self._cancel(event.attempt, progress)
        elif isinstance(event, AddPeer):
            self._requests.append(transfer.AddTransferPeer(event.name, event.metadata))
        elif isinstance(event, DropPeer):
            self._requests.append(transfer.DropTransferPeer(event.name))

    def ignored(self, attempt: Attempt) -> None:
        """The scheduler refused the job's request: it fits neither the pool nor the batch. It owns no blocks."""
        if self._jobs.pop(attempt, None) is not None:
            self._session.failed(attempt, "the prompt does not fit this engine")

    def wants_prefix(self, attempt: Attempt, cached_tokens: int) -> bool:
        """Whether the beginning of this waiting job's prompt, of which `cached_tokens` are cached here, is to be read
        from the peer first. At most once a job: a read that failed is not repeated. Not once some of its blocks leave:
        a job that V1 has preempted would read and write at the same time, and the first end would free the blocks of
        the other. Nor where the blocks of all reads, any of which may fail, would be more than `max_parked_fraction` of
        the pool."""
        job = self._jobs.get(attempt)
        if job is None or job.read_tokens or job.writes.added:
            return False
        reading = sum(one.parked_blocks for one in self._jobs.values() if one.state is JobStage.READING)
        if self._lasting_blocks + reading + self._capacity.blocks_of(job.tokens) > self._most_reading_blocks:
            return False
        return self.prefix_cost.worth_reading(job.prefill.cached_blocks * self._block_size - cached_tokens)

    def read_prefix(self, attempt: Attempt, block_ids: list[int], cached_tokens: int) -> None:
        """The job's request is parked with these blocks, of the whole prompt or of what is read. The read goes with the
        coming step."""
        job = self._jobs[attempt]
        job.parked_blocks = len(block_ids)
        first, last = cached_tokens // self._block_size, job.prefill.cached_blocks
        job.read_tokens = last * self._block_size - cached_tokens
        job.state = JobStage.READING
        self._open[read_key(attempt)] = OpenTransfer(job, None)
        self._requests.append(transfer.Read(read_key(attempt), job.prefill.peer, list(block_ids[first:last]),
                                            job.prefill.cached_block_ids[first:last], self.after_step))

    def aborted(self, attempt: Attempt) -> None:
        """The job's request was aborted while it was parked. Its blocks stay until the read has ended."""
        job = self._jobs.get(attempt)
        if job is not None and job.state is JobStage.READING and not job.cancelled:
            job.cancelled = True
            self._requests.append(transfer.CancelTransfer(read_key(attempt)))

    def lost(self, attempt: Attempt, reason: str, progress: Progress) -> None:
        """The job's request has ended early, and not by a message of the peer. A read that fills its blocks has been
        cancelled by then, see `aborted`; the peer hears when that has ended."""
        job = self._jobs[attempt]
        if job.state is JobStage.READING:
            job.lost_because = reason
        else:
            self._stop_writes(job, reason, progress)

    def chunk_computed(self, attempt: Attempt, block_ids: list[int]) -> None:
        """The job's next blocks hold their KV for good, and the binding holds them; more follow. They may leave."""
        with self._writes_lock:
            self._jobs[attempt].writes.add(block_ids, is_last=False)

    def computed(self, attempt: Attempt, block_ids: list[int], progress: Progress) -> None:
        """The prompt is computed, in these rows (`protocol.rows`), whose blocks the scheduler or the binding keeps."""
        job = self._jobs.get(attempt)
        if job is None:  # it was cancelled
            progress.finished_transfers.append(attempt)
            return
        cached = job.prefill.cached_blocks
        job.prefill_s = time.monotonic() - job.started_at
        with self._writes_lock:
            job.writes.add(block_ids[cached + job.writes.added:cached + len(job.prefill.block_ids)], is_last=True)
        self._metrics.job(len(job.prefill.token_ids))
        job.state = JobStage.COMPUTED

    def append_requests(self, requests: list[transfer.TransferRequest]) -> None:
        """These go to the ranks in order with the others that `take_requests` returns."""
        self._requests += requests

    def return_requests(self, requests: list[transfer.TransferRequest]) -> None:
        """These were taken by `take_requests`, but their step was given up."""
        self._requests[:0] = requests

    def take_requests(self, progress: Progress) -> list[transfer.TransferRequest]:
        """The transfer requests that are due, for the step that is about to run (V0) or for now (V1). The lease is
        checked here, right before the post."""
        requests, self._requests = self._requests, []
        over: list[PeerJob] = []
        for job in list(self._jobs.values()):
            if job.state is JobStage.COMPUTED:
                job.state = JobStage.SENDING
            elif job.state is not JobStage.COMPUTING:
                continue
            with self._writes_lock:
                write = self._next_write(job)
                has_failed = job.writes.is_over and bool(job.writes.error)  # else `report_end` says that all was sent
            if write is not None:
                requests.append(write)
            elif has_failed:
                over.append(job)
        for job in over:
            self._session.failed(job.prefill.attempt, job.writes.error)
            # Its request may end here, and with it this is called again, for the others.
            if self._jobs.get(job.prefill.attempt) is job and not self._has_open(job):
                self._end(job, progress)
        with self._writes_lock:
            self._metrics.sending_blocks.set(sum(job.writes.unsent_blocks for job in self._jobs.values()))
        return requests

    def report_end(self, end: transfer.Finished) -> None:
        """Go on after the end of a transfer. Post the job's next write, or report to the peer that the job has ended.
        Called in any thread, before `ended`; the step loop may be in a forward pass."""
        job, write = self._open.get(end.key, (None, None))
        if job is None:
            return
        attempt = job.prefill.attempt
        if write is None:
            if end.may_land:
                self._session.read_unproven(attempt, f"the read failed: {end.error}")
            elif job.cancelled:
                self._report_stop(job)
            return  # otherwise the job goes on
        if end.may_land:
            self._session.unproven(attempt, f"the transfer failed: {end.error}")
        with self._writes_lock:
            job.writes.end(end.ok, end.bytes, f"the transfer failed: {end.error}")
            following = self._next_write(job)
            if following is not None:
                if job.writes.is_complete:
                    job.waited_s = time.monotonic() - job.started_at - job.prefill_s
                self._post(job, following)
            cancelled, error, is_over = job.cancelled, job.writes.error, job.writes.is_over
        if not is_over:
            return
        if cancelled:
            self._session.ended(attempt)
        elif error:
            self._session.failed(attempt, error)
        else:
            self._session.sent(attempt, Timings(prefill_s=job.prefill_s, transfer_s=job.waited_s + end.seconds,
                                                 bytes=job.writes.bytes, measured=True, last_bytes=end.bytes))

    def ended(self, end: transfer.Finished, progress: Progress) -> None:
        """Free what a write or a read held that has ended."""
        job, write = self._open.pop(end.key, (None, None))
        if job is None:
            return
        if write is None:
            if end.may_land:
                self._give_up_read(job, end)
            else:
                self._read(job, end, progress)
            return
        if not write.is_last:
            progress.sent_blocks.append((job.prefill.attempt, write.local_block_ids))
        if job.writes.is_over and not self._has_open(job):
            self._end(job, progress)
        if end.ok and not job.cancelled:
            self._metrics.transfer_bytes(end.bytes)
            self.prefix_cost.moved(len(write.local_block_ids) * self._block_size, end.seconds)

    def free_unproven(self, progress: Progress) -> None:
        """Free what failed reads may have filled, once nothing of them lands any more."""
        for job in [one for one in self._unproven_reads if not self._session.may_land(one.prefill.attempt)]:
            self._unproven_reads.remove(job)
            progress.finished_transfers.append(job.prefill.attempt)

    def _next_write(self, job: PeerJob) -> transfer.Write | None:
        """The job's next write, if one is due. Its lease is checked here, right before the post: without it no write
        follows. To be called with the lock."""
        attempt, writes = job.prefill.attempt, job.writes
        if not writes.is_due:
            return None
        # D looks for the notice from the message on that `may_write` sends.
        if not (self._session.may_write if writes.is_complete else self._session.lease_stands)(attempt):
            writes.close("the lease ran out before the write")
            return None
        write = writes.begin()
        key = write_key(attempt, write)
        self._open[key] = OpenTransfer(job, write)
        notices = [ArrivalNotice(attempt, rank).encode() if write.is_last else b"" for rank in range(self._ranks)]
        return transfer.Write(key, job.prefill.peer, write.local_block_ids, write.remote_block_ids, notices,
                              self.after_step, grant=str(attempt))

    def _post(self, job: PeerJob, write: transfer.Write) -> None:
        """Post a write that has begun. One that can't be posted has failed, for its end would never come. To be called
        with the lock."""
        try:
            self.execute([write])
        except Exception as error:
            logger.exception("unexpected error: a write of job %s can't be posted", job.prefill.attempt)
            del self._open[write.key]
            job.writes.end(False, error=f"the write can't be posted: {error!r}")

    def _stop_writes(self, job: PeerJob, reason: str, progress: Progress) -> None:
        """Begin no write of this job any more, whose request is gone. The peer gets its message when none is under way:
        the reason, or, where that is empty, the answer to its cancel. What is held for the job comes free then, which
        may be blocks that are in no write yet."""
        attempt = job.prefill.attempt
        with self._writes_lock:
            write = job.writes.close(reason)
            job.cancelled = job.cancelled or not reason
        if write is not None:
            self._requests.append(transfer.CancelTransfer(write_key(attempt, write)))
        elif reason:
            self._session.failed(attempt, reason)
        else:
            self._session.ended(attempt)
        if self._has_open(job):
            job.state = JobStage.SENDING
        else:
            del self._jobs[attempt]
            progress.finished_transfers.append(attempt)

    def _has_open(self, job: PeerJob) -> bool:
        """Whether a transfer of this job is under way, or its end is not processed yet."""
        return any(one.job is job for one in list(self._open.values()))

    def _report_stop(self, job: PeerJob) -> None:
        """Tell the peer that nothing of this job moves any more, which was cancelled while it read."""
        if job.lost_because:
            self._session.failed(job.prefill.attempt, job.lost_because)
        else:
            self._session.ended(job.prefill.attempt)

    def _give_up_read(self, job: PeerJob, end: transfer.Finished) -> None:
        """The job's read has failed, and may still land. The scheduler, or the binding, keeps the blocks of the parked
        request until `free_unproven`."""
        logger.warning("job %s is given up, for its prefix could not be read: %s", job.prefill.attempt, end.error)
        self._metrics.prefix_read("failed", 0)
        job.cancelled = True  # so that `aborted` cancels nothing
        try:
            self._abort_request(job)
        finally:  # whatever it raises, it is not forgotten what may land
            del self._jobs[job.prefill.attempt]
            self._unproven_reads.append(job)

    def _read(self, job: PeerJob, end: transfer.Finished, progress: Progress) -> None:
        attempt = job.prefill.attempt
        arrived = end.ok and not job.cancelled and self._session.lease_stands(attempt)
        self._metrics.prefix_read("done" if arrived else "late" if end.ok or job.cancelled else "failed",
                                  end.bytes if arrived else 0)
        if arrived:
            progress.read_prefixes[attempt] = job.prefill.cached_blocks * self._block_size
        else:
            progress.failed_prefills.append(attempt)
        progress.finished_transfers.append(attempt)
        if job.cancelled:
            del self._jobs[attempt]
            self._report_stop(job)  # again, for it may have been cancelled since `report_end`
            return
        if end.ok:
            self.prefix_cost.moved(job.read_tokens, end.seconds)
        else:
            logger.warning("job %s computes what could not be read from its peer: %s", attempt, end.error)
        job.state = JobStage.COMPUTING

    def refused(self, refusal: transfer.PeerRefusal, progress: Progress) -> None:
        """The transport could not add a peer: nothing can be written there. Its jobs are given back."""
        logger.error("peer %s can't be reached by the transport: %s", refusal.peer, refusal.reason)
        self._session.peer_unadded(refusal.peer, refusal.reason)
        attempts = [*self.computing, *self.reading, *self.queued]
        self.give_back([attempt for attempt in attempts if self._jobs[attempt].prefill.peer == refusal.peer],
                       f"the transport could not add the decode engine: {refusal.reason}", progress)

    def _take(self, prefill: Prefill) -> None:
        attempt, token_ids = prefill.attempt, prefill.token_ids
        if self._session.state.has_other_weights:  # it was on its way
            self._refuse(attempt, "its weights were replaced")
        elif 0 <= min(token_ids) <= max(max(token_ids), prefill.next_token or 0) < self._capacity.vocab_size:
            self._jobs[attempt] = PeerJob.of(prefill, self._block_size, time.monotonic())
        else:
            self._refuse(attempt, f"a token id is outside the vocabulary of {self._capacity.vocab_size}")

    def _begin(self, job: PeerJob) -> None:
        job.state = JobStage.COMPUTING
        try:
            job.request = self._add_request(job)
            cached_tokens, theirs = self._cached_tokens(job), job.prefill.cached_blocks * self._block_size
            self._check_room(job, cached_tokens // self._block_size)
            job.cached_tokens = theirs if self.wants_prefix(job.prefill.attempt, cached_tokens) else cached_tokens
        except Exception as error:  # an error in a peer's prompt must not end this engine
            self._abort_request(job)
            del self._jobs[job.prefill.attempt]
            self._refuse(job.prefill.attempt, str(error))

    def _check_room(self, job: PeerJob, cached_blocks: int) -> None:
        """Raises ValueError for a job that would wait until a peer dies: another prefill engine may have room. Its
        prefix hit of `cached_blocks` may be in blocks that a decode engine has claimed."""
        stopping = sum(one.held_blocks for one in self._jobs.values() if one.cancelled)
        cached_blocks = min(cached_blocks, self._session.lasting_hold_blocks())
        self._capacity.check_room(job.tokens, cached_blocks, self._lasting_blocks + stopping)

    def _refuse(self, attempt: Attempt, problem: str) -> None:
        logger.warning("job %s can't run here: %s", attempt, problem)
        self._session.failed(attempt, f"the prefill engine can't run it: {problem}")

    def _cancel(self, attempt: Attempt, progress: Progress) -> None:
        job = self._jobs.get(attempt)
        if job is None:
            self._session.ended(attempt)
        elif job.state is JobStage.READING:
            self._abort_request(job)  # which calls `aborted`
        elif not job.cancelled:
            self._drop(job, "", progress)

    def _drop(self, job: PeerJob, reason: str, progress: Progress) -> None:
        """Stop the job, and its request if that is being computed. For `reason` see `_stop_writes`."""
        is_computing = job.state is JobStage.COMPUTING
        self._stop_writes(job, reason, progress)
        if is_computing:
            self._abort_request(job)

    def _end(self, job: PeerJob, progress: Progress) -> None:
        """The job is over. Its request may still be computed, if a write has failed."""
        del self._jobs[job.prefill.attempt]
        progress.finished_transfers.append(job.prefill.attempt)
        if job.state is JobStage.COMPUTING:
            self._abort_request(job)

    def find(self, attempt: Attempt) -> JobStage | None:
        """The state of a job, for tests."""
        job = self._jobs.get(attempt)
        return None if job is None else job.state

    # What a binding knows of its engine.

    def _fits(self, job: PeerJob) -> bool:
        """Whether it may begin beside what is computed now."""
        return True

    @abstractmethod
    def _add_request(self, job: PeerJob) -> Any:
        """Add a request for one token of the job's prompt under the job's `request_id`, and return it. Whatever it
        raises is the reason why the job can't run here."""

    @abstractmethod
    def _abort_request(self, job: PeerJob) -> None:
        """Abort the job's request. An unknown one is no error."""

    @abstractmethod
    def _is_waiting(self, job: PeerJob) -> bool:
        """Whether the job's request waits for its first step."""

    @abstractmethod
    def _is_ready(self, prompt: PromptInTurn) -> bool:
        """Whether a client's prompt is being computed or waits for nothing but a step."""

    @abstractmethod
    def _tokens_left(self, prompt: PromptInTurn) -> int:
        """How many tokens of a prompt that has begun are in no step yet. Until its first step these are all."""

    @abstractmethod
    def _cached_tokens(self, prompt: PromptInTurn) -> int:
        """How many tokens at the beginning of the prompt are in this engine's prefix cache now."""

    @property
    @abstractmethod
    def _by_priority(self) -> bool:
        """Whether the engine goes by the priority of requests."""
