# SPDX-License-Identifier: Apache-2.0
"""The decode engine's half of the binding: which prompts go to a peer, and what becomes of them.

Life of a parked group: `choose` draws an attempt for it, the scheduler parks it and calls `start`; then an event of the
protocol ends the attempt, which the scheduler learns with the next step. After an attempt that failed the group waits
again, in front, and `choose` is asked anew: for another attempt, on another peer, or for none. Groups that will be
prefilled here are given back batch by batch, so that the running ones go on. The blocks belong to the scheduler
throughout.

Two records hold all that is known: a `RemoteRequest` for as long as its group lives, and a `RemoteAttempt` for as long
as blocks are set aside for an attempt. A request may have a second attempt while a peer may still write the first one's
blocks.
"""
from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from vllm_pd.config import PDConfig
from vllm_pd.control.protocol import PeerProtocol
from vllm_pd.core.actions import Event, Fallback, Prefilled, Released, Timed
from vllm_pd.core.messages import Attempt, Timings
from vllm_pd.core.pace import FallbackPace
from vllm_pd.core.policy import Decision, PolicyConfig, PolicyInput, decide
from vllm_pd.metrics import PDMetrics
from vllm_pd.v0.features import can_go_remote
from vllm_pd.v0.progress import ArrivalNotice, Progress

if TYPE_CHECKING:
    from vllm.core.scheduler import Scheduler
    from vllm.sequence import SequenceGroup, SequenceGroupBase

    from vllm_pd.control.cluster import QueueView

logger = logging.getLogger("vllm.pd")


@dataclass
class RemoteRequest:
    """A request that was decided about. Times are those of the monotonic clock, `resumed_at` that of the wall clock."""
    stays: bool = False  # it is not asked about again
    began_at: float | None = None  # its first attempt
    parked_at: float = 0.0  # the last time
    resumed_at: float | None = None  # scheduled again with its KV
    attempts: int = 0
    failed_peers: tuple[str, ...] = ()


class AttemptStage(Enum):
    """What became of an attempt here."""
    PARKED = "parked"  # its group is parked, and waits for a peer
    FAILED = "failed"  # it has ended without the KV; its group is parked until its turn
    LEFT = "left"  # its group was aborted or waits again


@dataclass
class RemoteAttempt:
    """An attempt with `blocks` set aside for it, beyond its prefix hit, until they may be reused."""
    request: RemoteRequest
    blocks: int
    stage: AttemptStage = AttemptStage.PARKED
    released: bool = False  # no peer will write the blocks any more, but its group has them still


