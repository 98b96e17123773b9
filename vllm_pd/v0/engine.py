# SPDX-License-Identifier: Apache-2.0
"""`V0Handover`: the object that the patched V0 engine and scheduler call.

One per engine, owned by it. Every method runs in the step loop's thread and returns at once, except `poll`, where the
loop sleeps. No method raises because of what a peer, a message or a transfer does.

A step: `take_progress` collects the events of the protocol and of the worker's transfers for `schedule`; the scheduler
parks and resumes groups with `choose_remote_prefill`, `start_remote_prefill`, `abort_remote_prefill` and
`start_transfer`; `after_schedule` adds to the step what the worker is to transfer.
"""
from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from vllm_pd.handover.engine import Handover, close_engine, finalize, guarded, ignore_end
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.progress import Progress
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.protocol.messages import Attempt, Load
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.choice import TransportChoice
from vllm_pd.transfer.device import Device
from vllm_pd.transfer.engine import EngineTransfer
from vllm_pd.transfer.requests import Flush, TransferRequest
from vllm_pd.v0.decode import RemotePrefills
from vllm_pd.v0.idle import LoopWakeup
from vllm_pd.v0.interface import EngineBinding
from vllm_pd.v0.pending_blocks import PendingBlocks
from vllm_pd.v0.prefill import PrefillJobs
from vllm_pd.v0.turns import DecodeTurns
from vllm_pd.v0.worker import attach_transfer

if TYPE_CHECKING:
    from vllm.core.scheduler import SchedulerOutputs
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.engine.llm_engine import LLMEngine
    from vllm.sequence import SequenceGroup

logger = logging.getLogger("vllm.pd")

LLM_PAUSE_S = 0.02  # of a loop that never sleeps by itself, before an empty step
NO_STEPS = "it runs no steps at present"


