# SPDX-License-Identifier: Apache-2.0
"""What an engine learns between two steps: events of the protocol, ends of transfers, notices.

A binding asks for them with `_collect`, as often as it likes, and passes `_progress` to its scheduler.
"""
from __future__ import annotations

import logging
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_pd.decisions.measured import StepSpeed, StepTimer
from vllm_pd.decisions.mutual import JobPatience
from vllm_pd.errors import PDError
from vllm_pd.handover.decode import DecodeHandover
from vllm_pd.handover.holds import HELD_PROMPT_EVENTS, HeldPrompts
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.prefill import PrefillHandover
from vllm_pd.handover.progress import Progress
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.degraded import Degraded
from vllm_pd.protocol.actions import AddPeer, Cancelled, DropPeer, Event, Prefill, RenewTransport, RetireTransport
from vllm_pd.protocol.messages import Attempt, Load
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.engine import EngineTransfer
from vllm_pd.transfer.nixl import kept
from vllm_pd.transfer.requests import DestroyOlder, Finished, GenerationMade, MakeGeneration, TransferRequest

logger = logging.getLogger("vllm.pd")

METRICS_PERIOD_S = 0.2
RETIRE_KEY = "retire"
_PREFILL_EVENTS = (Prefill, Cancelled, AddPeer, DropPeer)