class RemotePrefills:
    """All prompts of one decode engine that are, or may be, prefilled elsewhere. Used from the step loop only."""

    def __init__(self, config: PDConfig, protocol: PeerProtocol, scheduler: Scheduler, metrics: PDMetrics,
                 split_requests: Mapping[str, SequenceGroupBase]) -> None:
        self._protocol = protocol
        self._scheduler = scheduler
        self._metrics = metrics
        self._split_requests = split_requests
        self._caching = bool(scheduler.cache_config.enable_prefix_caching)
        self._block_size = scheduler.cache_config.block_size
        self._policy = PolicyConfig(max_local_prefill_tokens=config.max_local_prefill_tokens,
                                    max_queue_length=config.max_queue_length,
                                    max_parked_fraction=config.max_parked_fraction,
                                    attempts=config.attempts)
        self._deadline_s = config.attempt_deadline_s
        self._batch_tokens = scheduler.scheduler_config.max_num_batched_tokens
        self._requests: weakref.WeakKeyDictionary[SequenceGroup, RemoteRequest] = weakref.WeakKeyDictionary()
        self._attempts: dict[Attempt, RemoteAttempt] = {}
        self._resuming: list[SequenceGroup] = []  # their KV has come; they have no token yet
        self._pace = FallbackPace(config.max_fallback_share)
        self._batch: list[SequenceGroup] = []  # the last ones that were given back to be prefilled here

    @property
    def waiting_for_peers(self) -> bool:
        """Whether a notice may arrive."""
        return bool(self._attempts)

    def debug_state(self) -> dict[str, int]:
        """How many attempts have blocks, how many of them failed and were not given back, and how many groups wait for
        their first token: for tests and chaos. All are 0 at rest."""
        return {"held_blocks": len(self._attempts),
                "given_up": sum(attempt.stage is AttemptStage.FAILED or attempt.released
                                for attempt in self._attempts.values()),
                "resumed": len(self._resuming)}

    def choose(self, seq_group: SequenceGroup, cached_tokens: int) -> Attempt | None:
        """The attempt under which the group's prompt is to be prefilled elsewhere, or None. Counted once a stay in
        the waiting queue: a group that is to stay is not asked about again."""
        request = self._request(seq_group)
        if request.stays:
            return None
        decision = self._decide(seq_group, cached_tokens, request, self._protocol.view(request.failed_peers),
                                self._count_blocks(), len(self._scheduler.remote_prefilling))
        self._metrics.decision("remote" if decision.remote else "local", decision.reason.value)
        if not decision.remote:
            self._stay(seq_group)
            return None
        if request.began_at is None:
            request.began_at = time.monotonic()
        request.attempts += 1
        return self._protocol.next_attempt(seq_group.request_id)

    def waits_for_sibling(self, seq_group: SequenceGroup) -> bool:
        """Whether another part of the same request (n > 1) is parked. Once that one is done, or has to stay here, all
        of them stay."""
        from vllm.sequence import SequenceStatus
        return any(group.first_seq.status is SequenceStatus.REMOTE_PREFILLING for group in self._siblings(seq_group))

    def start(self, attempt: Attempt, seq_group: SequenceGroup, block_ids: list[int], cached_tokens: int) -> None:
        """The group is parked: submit its job. `block_ids` are those of the whole prompt, the cached prefix
        included."""
        cached_blocks = cached_tokens // self._block_size
        request = self._requests[seq_group]
        request.parked_at = time.monotonic()
        self._attempts[attempt] = RemoteAttempt(request, len(block_ids) - cached_blocks)
        if seq_group in self._batch:  # it was to be prefilled here, but now there is a peer for it
            self._batch.remove(seq_group)
        self._protocol.submit(attempt, list(seq_group.first_seq.prompt_token_ids), list(block_ids), cached_blocks,
                              request.failed_peers, self._time_left_s(request))

    def abort(self, attempt: Attempt) -> None:
        """The client is gone. The blocks come back with the attempt's Released."""
        self._protocol.abort(attempt)
        remote = self._attempts.get(attempt)
        if remote is None:
            return
        if remote.stage is AttemptStage.PARKED:  # else it has ended, and was counted
            self._metrics.attempt("cancelled")
        remote.stage = AttemptStage.LEFT

    def notice(self, payload: bytes) -> None:
        """A notice has arrived with a peer's write. One that can't be decoded is counted and dropped."""
        notice = ArrivalNotice.decode(payload)
        if notice is None:
            self._metrics.frames_dropped("notice_malformed")
        else:
            self._protocol.arrived(notice.attempt, notice.rank)

    def handle(self, event: Event, progress: Progress) -> None:
        """Turn an event of the protocol into progress for the scheduler."""
        if isinstance(event, Prefilled):
            remote = self._attempts.pop(event.attempt, None)
            progress.finished_prefills.append(event.attempt)
            self._metrics.attempt("done")
            self._count_timings(event.timings)
            seq_group = self._scheduler.remote_prefilling.get(event.attempt)
            if seq_group is not None:
                remote.request.attempts = self._policy.attempts  # if it is preempted later, it stays here (B8)
                for sibling in self._siblings(seq_group):
                    if sibling is not seq_group:
                        self._request(sibling).stays = True
                self._resuming.append(seq_group)
        elif isinstance(event, Timed):
            self._count_timings(event.timings)
        elif isinstance(event, Fallback):
            self._fall_back(event)
        elif isinstance(event, Released):
            remote = self._attempts.get(event.attempt)
            if remote is not None and remote.stage is AttemptStage.FAILED:
                remote.released = True
            else:
                self._free(event.attempt, progress)

    def scheduled(self) -> None:
        """The scheduler has resumed the groups whose KV has come."""
        for seq_group in self._resuming:
            request = self._requests[seq_group]
            if request.resumed_at is None:
                request.resumed_at = time.time()
                self._metrics.parked(time.monotonic() - request.parked_at)

    def give_back(self, progress: Progress, stalled: bool) -> None:
        """Give the groups whose attempt failed back to the scheduler: at once where another peer will be tried, else at
        the pace that the running ones can bear. `stalled`: the last batch can't run with the free blocks."""
        now = time.monotonic()
        if all(not group.is_prefill() or group.is_finished() for group in self._batch):
            self._batch.clear()
            self._pace.ended(now)
        for attempt, remote in list(self._attempts.items()):
            if remote.stage is AttemptStage.LEFT and remote.released:
                self._free(attempt, progress)  # it was aborted after its Released had come
        failed = [item for item in self._attempts.items() if item[1].stage is AttemptStage.FAILED]
        if not failed:
            return
        views: dict[tuple[str, ...], QueueView] = {}
        blocks, local = self._count_blocks(), []
        for attempt, remote in failed:
            seq_group, avoid = self._scheduler.remote_prefilling[attempt], remote.request.failed_peers
            if avoid not in views:
                views[avoid] = self._protocol.view(avoid)
            free_again = remote.blocks if remote.released else 0
            if self._decide(seq_group, 0, remote.request, views[avoid], blocks - free_again,
                            len(self._scheduler.remote_prefilling) - 1).remote:
                self._give_back(attempt, progress)
            else:
                local.append((attempt, seq_group))
        if not local or not (stalled or self._pace.may_begin(now, bool(self._scheduler.running))):
            return
        self._pace.began(now)
        tokens = 0
        for attempt, seq_group in local:
            tokens += seq_group.first_seq.get_len()
            if tokens > self._batch_tokens and seq_group is not local[0][1]:
                break
            self._batch.append(seq_group)
            self._give_back(attempt, progress)

    def update_metrics(self) -> None:
        """Set the gauges, and count the first tokens since the last call."""
        quarantined = sum(remote.blocks for attempt, remote in self._attempts.items()
                          if attempt in self._scheduler.quarantined)
        self._metrics.quarantined_blocks.set(quarantined)
        self._metrics.parked_blocks.set(self._count_blocks() - quarantined)
        waiting = []
        for seq_group in self._resuming:
            resumed_at, first_token_at = self._requests[seq_group].resumed_at, seq_group.metrics.first_token_time
            if resumed_at is not None and first_token_at is not None:
                self._metrics.handover("first_step", max(0.0, first_token_at - resumed_at))
            elif resumed_at is None or not seq_group.is_finished():
                waiting.append(seq_group)
        self._resuming = waiting

    def _request(self, seq_group: SequenceGroup) -> RemoteRequest:
        request = self._requests.get(seq_group)
        if request is None:
            request = self._requests[seq_group] = RemoteRequest()
        return request

    def _count_blocks(self) -> int:
        """Blocks that are set aside for attempts, quarantined ones included."""
        return sum(remote.blocks for remote in self._attempts.values())

    def _siblings(self, seq_group: SequenceGroup) -> Collection[SequenceGroup]:
        """All groups of a request with n > 1 that have not ended, this one included; none of any other request."""
        split = self._split_requests.get(seq_group.request_id)
        return split.to_be_finished.values() if split is not None else ()

    def _stay(self, seq_group: SequenceGroup) -> None:
        """Keep this group and its siblings here: `choose` decides about none of them again."""
        for group in (seq_group, *self._siblings(seq_group)):
            self._request(group).stays = True

    def _fall_back(self, event: Fallback) -> None:
        attempt = event.attempt
        logger.warning("remote prefill %d of request %s has ended (%s): %s", attempt.number, attempt.request_id,
                       event.reason.value, event.detail)
        self._metrics.attempt(event.outcome.value)
        seq_group = self._scheduler.remote_prefilling.get(attempt)
        if seq_group is None:
            return  # aborted in the meantime
        remote = self._attempts[attempt] = self._attempts.pop(attempt)  # failed ones are in the order of their failures
        remote.stage = AttemptStage.FAILED
        if not event.reason.another_may_help:
            remote.request.attempts = self._policy.attempts
        elif event.peer:
            remote.request.failed_peers += (event.peer, )

    def _give_back(self, attempt: Attempt, progress: Progress) -> None:
        progress.failed_prefills.append(attempt)
        remote = self._attempts[attempt]
        remote.stage = AttemptStage.LEFT
        if remote.released:
            self._free(attempt, progress)

    def _free(self, attempt: Attempt, progress: Progress) -> None:
        """No peer will write its blocks any more."""
        self._attempts.pop(attempt, None)
        progress.finished_transfers.append(attempt)

    def _time_left_s(self, request: RemoteRequest) -> float:
        return self._deadline_s - (time.monotonic() - request.began_at if request.began_at is not None else 0.0)

    def _decide(self, seq_group: SequenceGroup, cached_tokens: int, request: RemoteRequest, view: QueueView,
                parked_blocks: int, parked_requests: int) -> Decision:
        """Apply the policy. `parked_blocks` and `parked_requests` do not count the group itself."""
        seq = seq_group.first_seq
        prompt_tokens = seq.get_len()
        attempts = request.attempts
        if seq.get_output_len():  # preempted: a job is a prompt, and its blocks would be taken to hold the outputs too
            attempts = self._policy.attempts
        return decide(
            PolicyInput(prompt_tokens=prompt_tokens,
                        cached_tokens=cached_tokens,
                        blocks=-(-prompt_tokens // self._block_size) - cached_tokens // self._block_size,
                        can_go_remote=can_go_remote(seq_group, () if self._caching else self._split_requests),
                        attempts_made=attempts,
                        time_left_s=self._time_left_s(request),
                        broker_up=view.broker_up,
                        prefill_peers=view.prefill_peers,
                        queue_length=view.queue_length,
                        parked_blocks=parked_blocks,
                        total_blocks=self._scheduler.cache_config.num_gpu_blocks,
                        parked_requests=parked_requests,
                        total_requests=self._scheduler.scheduler_config.max_num_seqs), self._policy)

    def _count_timings(self, timings: Timings) -> None:
        if timings.measured:
            self._metrics.transfer_bytes(timings.bytes)
            for stage, seconds in (("queue", timings.queue_s), ("claim", timings.claim_s),
                                   ("prefill", timings.prefill_s), ("transfer", timings.transfer_s)):
                self._metrics.handover(stage, seconds)
