# SPDX-License-Identifier: Apache-2.0
"""The decode engine's half of the binding: which prompts leave, and what became of them.

A group's stay: `choose` draws an attempt for it, the scheduler parks it and calls `start`; then one of the control
thread's events ends the stay and becomes the scheduler's news. The blocks belong to the scheduler throughout.
"""
from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Container
from typing import TYPE_CHECKING

from vllm_pd.config import PDConfig
from vllm_pd.control.agent import ControlAgent
from vllm_pd.core.events import Event, Fallback, Prefilled, Released, Timed
from vllm_pd.core.messages import Attempt, Timings
from vllm_pd.core.policy import Decision, PolicyConfig, PolicyInput, decide
from vllm_pd.metrics import PDMetrics
from vllm_pd.v0.features import can_go_remote
from vllm_pd.v0.progress import ArrivalNotice, Progress

if TYPE_CHECKING:
    from vllm.core.scheduler import Scheduler
    from vllm.sequence import SequenceGroup

logger = logging.getLogger("vllm.pd")


class RemotePrefills:
    """All prompts of one decode engine that are, or might be, prefilled elsewhere. Used from the step loop only."""

    def __init__(self, config: PDConfig, agent: ControlAgent, scheduler: Scheduler, metrics: PDMetrics,
                 split_request_ids: Container[str]) -> None:
        self._agent = agent
        self._scheduler = scheduler
        self._metrics = metrics
        self._split_request_ids = split_request_ids
        self._block_size = scheduler.cache_config.block_size
        self._policy = PolicyConfig(max_local_prefill_tokens=config.max_local_prefill_tokens,
                                    max_queue_length=config.max_queue_length,
                                    max_parked_fraction=config.max_parked_fraction)
        self._local: weakref.WeakSet[SequenceGroup] = weakref.WeakSet()
        self._been_remote: weakref.WeakSet[SequenceGroup] = weakref.WeakSet()
        # Blocks that an attempt holds beyond its prefix hit, until they may be reused.
        self._held_blocks: dict[Attempt, int] = {}
        self._resumed: list[tuple[SequenceGroup, float]] = []

    @property
    def waiting_for_peers(self) -> bool:
        """Whether a notice may arrive."""
        return bool(self._held_blocks)

    def choose(self, seq_group: SequenceGroup, cached_tokens: int) -> Attempt | None:
        """The attempt under which the group's prompt is to be prefilled elsewhere, or None. Counted once a stay in
        the waiting queue: a group that is to stay is not asked about again."""
        if seq_group in self._local:
            return None
        decision = self._decide(seq_group, cached_tokens)
        self._metrics.decision("remote" if decision.remote else "local", decision.reason.value)
        if not decision.remote:
            self._local.add(seq_group)
            return None
        self._been_remote.add(seq_group)
        return self._agent.next_attempt(seq_group.request_id)

    def start(self, attempt: Attempt, seq_group: SequenceGroup, block_ids: list[int], cached_tokens: int) -> None:
        """The group is parked: queue its job. `block_ids` cover the whole prompt, the cached prefix included."""
        cached_blocks = cached_tokens // self._block_size
        self._held_blocks[attempt] = len(block_ids) - cached_blocks
        self._agent.submit(attempt, list(seq_group.first_seq.prompt_token_ids), list(block_ids), cached_blocks)

    def abort(self, attempt: Attempt) -> None:
        """The client is gone. The blocks come back with the attempt's Released."""
        self._agent.abort(attempt)
        if attempt in self._held_blocks:  # else it has just been done
            self._metrics.attempt("cancelled")

    def notice(self, payload: bytes) -> None:
        """A peer's write has landed. What is no notice of ours is counted and dropped."""
        notice = ArrivalNotice.decode(payload)
        if notice is None:
            self._metrics.frames_dropped("notice_malformed")
        else:
            self._agent.arrived(notice.attempt, notice.rank)

    def handle(self, event: Event, progress: Progress) -> None:
        """Turn an event of the control thread into news for the scheduler."""
        if isinstance(event, Prefilled):
            self._held_blocks.pop(event.attempt, None)
            progress.finished_prefills.append(event.attempt)
            self._metrics.attempt("done")
            self._count_timings(event.timings)
            seq_group = self._scheduler.remote_prefilling.get(event.attempt)
            if seq_group is not None:
                self._resumed.append((seq_group, time.time()))
        elif isinstance(event, Timed):
            self._count_timings(event.timings)
        elif isinstance(event, Fallback):
            logger.warning("request %s is prefilled here after all (%s): %s", event.attempt.request_id,
                           event.reason.value, event.detail)
            progress.failed_prefills.append(event.attempt)
            self._metrics.attempt(event.outcome.value)
        elif isinstance(event, Released):
            self._held_blocks.pop(event.attempt, None)
            progress.finished_transfers.append(event.attempt)

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

    def _decide(self, seq_group: SequenceGroup, cached_tokens: int) -> Decision:
        view = self._agent.view()
        prompt_tokens = seq_group.first_seq.get_len()
        return decide(
            PolicyInput(prompt_tokens=prompt_tokens,
                        cached_tokens=cached_tokens,
                        blocks=-(-prompt_tokens // self._block_size) - cached_tokens // self._block_size,
                        can_go_remote=can_go_remote(seq_group, self._split_request_ids),
                        been_remote=seq_group in self._been_remote,
                        broker_up=view.broker_up,
                        prefill_peers=view.prefill_peers,
                        queue_length=view.queue_length,
                        parked_blocks=sum(self._held_blocks.values()),
                        total_blocks=self._scheduler.cache_config.num_gpu_blocks,
                        parked_requests=len(self._scheduler.remote_prefilling),
                        total_requests=self._scheduler.scheduler_config.max_num_seqs), self._policy)

    def _count_timings(self, timings: Timings) -> None:
        if timings.measured:
            self._metrics.transfer_bytes(timings.bytes)
            for stage, seconds in (("queue", timings.queue_s), ("claim", timings.claim_s),
                                   ("prefill", timings.prefill_s), ("transfer", timings.transfer_s)):
                self._metrics.handover(stage, seconds)
