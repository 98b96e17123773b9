# SPDX-License-Identifier: Apache-2.0
"""`V1Handover`: the binding of one V1 engine, in EngineCore's process and thread.

Built when the engine's loop begins. Updates come from the control thread and the transfer thread, which wake the
engine; `look` applies them at once: requests are resumed or failed, fences come down, peers' jobs are added. No step
is needed for that, and none is made while all that is left waits for peers (`asleep`).
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm_pd.handover.engine import Handover, close_engine, finalize, guarded, ignore_end
from vllm_pd.handover.fence import BlockFence
from vllm_pd.handover.holds import HeldPrompts
from vllm_pd.handover.jobs import PrefillCapacity
from vllm_pd.handover.progress import Progress
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.protocol.messages import Attempt, Load, Role
from vllm_pd.protocol.scope import SALT
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.engine import EngineTransfer
from vllm_pd.v1.adapter_files import AdapterReader
from vllm_pd.v1.adapters import AdapterBook
from vllm_pd.v1.contract import StepShare
from vllm_pd.v1.decode import ParkedRequests
from vllm_pd.v1.features import can_go_remote, scope_of
from vllm_pd.v1.media import MediaBook, restore_media
from vllm_pd.v1.metrics import HandoverStats, MetricsRecorder, states_beside
from vllm_pd.v1.prefill import InternalRequests

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

    from vllm_pd.transfer.requests import TransferRequest
    from vllm_pd.v1.engine_access import EngineAccess
    from vllm_pd.v1.scheduler import HandoverScheduling

logger = logging.getLogger("vllm.pd")

_COMPUTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
FENCES_S = 10.0  # how long a reset of the prefix cache waits for fences
POLL_S = 0.001  # meanwhile
LOOK_S = 0.25  # how often the load is reported while steps go on and no peer is involved; heartbeats are rarer. And how
# often an engine that makes no step looks whether there is a peer for a prompt that waits for one
SLACK_S = 0.001  # a timer that ends a little early must not find that nothing is due


class StepMetadata(KVConnectorMetadata):
    """What goes to the workers with each step. `step` counts the steps from 1; `brings_kv`: it is the first that may
    read what a transfer has written."""

    def __init__(self, step: int, brings_kv: bool) -> None:
        self.step = step
        self.brings_kv = brings_kv


class V1Handover(Handover):
    """The binding of one engine. It owns `agent`, which runs, and `transfer`, which it starts; `close` ends both.
    `capacity` is that of the engine as a prefill engine; its `rows` are those of both roles. An engine whose layers are
    in several groups of blocks must keep no prompts and read no prefixes (`vllm_pd.v1.start`)."""

    def __init__(self, config: PDConfig, scheduler: HandoverScheduling, access: EngineAccess, agent: ControlAgent,
                 transfer: EngineTransfer, capacity: PrefillCapacity, metrics: MetricsRecorder,
                 media: MediaBook | None = None) -> None:
        super().__init__(config, agent, transfer, metrics)
        self._scheduler = scheduler
        self._access = access
        self.fence = BlockFence(scheduler.kv_cache_manager.block_pool)
        reader = AdapterReader(access.wake)
        self.adapters = AdapterBook(scheduler.lora_config, reader, config.role is Role.PREFILL)
        self.media = media or MediaBook()
        self._listed: tuple[str, ...] = ()  # of the scopes of adapters and media
        self._front_ends = {0}  # that may have had figures: those that have sent a request, too
        self.remote_prefills = ParkedRequests(config, self.protocol.decode, scheduler, self.fence, capacity.rows,
                                              metrics, self.speed, self.adapters, self.media)
        self.prefill_jobs: InternalRequests | None = None
        if config.role.prefills:
            self.prefill_jobs = InternalRequests(config, self.protocol.prefill, scheduler, access, capacity, self.fence,
                                                 metrics, self.speed, self.adapters, self.media)
            self.prefill_jobs.execute = transfer.execute
            self.prefill_jobs.set_credits()
        self.holds = HeldPrompts(config, self.protocol, self.fence, scheduler.block_size,
                                 scheduler.cache_config.num_gpu_blocks, metrics, self._to_ranks)
        self._step = self._processed_step = 0
        self._brings_kv = self._has_new = self._lacks_room = False
        self._look_due = 0.0
        if config.is_two_sided:
            self.remote_prefills.send_grants = transfer.execute
        report_end = self.prefill_jobs.report_end if self.prefill_jobs is not None else ignore_end
        transfer.start(access.wake, partial(guarded, metrics, report_end))
        self.end_reports: Callable[[], None] | None = None  # where the load is reported
        scheduler.binding = self
        self._finalizer = finalize(self, _shut, agent, transfer, access, reader)

    # Calls of the connector.

    def match(self, request: Request, cached_tokens: int) -> int | None:
        """How many of the request's tokens after the `cached_tokens` come from a peer; None: ask again next step."""
        part = self.prefill_jobs if self._is_internal(request) else self.remote_prefills
        self._lacks_room = (found := part.match(request, cached_tokens)) is not None  # until it is `allocated`
        return found

    def allocated(self, request: Request, blocks: KVCacheBlocks, remote_tokens: int) -> None:
        """The request has these blocks; it is being parked where `remote_tokens` is more than 0."""
        self._lacks_room = False
        part = self.prefill_jobs if self._is_internal(request) else self.remote_prefills
        part.allocated(request, blocks.get_block_ids(), remote_tokens)

    def finished(self, request: Request, tables: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The request has ended and still has its blocks, those of each group. Returns what its answer says of those
        that are held."""
        params = None
        self.remote_prefills.note_ended(request)
        if self._is_internal(request):
            self._guard(self.prefill_jobs.finished, request, tables, self._progress)
            if request.lora_request is not None:
                self._set_timer()
            self._transmit()
        else:
            self.remote_prefills.withdraw(request.request_id)
            self.remote_prefills.settle_hold(request)
            if self.prefill_jobs is not None:
                self.prefill_jobs.drop_prompt(request.request_id)
            if request.status in _COMPUTED and self._may_be_kept(request):
                params = self._guard(self.holds.keep, request.request_id, request.sampling_params.extra_args,
                                     request.prompt_token_ids, scope_of(request, self.adapters, self.media), tables[0],
                                     self.remote_prefills.set_aside_blocks)
        self.changed()
        return params

    def step_metadata(self) -> StepMetadata:
        """For the workers, with the step that is being scheduled."""
        self._step += 1
        brings_kv, self._brings_kv = self._brings_kv, False
        return StepMetadata(self._step, brings_kv)

    def take_stats(self) -> HandoverStats | None:
        """Our figures since the last call."""
        return self._metrics.take()

    # Calls of the scheduler.

    @property
    def asleep(self) -> bool:
        """Whether no step is to be made although there are requests."""
        return self.stalled and not self._scheduler.finished_req_ids and self._access.may_sleep

    def look(self) -> None:
        """Apply what is new, if the engine was woken for something or a job may have its turn."""
        self._access.end_parked(self.remote_prefills.waiting_fallbacks)
        if self._access.take_wake() or (self._has_jobs() and self.prefill_jobs.queued):
            self._apply_updates()
            self._metrics_stale = True

    def added(self, request: Request) -> None:
        """A request has come, maybe one that has its turn among the jobs. Further input of a session, and its end, come
        as requests of their own with the session's id, and V1 does not schedule these."""
        self.changed()
        self._has_new = True
        if not self._is_internal(request):
            self._front_ends.add(request.client_index)
        if request.lora_request is not None and not self._is_internal(request):
            self.adapters.note_use(request.lora_request)
            if self._has_jobs():
                self._guard(self.prefill_jobs.give_back_namesakes, request.lora_request, self._progress)
        if (self.prefill_jobs is not None and self._scheduler.requests.get(request.request_id) is request
                and self._may_be_kept(request) and self.holds.has_turn(request.sampling_params.extra_args)):
            self._guard(self.prefill_jobs.add_prompt, request.request_id, request, request.num_tokens, request.priority)

    def changed(self) -> None:
        """A request has gone, or the engine is paused or resumed: steps make sense again."""
        self.stalled = False
        self._look_due = 0.0
        self._metrics_stale = True

    def rest(self) -> None:
        """No step is made now: report the load and the figures that would go with one."""
        if self._metrics_stale:
            self._publish_stats()
            self._report_load()

    def before_schedule(self) -> StepShare | None:
        """A step is about to be scheduled. Returns what it is to compute, because of peers' jobs; None: what V1
        would."""
        if self.stalled and not self._scheduler.finished_req_ids:  # it has work by V1's rules, and can do none
            self._access.await_input()
        handing_over = self.remote_prefills.waiting_for_peers or self._has_jobs()
        if self._access.take_wake() or handing_over or time.monotonic() >= self._look_due:
            self._apply_updates()
        self.remote_prefills.begin_round()
        return self.prefill_jobs.arrange() if self._has_jobs() else None

    def after_schedule(self, output: SchedulerOutput, throttled: bool) -> None:
        """This step was scheduled. `throttled`: it was not to begin prefills, as none does that preempts."""
        scheduler, tokens = self._scheduler, output.total_num_scheduled_tokens
        self.remote_prefills.scheduled()
        restore_media(output.scheduled_new_reqs, scheduler)
        if tokens or (self._has_new and scheduler.requests and self._access.takes_requests):  # other ranks may step
            self._access.start_wave()
        self._has_new = False
        if tokens and self._timer is not None:
            drafts = output.scheduled_spec_decode_tokens  # a decode is one token, however many are guessed beside it
            self._timer.began(time.monotonic(), self._step, [count - len(drafts.get(name, ())) for name, count
                                                             in output.num_scheduled_tokens.items()])
        self.stalled = bool(not (tokens or throttled or output.preempted_req_ids or scheduler.running
                                 or scheduler.ec_connector is not None or scheduler.awaits_grammar())
                            and (len(self.fence) or self.remote_prefills.parked_ids()
                                 or self.remote_prefills.next_deadline() is not None))
        lacks_room, self._lacks_room = self._lacks_room, False
        if self.stalled and lacks_room and not scheduler.deferred_frees:  # of blocks that a step in flight may write
            self.protocol.prefill.end_old_holds()
        if self._has_jobs():
            self.prefill_jobs.scheduled(self._step, output.num_scheduled_tokens)
            if not throttled:
                held = {one.request_id for one in scheduler.kv_holding_waiting}  # V1 stops at one that finds no room
                blocked = not output.scheduled_new_reqs and (self.remote_prefills.waiting_for_peers
                                                             or held & scheduler.finished_recving_kv_req_ids)
                self._patience.scheduled(time.monotonic(), self.prefill_jobs.waiting if blocked else ())
            if self.prefill_jobs.has_requests:
                self._transmit()  # reads into blocks that were allocated in this step
        next_look = self._patience.next_look() if self.stalled else None
        if next_look is not None or (self.stalled and self.remote_prefills.falling_back):
            self._access.wake()  # give back at once what nothing here will make room for
        self._refuse()
        self._set_timer(next_look)

    def before_update(self, output: SchedulerOutput) -> None:
        """The output of this step is about to be processed: the workers have done it, and all steps before it."""
        self._processed_step = self.holds.after_step = output.kv_connector_metadata.step
        if self.prefill_jobs is not None:
            self.prefill_jobs.after_step = self._processed_step
        if self._timer is not None:
            self._timer.ended(time.monotonic(), self._processed_step)
        if output.total_num_scheduled_tokens:
            self.stalled = False

    def after_update(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """The output of a step was processed. Takes our own requests out of what goes to the clients."""
        self.remote_prefills.note_first_tokens()
        self._update_metrics()
        self._metrics_stale = True  # the figures of this step went with its output
        if self._has_jobs() and self._guard(self.prefill_jobs.step_done, self._processed_step):
            self._transmit()
        if self.prefill_jobs is None or not self.prefill_jobs.has_requests_here:
            return
        for client, output in list(outputs.items()):
            ours = {one.request_id for one in output.outputs if self.prefill_jobs.is_internal(one.request_id)}
            if ours:
                output.outputs = [one for one in output.outputs if one.request_id not in ours]
                output.finished_requests = output.finished_requests and output.finished_requests - ours
                for request_id in ours:  # its only token is its last
                    self.prefill_jobs.forget(request_id)
                if not (output.outputs or output.finished_requests or output.scheduler_stats):
                    del outputs[client]

    def after_finish(self, finished: list[Request]) -> list[Request]:
        """These requests were aborted. Returns them without our own."""
        if finished:  # V1 makes each abort of a client twice
            self.changed()
        ours = [request for request in finished if self._is_internal(request)]
        for request in ours:
            if self._scheduler.finished_req_ids_dict is not None:
                self._scheduler.finished_req_ids_dict[request.client_index].discard(request.request_id)
            self.prefill_jobs.forget(request.request_id)
        return [request for request in finished if request not in ours]

    def remove_internal(self, stats: SchedulerStats) -> None:
        """Take what V1 has counted of our own requests out of these statistics, and look-ups that brought nothing."""
        self.remote_prefills.take_lookups_out_of(stats)
        if self.prefill_jobs is None:
            return
        if self.prefill_jobs.has_requests_here:
            scheduler = self._scheduler
            running, deferred, waiting = (sum(map(self._is_internal, requests)) for requests in (
                scheduler.running, scheduler.deferred_waiting, (*scheduler.waiting, *scheduler.kv_holding_waiting)))
            stats.num_running_reqs -= running
            stats.num_skipped_waiting_reqs -= deferred
            stats.num_waiting_reqs -= waiting - deferred
            for request, stage in scheduler._kv_fetch_stages.items():
                stats.num_kv_fetch_reqs_by_stage[stage] -= self._is_internal(request)
        self.prefill_jobs.take_lookups_out_of(stats)

    def pause_changed(self, state: PauseState) -> None:
        """The engine was paused, or goes on. Jobs that a pause would delay are given back, and none is taken then."""
        self.changed()
        if self.prefill_jobs is not None and state is PauseState.UNPAUSED:
            self._guard(self.prefill_jobs.set_credits)
        elif self.prefill_jobs is not None:
            begun = self.prefill_jobs.waiting if state is PauseState.PAUSED_NEW else self.prefill_jobs.computing
            self._give_up_jobs(begun, "this engine is paused")

    def weights_replaced(self) -> None:
        """The weights are about to be others than those of the fingerprint: work with no other engine any more. Fences
        stay up: they hold what was computed before. Raises PDError where the weights must stay as they are."""
        self._give_up_sharing()
        self._fall_back()
        self._scheduler.free_resumed()

    def finish_steps(self) -> None:
        """Process the outputs of all steps in flight. The scheduler is paused."""
        self._access.finish_steps()

    def fall_back_all(self) -> None:
        """No request waits for a peer any more, and no block is held for one unless a peer does not answer within
        `FENCES_S`, or a transfer has failed and may still land."""
        self._fall_back()
        deadline = time.monotonic() + FENCES_S
        while self._passing_fences() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._apply_updates()
        self._scheduler.free_resumed()
        if len(self.fence):
            logger.warning("%d fences are still up, %d of them after %g s, the others until an engine ends: peers may "
                           "touch those blocks", len(self.fence), len(self._passing_fences()), FENCES_S)

    def close(self) -> None:
        """Leave the peers and release every transfer. Idempotent."""
        if self.end_reports is not None:
            self.end_reports()
        self._finalizer()

    # Inside.

    def _fall_back(self) -> None:
        """No request waits for a peer any more."""
        self.protocol.prefill.close_unclaimed_holds()
        for request_id in self.remote_prefills.parked_ids():
            request = self.remote_prefills.withdraw(request_id)
            self.remote_prefills.uncount_attempt(request)
            self._scheduler.fail_parked(request)
        self.changed()
        self._apply_updates()

    def _passing_fences(self) -> set[Attempt]:
        """Those that come down while all engines live."""
        return set(self.fence.attempts()) - self.protocol.operators.unproven_attempts()

    def _has_jobs(self) -> bool:
        """Whether a step may concern jobs of peers."""
        return self.prefill_jobs is not None and not self.prefill_jobs.idle

    def _is_internal(self, request: Request) -> bool:
        return self.prefill_jobs is not None and self.prefill_jobs.is_internal(request.request_id)

    def _apply_updates(self) -> None:
        """Collect what is new, and apply it to the scheduler."""
        self._look_due = time.monotonic() + LOOK_S
        self._collect()
        progress, self._progress = self._progress, Progress()
        if progress:
            self.stalled = False
            self._brings_kv = self._brings_kv or progress.brings_kv
        for attempt in (*progress.finished_prefills, *progress.read_prefixes):
            self.remote_prefills.note_arrived(attempt)
            if (request := self._leave(attempt)) is not None:
                self._scheduler.resume_parked(request)
        for attempt in reversed(progress.failed_prefills):  # each goes to the front
            if (request := self._leave(attempt)) is not None:
                self._scheduler.fail_parked(request)
        for attempt, block_ids in progress.sent_blocks:
            self.fence.release(attempt, block_ids)
        for attempt in (*progress.finished_prefills, *progress.finished_transfers):
            self.fence.release(attempt)
        if self._has_jobs() and self._scheduler.pause_state is PauseState.PAUSED_NEW:
            self._give_up_jobs(self.prefill_jobs.waiting, "this engine is paused")  # V1 has preempted them since
        if self.prefill_jobs is not None:
            self._guard(self.prefill_jobs.check_adapters, self._progress)
            if self.prefill_jobs.checks_due is not None:  # after the first of them
                self._set_timer(self._patience.next_look() if self.stalled else None)
        if self._guard(self.remote_prefills.look_at_fallbacks, self.stalled):
            self.stalled = False
        self._refuse()
        if self.remote_prefills.next_deadline() is not None:
            self._set_timer(self._patience.next_look() if self.stalled else None)
        if (scopes := (*self.adapters.scopes(), *self.media.scopes())) != self._listed:
            self._listed = scopes
            self.protocol.prefill.set_scopes((SALT, *scopes))
        self._transmit()

    def _set_timer(self, next_look: float | None = None) -> None:
        """Have this engine woken at this time, or when a check of a job has waited long enough, or when a fallback is
        to be looked at, whatever is first."""
        times = [next_look, self.prefill_jobs.checks_due if self.prefill_jobs is not None else None]
        if (deadline := self.remote_prefills.next_deadline()) is not None:
            times.append(deadline + SLACK_S)
            if self.stalled:
                times.append(time.monotonic() + LOOK_S)
        self._access.wake_at(min((one for one in times if one is not None), default=None))

    def _refuse(self) -> None:
        """End those requests with an error that may be prefilled nowhere."""
        if refused := self.remote_prefills.take_refused():
            self._access.refuse(refused)

    def _may_be_kept(self, request: Request) -> bool:
        """Whether its prompt may be kept for another engine. Not with an adapter: the answer would have to wait for a
        look at its files. Nor with media, whose blocks go by the ids of clients here."""
        return (request.lora_request is None and not request.mm_features
                and can_go_remote(request, self.adapters, self.media))

    def _leave(self, attempt: Attempt) -> Request | None:
        request = self.remote_prefills.leave(attempt)
        if request is None and self.prefill_jobs is not None:
            request = self.prefill_jobs.leave(attempt)
        return request

    def _transmit(self) -> None:
        """Pass transfer requests on to the ranks. All steps that used their blocks have been processed."""
        if self.prefill_jobs is None:
            return
        if requests := self.prefill_jobs.take_requests(self._progress):
            self.transfer.execute(requests)
        for attempt in self._progress.finished_transfers:  # of writes that were given up before they were posted
            self.fence.release(attempt)
        self._progress.finished_transfers.clear()

    def _publish_stats(self) -> None:
        """Send the figures, with which no step goes now. Those of steps went to any front end. Of several, one may be
        late, and what is set last counts: so each gets the states once more."""
        self._metrics_due = 0.0
        self._update_metrics()
        ours = self._metrics.take()
        have_several = len(self._front_ends) > 1
        if (ours is None and not have_several) or (stats := self._scheduler.make_stats(None, ours)) is None:
            return
        self._access.publish(stats)
        for front_end in self._front_ends if have_several else ():
            self._access.publish(states_beside(stats, self._metrics.states()), front_end)

    def _to_ranks(self, requests: list[TransferRequest]) -> None:
        (self.transfer.execute if self.prefill_jobs is None else self.prefill_jobs.append_requests)(requests)

    def _has_running(self) -> bool:
        return bool(self._scheduler.running)

    def _load(self) -> Load:
        parked = len(self.remote_prefills.parked_ids())
        running, waiting = self._scheduler.get_request_counts()
        return Load(running + parked, waiting - parked,
                    self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def _shut(agent: ControlAgent, transfer: EngineTransfer, access: EngineAccess, reader: AdapterReader) -> None:
    access.close()
    reader.close()
    close_engine(agent, transfer)