class V0Handover(Handover, EngineBinding):
    """The prefill/decode binding of one engine. `settings` is what `vllm_pd.v0.claim` left in the configuration."""

    def __init__(self, engine: LLMEngine, settings: dict[str, Any]) -> None:
        config = PDConfig.parse(settings["kv_role"], settings["extra"])
        self._scheduler = engine.scheduler[0]
        self.pending_blocks = PendingBlocks(self._scheduler.block_manager)
        self._outputs = engine.scheduler_contexts[0].output_queue  # of the last step, with asynchronous processing
        self._wakeup = LoopWakeup()
        member, metadata, transfer = attach_transfer(
            engine, config.role, TransportChoice.of(config.transport, config.transport_host))
        agent = ControlAgent(config, member, metadata, wake=self._wakeup.wake, front=settings.get("front"))
        # From now on, for the start may fail. Also when the interpreter ends with the engine alive: before modules and
        # threads are torn down.
        self._finalizer = finalize(self, _shut, agent, transfer, self._wakeup)
        agent.start()
        super().__init__(config, agent, transfer, PDMetrics(engine.model_config.served_model_name))
        self.transfer.hold(self.agent.lifeline_fileno())
        self._split_requests = engine.seq_id_to_seq_group
        self.remote_prefills = RemotePrefills(config, self.protocol.decode, self._scheduler, self._metrics,
                                              self._split_requests, self.speed)
        self.prefill_jobs: PrefillJobs | None = None
        self._requests: list[TransferRequest] = []  # where there are no `prefill_jobs`: for the next step
        if config.role.prefills:
            self.prefill_jobs = PrefillJobs(config, self.protocol.prefill, weakref.proxy(engine), self._metrics,
                                            self.speed)
            self.protocol.prefill.refuse_jobs(NO_STEPS)  # until a loop runs
        if config.is_two_sided:
            self.remote_prefills.send_grants = transfer.execute
        report_end = self.prefill_jobs.report_end if self.prefill_jobs is not None else ignore_end
        self.transfer.start(self._wakeup.wake, partial(guarded, self._metrics, report_end))
        self._steps = 0
        self._turns = DecodeTurns()
        self._left_waiting: list[SequenceGroup] | None = None  # by the last step, if it ran nothing and nothing runs
        self._finished_ids: list[str] = []  # of which the workers have not heard
        self.in_loop = False  # whether an engine loop sleeps with `poll` or `serve`
        self._had_clients = False  # whether a client had a request at the beginning of this step
        self._sleeping = False  # whether that loop waits for a wake-up
        # With M-RoPE a GPU's prompt step leaves it to the decode steps, whose graphs need it. The CPU's does so with
        # multimodal input only.
        self._sets_mrope = engine.model_config.uses_mrope and engine.device_config.device_type == "cuda"
        self._device: Device = engine.model_executor.driver_worker.worker.transfer.device
        self._flush_due = False  # the next step may read what a peer has written
        self._was_busy = False  # whether the device was busy when it should have been idle
        self._scheduler.disagg = self
        logger.info("disaggregation is on: %s as %s at %s", config.role.value, member.incarnation,
                    self.agent.member.address)

    # Calls of the scheduler.

    def choose_remote_prefill(self, seq_group: SequenceGroup, num_cached_tokens: int) -> Attempt | None:
        """The attempt under which a peer is to prefill this waiting group, or None: prefill it here. A peer's own job
        is parked where the beginning of its prompt is to be read from that peer first."""
        attempt = seq_group.first_seq.remote_decode
        if attempt is not None:
            return attempt if self.prefill_jobs.wants_prefix(attempt, num_cached_tokens) else None
        return self.remote_prefills.decide_and_commit(seq_group, num_cached_tokens)

    def waits_for_sibling(self, seq_group: SequenceGroup) -> bool:
        """Whether a peer prefills the same prompt for another sample of this waiting group's request now. Then the
        group is passed over, and finds the prompt in the prefix cache later."""
        return self._decodes and self.remote_prefills.waits_for_sibling(seq_group)

    def start_remote_prefill(self, attempt: Attempt, seq_group: SequenceGroup, block_ids: list[int],
                             num_cached_tokens: int) -> None:
        """The group is parked; the blocks after the cached ones may be written from now on."""
        if seq_group.first_seq.remote_decode is not None:
            self.prefill_jobs.read_prefix(attempt, block_ids, num_cached_tokens)
        else:
            if self._sets_mrope:
                seq_group.first_seq.data.mrope_position_delta = 0  # as of all text; multimodal input stays here
            self._settle_device()
            self.remote_prefills.start(attempt, seq_group, block_ids, num_cached_tokens)

    def abort_remote_prefill(self, attempt: Attempt) -> None:
        """The parked group was aborted; the scheduler keeps its blocks until this attempt's transfers have finished."""
        if self.prefill_jobs is not None and self.prefill_jobs.find(attempt) is not None:
            self.prefill_jobs.aborted(attempt)
        else:
            self.remote_prefills.abort(attempt)

    def start_transfer(self, attempt: Attempt, block_ids: list[int]) -> None:
        """A group that was prefilled for a peer has finished; the scheduler keeps its blocks until they were sent."""
        self.prefill_jobs.computed(attempt, block_ids, self._progress)

    def allows_prefills(self) -> bool:
        """Whether this step may take prefills: see `DecodeTurns`."""
        return self._turns.allows_prefills()

    def after_schedule(self, outputs: SchedulerOutputs) -> None:
        """Add to the step that was just scheduled what the worker is to transfer."""
        if self._timer is not None:
            self._steps += 1
            self._timer.began(time.monotonic(), self._steps,
                              [one.token_chunk_size for one in outputs.scheduled_seq_groups])
        self._turns.scheduled(outputs.num_prefill_groups)
        self._note_stall(outputs)
        self.remote_prefills.scheduled()
        requests: list[TransferRequest] = [Flush()] if self._flush_due else []
        self._flush_due = False
        if self.prefill_jobs is None:
            requests += self._requests
            self._requests = []
            outputs.memory_transfer_requests = requests
            return
        for seq_group in outputs.ignored_seq_groups:
            if seq_group.first_seq.remote_decode is not None and seq_group.is_finished():
                self.prefill_jobs.ignored(seq_group.first_seq.remote_decode)
        outputs.memory_transfer_requests = requests + self.prefill_jobs.take_requests(self._progress)

    def return_transfer_requests(self, outputs: SchedulerOutputs) -> None:
        """The step with these requests was given up: they go with the next one."""
        requests = outputs.memory_transfer_requests
        self._flush_due = Flush() in requests
        others = [request for request in requests if request != Flush()]
        if self.prefill_jobs is not None:
            self.prefill_jobs.return_requests(others)
        else:
            self._requests[:0] = others

    # Calls of the engine and its loops.

    def keep_finished_ids(self, request_ids: list[str]) -> None:
        """A step that ran nothing was to tell the workers that these requests have ended: the next one is to."""
        self._finished_ids += request_ids

    def get_num_client_requests(self) -> int:
        """Unfinished requests of this engine's own clients: all but the jobs of peers."""
        scheduler = self._scheduler
        return sum(group.first_seq.remote_decode is None
                   for group in (*scheduler.waiting, *scheduler.running, *scheduler.swapped,
                                 *scheduler.remote_prefilling.values()))

    def expects_steps(self) -> bool:
        """Whether more steps follow the one that ends. None does while all that is left waits for peers, and
        `LLM.generate` makes none after its own last request, though jobs of peers may be left. Outputs that wait to be
        processed need no step: without one they are processed at once."""
        self._end_step()
        if self._had_clients and not self.in_loop and self.get_num_client_requests() == 0:
            return False
        return self._has_step()

    def has_client_requests(self) -> bool:
        """Whether this engine's own clients have unfinished requests. Who steps it by itself, as `LLM.generate`, stops
        where they have none: then the jobs of peers that are not on their way are given back, and none are taken before
        the next step."""
        has_some = self.get_num_client_requests() > 0
        if self.prefill_jobs is not None and not (has_some or self.in_loop):
            self._give_up_jobs([*self.prefill_jobs.computing, *self.prefill_jobs.unsent], NO_STEPS)
            self.protocol.prefill.refuse_jobs(NO_STEPS)
        return has_some

    def take_progress(self) -> dict[str, Any]:
        """The arguments of the `schedule` that follows. A loop that never sleeps, as that of `LLM`, is slowed down here
        while it only waits for peers."""
        if not self.in_loop:
            if not self.has_work():
                self._wakeup.wait(LLM_PAUSE_S)
            self._had_clients = self.get_num_client_requests() > 0
        self._sleeping = False
        self._end_step()
        self._collect()
        # Not one that is in use again: the engine would forget to which request that sample belongs.
        self._scheduler._finished_requests_ids += [one for one in self._finished_ids if one not in self._split_requests]
        self._finished_ids.clear()
        progress, self._progress = self._progress, Progress()
        if self._device.needs_flush and progress.brings_kv:
            self._flush_due = True  # until a step has taken it
        if not self._scheduler.remote_prefilling.keys().isdisjoint(progress.finished_prefills):
            self._turns.resume()  # not for aborted ones
        self._update_metrics()
        self._metrics_stale = True  # the step that follows changes what was counted
        return progress.arguments()

    def has_work(self) -> bool:
        """Whether a step would do anything, given what has arrived up to now."""
        self._end_step()
        self._collect()
        self._sleeping = not (self._progress or self._outputs or self._has_step())
        self._wakeup.wake_at(self._next_look() if self._sleeping else None)
        if self._sleeping and self._metrics_stale:
            self._metrics_due = 0.0
            self._update_metrics()
        return not self._sleeping

    def serve(self, async_engine: AsyncLLMEngine) -> None:
        """This engine runs in the loop of `async_engine`: wake it, and start it before the first request of a
        client."""
        self.in_loop = True
        self._wakeup.serve(async_engine, self._is_worth_a_step)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # the first request starts it
        async_engine.start_background_loop()
        async_engine._background_loop_unshielded.add_done_callback(partial(_loop_ended, self._finalizer))
        self._wakeup.wake()  # for what has arrived before

    def poll(self, socket: zmq.Socket, timeout_ms: int) -> int:
        """Sleep until the socket has input or there is work; 0 where neither came within the time."""
        self.in_loop = True
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            if self.has_work():
                return 1
            remaining_s = deadline - time.monotonic()
            if self._wakeup.wait(remaining_s, socket):
                return 1
            if remaining_s <= 0:
                self._update_metrics()
                return 0

    def close(self) -> None:
        """Leave the peers and release every transfer. Idempotent."""
        self._finalizer()

    # Inside.

    def _collect(self) -> None:
        if self.prefill_jobs is not None:
            self._guard(self.prefill_jobs.drop_aborted, self._progress)
        super()._collect()

    def _has_step(self) -> bool:
        """Whether a step would have work for the workers."""
        return ((self._scheduler.has_schedulable_seqs() and not self.stalled)
                or bool(self._requests) or (self.prefill_jobs is not None and self.prefill_jobs.has_requests))

    def _next_look(self) -> float | None:
        """When a loop that sleeps is to look again, by the monotonic clock; None: not before it is woken."""
        return self._patience.next_look()

    @property
    def _decodes(self) -> bool:
        return self.protocol.state.hands_over

    def _is_worth_a_step(self) -> bool:
        """Whether a wake-up of the async loop is to make it step. Progress is taken only while no step is under way."""
        return not self._sleeping or self.has_work()

    def _end_step(self) -> None:
        """The last step is over, if it was not before. Whatever the loop asks first after a step calls this."""
        if self._timer is not None:
            self._timer.ended(time.monotonic(), self._steps)

    def _settle_device(self) -> None:
        """Blocks are about to be offered to a peer, to read and to write, where our kernels may have worked before. The
        peer does both outside the order of the device, so the device must be idle. It is, for sampling ends each step
        with a copy to the host on which V0 waits; this is checked, not assumed. The other ranks have by then taken part
        in the last collective before it."""
        if not self._device.is_idle() and not self._was_busy:
            self._was_busy = True
            logger.error("the device was busy between two steps: sampling does not wait for it. Blocks are offered "
                         "after a synchronisation only, so answers stay right; please report this")
        self.transfer.synchronize()

    def _note_stall(self, outputs: SchedulerOutputs) -> None:
        """Groups may wait for seats or blocks that parked, fenced or sending ones hold. Only an event or a request can
        change that, and each wakes the loop, so it need not run step after step until then. Not after a first empty
        step: it may have preempted or sorted what the next one can run."""
        scheduler = self._scheduler
        held = scheduler.remote_prefilling or scheduler.quarantined or scheduler.prefill_sending
        is_idle = (held and not self._turns.held and not outputs.scheduled_seq_groups
                   and not scheduler.running and not scheduler.swapped)
        waiting = list(scheduler.waiting) if is_idle else None
        self.stalled = waiting is not None and waiting == self._left_waiting
        self._left_waiting = waiting
        if self.prefill_jobs is not None and not self._turns.held:
            blocked = not outputs.num_prefill_groups and self._has_parked()
            self._patience.scheduled(time.monotonic(), self.prefill_jobs.waiting if blocked else ())

    def _has_parked(self) -> bool:
        """Whether requests of this engine itself, and not of a peer, are parked or in quarantine."""
        own = self.agent.member.incarnation
        return any(attempt.incarnation == own
                   for attempt in (*self._scheduler.remote_prefilling, *self._scheduler.quarantined))

    def _to_ranks(self, requests: list[TransferRequest]) -> None:
        if self.prefill_jobs is None:
            self._requests += requests
        else:
            self.prefill_jobs.append_requests(requests)

    def _has_running(self) -> bool:
        return bool(self._scheduler.running)

    def _load(self) -> Load:
        scheduler = self._scheduler
        return Load(len(scheduler.running) + len(scheduler.swapped) + len(scheduler.remote_prefilling),
                    len(scheduler.waiting), scheduler.block_manager.get_num_free_gpu_blocks())


def _loop_ended(close: Callable[[], None], loop: asyncio.Task) -> None:
    """Leave the peers where the loop has died: there are no steps any more."""
    if not loop.cancelled():
        close()


def _shut(agent: ControlAgent, transfer: EngineTransfer, wakeup: LoopWakeup) -> None:
    close_engine(agent, transfer)
    wakeup.close()
