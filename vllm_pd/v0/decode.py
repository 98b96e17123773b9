# SPDX-License-Identifier: Apache-2.0
"""The decode engine's half of the binding: which prompts leave, and what became of them.

A group's stay: `choose` draws an attempt for it, the scheduler parks it and calls `start`; then one of the control
thread's events ends the stay and becomes the scheduler's news. After an attempt that failed the group waits again, in
front, and `choose` is asked anew: for another attempt, on another peer, or for none. Those that will be prefilled here
are given back batch by batch, so that the running ones go on. The blocks belong to the scheduler throughout.
"""
from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
class _Tries:
    """The attempts of one request: when the first began, when its group was last parked, how many there were, and the
    peers that failed at it."""
    began_at: float
    parked_at: float = 0.0
    made: int = 0
    failed_peers: tuple[str, ...] = ()


class RemotePrefills:
    """All prompts of one decode engine that are, or might be, prefilled elsewhere. Used from the step loop only."""

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
        self._local: weakref.WeakSet[SequenceGroup] = weakref.WeakSet()
        self._tries: weakref.WeakKeyDictionary[SequenceGroup, _Tries] = weakref.WeakKeyDictionary()
        # Blocks that an attempt holds beyond its prefix hit, until they may be reused.
        self._held_blocks: dict[Attempt, int] = {}
        # Failed attempts whose group is still parked until its turn, and whether their blocks may be reused already.
        self._fallen: dict[Attempt, bool] = {}
        self._freed: list[Attempt] = []  # of those, the ones that were aborted there
        self._pace = FallbackPace(config.max_fallback_share)
        self._computing: list[SequenceGroup] = []  # the last batch that was given back
        self._arrived: list[SequenceGroup] = []  # not scheduled again yet
        self._resumed: list[tuple[SequenceGroup, float]] = []  # no token yet; since when they are scheduled again

    @property
    def waiting_for_peers(self) -> bool:
        """Whether a notice may arrive."""
        return bool(self._held_blocks)

    def choose(self, seq_group: SequenceGroup, cached_tokens: int) -> Attempt | None:
        """The attempt under which the group's prompt is to be prefilled elsewhere, or None. Counted once a stay in
        the waiting queue: a group that is to stay is not asked about again."""
        if seq_group in self._local:
            return None
        tries = self._tries.get(seq_group)
        view = self._protocol.view(tries.failed_peers if tries is not None else ())
        decision = self._decide(seq_group, cached_tokens, tries, view, sum(self._held_blocks.values()),
                                len(self._scheduler.remote_prefilling))
        self._metrics.decision("remote" if decision.remote else "local", decision.reason.value)
        if not decision.remote:
            self._stay(seq_group)
            return None
        if tries is None:
            tries = self._tries[seq_group] = _Tries(time.monotonic())
        tries.made += 1
        return self._protocol.next_attempt(seq_group.request_id)

    def waits_for_sibling(self, seq_group: SequenceGroup) -> bool:
        """Whether another part of the same request (n > 1) is parked. Once that one is done, or has to stay here, all
        of them stay."""
        from vllm.sequence import SequenceStatus
        return any(group.first_seq.status is SequenceStatus.REMOTE_PREFILLING for group in self._siblings(seq_group))

    def start(self, attempt: Attempt, seq_group: SequenceGroup, block_ids: list[int], cached_tokens: int) -> None:
        """The group is parked: queue its job. `block_ids` cover the whole prompt, the cached prefix included."""
        cached_blocks = cached_tokens // self._block_size
        self._held_blocks[attempt] = len(block_ids) - cached_blocks
        if seq_group in self._computing:  # it was to be prefilled here, but now there is a peer for it
            self._computing.remove(seq_group)
        tries = self._tries[seq_group]
        tries.parked_at = time.monotonic()
        self._protocol.submit(attempt, list(seq_group.first_seq.prompt_token_ids), list(block_ids), cached_blocks,
                           tries.failed_peers, self._time_left_s(tries))

    def abort(self, attempt: Attempt) -> None:
        """The client is gone. The blocks come back with the attempt's Released."""
        self._protocol.abort(attempt)
        released = self._fallen.pop(attempt, None)
        if released:
            self._freed.append(attempt)  # their Released has come already
        if released is None and attempt in self._held_blocks:  # else it has ended, and was counted
            self._metrics.attempt("cancelled")

    def notice(self, payload: bytes) -> None:
        """A peer's write has landed. What is no notice of ours is counted and dropped."""
        notice = ArrivalNotice.decode(payload)
        if notice is None:
            self._metrics.frames_dropped("notice_malformed")
        else:
            self._protocol.arrived(notice.attempt, notice.rank)

    def handle(self, event: Event, progress: Progress) -> None:
        """Turn an event of the control thread into news for the scheduler."""
        if isinstance(event, Prefilled):
            self._held_blocks.pop(event.attempt, None)
            progress.finished_prefills.append(event.attempt)
            self._metrics.attempt("done")
            self._count_timings(event.timings)
            seq_group = self._scheduler.remote_prefilling.get(event.attempt)
            if seq_group is not None:
                self._tries[seq_group].made = self._policy.attempts  # if it is preempted later, it stays here (B8)
                self._local.update(group for group in self._siblings(seq_group) if group is not seq_group)
                self._arrived.append(seq_group)
        elif isinstance(event, Timed):
            self._count_timings(event.timings)
        elif isinstance(event, Fallback):
            self._fall_back(event)
        elif isinstance(event, Released):
            if event.attempt in self._fallen:
                self._fallen[event.attempt] = True  # its group has them still
            else:
                self._free(event.attempt, progress)

    def scheduled(self) -> None:
        """The scheduler has taken back the groups whose KV has come."""
        for seq_group in self._arrived:
            self._metrics.parked(time.monotonic() - self._tries[seq_group].parked_at)
            self._resumed.append((seq_group, time.time()))
        self._arrived.clear()

    def give_back(self, progress: Progress, stalled: bool) -> None:
        """Let the scheduler have the groups whose attempt failed: at once where another peer will be tried, else as
        fast as the running ones can bear. `stalled`: the last batch can't run with what blocks there are."""
        for attempt in self._freed:
            self._free(attempt, progress)
        self._freed.clear()
        now = time.monotonic()
        if all(not group.is_prefill() or group.is_finished() for group in self._computing):
            self._computing.clear()
            self._pace.ended(now)
        if not self._fallen:
            return
        views: dict[tuple[str, ...], QueueView] = {}
        held_blocks = sum(self._held_blocks.values())
        local = []
        for attempt in list(self._fallen):
            seq_group = self._scheduler.remote_prefilling[attempt]
            tries = self._tries[seq_group]
            if tries.failed_peers not in views:
                views[tries.failed_peers] = self._protocol.view(tries.failed_peers)
            free_again = self._held_blocks.get(attempt, 0) if self._fallen[attempt] else 0
            if self._decide(seq_group, 0, tries, views[tries.failed_peers], held_blocks - free_again,
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
            self._computing.append(seq_group)
            self._give_back(attempt, progress)

    def update_metrics(self) -> None:
        """Gauges, and the first steps that have happened since the last call."""
        quarantined = sum(self._held_blocks.get(attempt, 0) for attempt in self._scheduler.quarantined)
        self._metrics.quarantined_blocks.set(quarantined)
        self._metrics.parked_blocks.set(sum(self._held_blocks.values()) - quarantined)
        waiting = []
        for seq_group, resumed_at in self._resumed:
            first_token_at = seq_group.metrics.first_token_time
            if first_token_at is not None:
                self._metrics.handover("first_step", max(0.0, first_token_at - resumed_at))
            elif not seq_group.is_finished():
                waiting.append((seq_group, resumed_at))
        self._resumed = waiting

    def _siblings(self, seq_group: SequenceGroup) -> Collection[SequenceGroup]:
        """All parts of a request with n > 1 that have not ended, itself among them."""
        split = self._split_requests.get(seq_group.request_id)
        return split.to_be_finished.values() if split is not None else ()

    def _stay(self, seq_group: SequenceGroup) -> None:
        """Neither this group nor a sibling of it is asked about any more."""
        self._local.add(seq_group)
        self._local.update(self._siblings(seq_group))

    def _fall_back(self, event: Fallback) -> None:
        attempt = event.attempt
        logger.warning("remote prefill %d of request %s has ended (%s): %s", attempt.number, attempt.request_id,
                       event.reason.value, event.detail)
        self._metrics.attempt(event.outcome.value)
        seq_group = self._scheduler.remote_prefilling.get(attempt)
        if seq_group is None:
            return  # aborted in the meantime
        self._fallen[attempt] = False
        tries = self._tries[seq_group]
        if not event.reason.another_may_help:
            tries.made = self._policy.attempts
        elif event.peer:
            tries.failed_peers += (event.peer, )

    def _give_back(self, attempt: Attempt, progress: Progress) -> None:
        progress.failed_prefills.append(attempt)
        if self._fallen.pop(attempt):
            self._free(attempt, progress)

    def _free(self, attempt: Attempt, progress: Progress) -> None:
        """No peer will write its blocks any more."""
        self._held_blocks.pop(attempt, None)
        progress.finished_transfers.append(attempt)

    def _time_left_s(self, tries: _Tries | None) -> float:
        return self._deadline_s - (time.monotonic() - tries.began_at if tries is not None else 0.0)

    def _decide(self, seq_group: SequenceGroup, cached_tokens: int, tries: _Tries | None, view: QueueView,
                parked_blocks: int, parked_requests: int) -> Decision:
        """What is parked is counted without the group itself."""
        seq = seq_group.first_seq
        prompt_tokens = seq.get_len()
        made = tries.made if tries is not None else 0
        if seq.get_output_len():  # preempted: a job is a prompt, and its blocks would be taken to hold the outputs too
            made = self._policy.attempts
        return decide(
            PolicyInput(prompt_tokens=prompt_tokens,
                        cached_tokens=cached_tokens,
                        blocks=-(-prompt_tokens // self._block_size) - cached_tokens // self._block_size,
                        can_go_remote=can_go_remote(seq_group, () if self._caching else self._split_requests),
                        attempts_made=made,
                        time_left_s=self._time_left_s(tries),
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