class Handover(ABC):
    """The events and transfers of one engine. Used from its step loop only. A binding derives from it, and sets
    `remote_prefills` and `prefill_jobs` (None: this engine takes no jobs) before the first `_collect`."""

    remote_prefills: DecodeHandover
    prefill_jobs: PrefillHandover | None
    holds: HeldPrompts | None = None  # None: this engine neither holds prompts for others nor reads them

    def __init__(self, config: PDConfig, agent: ControlAgent, transfer: EngineTransfer, metrics: PDMetrics) -> None:
        # Steps are measured where somebody uses it: this engine, or the decode engines that its load is reported to.
        self.speed = StepSpeed()
        self._timer = StepTimer(self.speed) if config.decides_by_time or config.role.prefills else None
        self.protocol = agent.protocol
        self.agent = agent
        self.transfer = transfer
        self._metrics = metrics
        self._progress = Progress()
        self.stalled = False  # whether the last schedule() could do nothing for those that wait
        self._patience = JobPatience()
        self._metrics_due = 0.0
        self._metrics_stale = True
        self._counted: dict[str, int] = {}
        self._shown: tuple[str, bool, bool] | None = None  # role, draining, thread ended: as in the gauges
        self._degraded: Degraded | None = None  # as the gauge shows it

    @abstractmethod
    def _to_ranks(self, requests: list[TransferRequest]) -> None:
        """Pass these on to every rank, in order with all others of this engine."""

    @abstractmethod
    def _load(self) -> Load:
        """What is in the engine's queues, jobs from peers among it, and its free blocks."""

    @abstractmethod
    def _has_running(self) -> bool:
        """Whether a request runs."""

    def _collect(self) -> None:
        """Move everything that has happened since the last call into `_progress`."""
        if self.remote_prefills.waiting_for_peers:
            self._guard(self.transfer.poll)
        transfers = self.transfer.take_progress()
        for notice in transfers.notices:
            self._guard(self.remote_prefills.notice, notice.payload)
        for made in transfers.made:
            self._guard(self._renewed, made)
        for end in transfers.finished:
            if end.key == RETIRE_KEY:
                self._guard(self.protocol.transport.retired, end.ok, end.error)
            self._guard(self.remote_prefills.grant_closed, end)
            if self.holds is not None:
                self._guard(self.holds.ended, end)
        if self.prefill_jobs is not None:
            for end in transfers.finished:
                self._guard(self.prefill_jobs.ended, end, self._progress)
            for refusal in transfers.refused:
                self._guard(self.prefill_jobs.refused, refusal, self._progress)
        for event in iter(self.protocol.poll_event, None):
            self.stalled = False
            if self.holds is not None and isinstance(event, HELD_PROMPT_EVENTS):
                self._guard(self.holds.handle, event, self._progress)
            self._guard(self._handler(event), event, self._progress)
        if self.holds is not None:
            self.remote_prefills.held_blocks = self.holds.blocks
        self._guard(self.remote_prefills.give_back, self._progress, self.stalled)
        if self.prefill_jobs is not None:
            self._guard(self.prefill_jobs.free_unproven, self._progress)  # after the events: a later one wakes us
            self.remote_prefills.unproven_blocks = self.prefill_jobs.unproven_blocks
            self.prefill_jobs.quarantined_blocks = self.remote_prefills.quarantined_blocks
            self._guard(self._give_back_jobs)
            self._guard(self.prefill_jobs.begin)
            self.prefill_jobs.set_credits()
        self._report_load()
        shown = (self.protocol.state.role.value, self.protocol.state.draining, self.agent.error is not None)
        if shown != self._shown:
            self._shown = shown
            self._metrics.engine_state(*shown)
        degraded = self.protocol.operators.degraded()
        if degraded != self._degraded:
            self._degraded = degraded
            self._metrics.degraded(None if degraded is None else degraded.reason.value)

    def _report_load(self) -> None:
        """Pass the present load on to the protocol, which sends it with each heartbeat."""
        load, jobs = self._load(), self.prefill_jobs
        if jobs is not None:
            tokens = self.remote_prefills.job_tokens = jobs.job_tokens
            load = msgspec.structs.replace(load, job_tokens=tokens, tokens_per_s=self.speed.tokens_per_s,
                                           clients=max(0, load.running + load.waiting - jobs.requests_here))
        self.protocol.set_load(load)

    def _give_back_jobs(self) -> None:
        """Give back the peers' jobs that wait for this engine's parked requests (`vllm_pd.decisions.mutual`)."""
        if self._progress:
            return  # the next step may begin them
        moving = self._has_running() or self.prefill_jobs.sending
        over = self._patience.take_over(time.monotonic(), moving, self.prefill_jobs.waiting)
        if over:
            self.stalled = False  # those behind them may fit
            self.prefill_jobs.give_back(over, "there is no room for it beside requests that wait for peers in turn",
                                        self._progress)

    def _give_up_sharing(self) -> None:
        """This engine's weights are about to be others than those of its fingerprint: it takes no jobs, holds nothing
        and hands nothing over from now on. Raises PDError where a job of a peer would be computed with them."""
        self.protocol.operators.weights_replaced()
        jobs = self.prefill_jobs
        if jobs is not None:
            self._give_up_jobs(jobs.computing, "its weights are replaced")
            left = [*jobs.computing, *jobs.reading, *jobs.queued]
            if left:
                raise PDError(f"the weights stay as they are: jobs of peers can't be given back, see the log: {left}")

    def _give_up_jobs(self, begun: list[Attempt], reason: str) -> None:
        """Give back these jobs, those that read their beginning, and those that wait for their turn."""
        jobs = self.prefill_jobs
        for attempt in [*begun, *jobs.reading, *jobs.queued]:
            self._guard(jobs.give_back, [attempt], reason, self._progress)
        self._guard(jobs.set_credits)

    def _renewed(self, made: GenerationMade) -> None:
        if made.error:
            self.protocol.transport.not_renewed(made.error)
        else:
            self.protocol.transport.renewed(made.name, made.metadata)

    def _renew(self, event: RenewTransport | RetireTransport, progress: Progress) -> None:
        """Pass it on to the ranks, in order with all other requests."""
        self._to_ranks([MakeGeneration(event.name) if isinstance(event, RenewTransport) else DestroyOlder(RETIRE_KEY)])

    def _handler(self, event: Event) -> Callable[[Event, Progress], None]:
        if isinstance(event, RenewTransport | RetireTransport):
            return self._renew
        if isinstance(event, _PREFILL_EVENTS) and self.prefill_jobs is not None:
            return self.prefill_jobs.handle
        return self.remote_prefills.handle

    def _guard(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return guarded(self._metrics, call, *arguments)

    def _update_metrics(self) -> None:
        now = time.monotonic()
        if now >= self._metrics_due:
            self._metrics_due = now + METRICS_PERIOD_S
            self._metrics_stale = False
            self.remote_prefills.update_metrics()
            for kind, count in self.agent.dropped().items():
                if count > self._counted.get(kind, 0):
                    self._metrics.frames_dropped(kind, count - self._counted.get(kind, 0))
                    self._counted[kind] = count


def finalize(owner: object, end: Callable[..., None], *arguments: Any) -> weakref.finalize:
    """As `weakref.finalize`, but without effect in a forked child: what it would end is its parent's, and a lock that a
    thread of the parent held at the fork is never free there."""
    return weakref.finalize(owner, _end_in_process, os.getpid(), end, *arguments)


def _end_in_process(pid: int, end: Callable[..., None], *arguments: Any) -> None:
    if os.getpid() == pid:
        end(*arguments)


def close_engine(agent: ControlAgent, transfer: EngineTransfer) -> None:
    """Leave the peers and release every transfer of ours. Where a peer has not said that it is done with this engine's
    memory, or a transfer of ours may still land there, it is kept, and the end of the process is the proof."""
    agent.close()
    operators = agent.protocol.operators
    ended, is_reached = transfer.close(), operators.is_reached()
    if is_reached or not ended and operators.open_attempts():
        logger.warning("the KV cache of this engine may still be reached: its memory is kept until the process ends")
    else:
        kept.release(agent.member.incarnation)
    if ended and not is_reached:
        agent.end_lifeline()


def guarded(metrics: PDMetrics, call: Callable[..., Any], *arguments: Any) -> Any:
    """Log and count errors caused by peer input; never propagate them."""
    try:
        return call(*arguments)
    except Exception:
        logger.exception("unexpected error in %s", call)
        metrics.frames_dropped("error")
        return None


def ignore_end(end: Finished) -> None:
    """Nothing: a decode engine has no writes that could end."""
