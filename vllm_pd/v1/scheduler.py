# SPDX-License-Identifier: Apache-2.0
"""The scheduler of an engine with disaggregation: V1's own class, sync or async, with a mixin before it.

The mixin resumes, fails and aborts parked requests through the scheduler's own sets, in the scheduler's own thread.
Nothing is ever reported in a connector's sets of ids: one that V1 does not expect there ends the engine. The request
itself is V1's throughout; the blocks that a peer may still touch are held by `vllm_pd.handover.fence` alone.

    parked                 status WAITING_FOR_REMOTE_KVS, in `kv_holding_waiting`
    its KV is there        id in `finished_recving_kv_req_ids`: hashed and scheduled by the next `schedule`
    its KV will not come   `_handle_failed_recving`, then the same and freed at once; in `waiting` again, in front
    some of it has come    hashed and freed at once: a prefix hit; in `waiting` again, in front
    aborted                id in that set before `finish_requests`: nothing is delayed, it is gone at once
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from vllm_pd.v1.contract import StepBinding, StepShare


def make_scheduler(*, vllm_config: VllmConfig, **arguments: Any) -> HandoverScheduling:
    """What `scheduler_cls` names: the scheduler for this configuration. Called by EngineCore, with keywords only."""
    base = AsyncHandoverScheduler if vllm_config.scheduler_config.async_scheduling else SyncHandoverScheduler
    return base(vllm_config=vllm_config, **arguments)


class HandoverScheduling(Scheduler):
    """The mixin. `binding` is None until the engine's loop begins; till then this is V1's scheduler."""

    binding: StepBinding | None = None

    # What the binding calls.

    def resume_parked(self, request: Request) -> None:
        """The request's KV is there. No effect on one that is not parked (any more): its id would stay in the set and
        resume a later parking too early."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.finished_recving_kv_req_ids.add(request.request_id)

    def fail_parked(self, request: Request) -> None:
        """The request's KV will not come: its blocks are freed, and it begins anew in fresh ones, before all others
        that hold none. Among those that hold blocks it must not stay, as V1 has it: where no block is free it would
        stop those behind it whose KV is there. No effect on one that is not parked."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._handle_failed_recving({request.request_id})
            self.begin_anew(request)

    def begin_anew(self, request: Request) -> None:
        """A parked request begins anew, as `fail_parked` says. What of its KV has come is its prefix hit by then."""
        self.finished_recving_kv_req_ids.add(request.request_id)
        self._handle_blocked_waiting_request(request)  # frees its blocks, or makes them prefix hits
        if request.num_computed_tokens:
            self.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
        self.kv_holding_waiting.remove_request(request)
        self.deferred_waiting.discard(request)
        self._inflight_prefills.discard(request)
        self.waiting.prepend_request(request)

    def free_resumed(self) -> None:
        """Begin requests anew whose KV is there, and which no step has resumed yet."""
        for request in list(self.kv_holding_waiting):
            if request.request_id in self.finished_recving_kv_req_ids:
                self.fail_parked(request)

    def awaits_grammar(self) -> bool:
        """Whether a waiting request waits for its grammar, whose thread wakes nobody."""
        return any(request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR for request in self.waiting)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """V1's, but a request waits whose adapter is one more than `max_loras` beside all that runs. V1 counts those
        that the present step computes, without those whose token is in flight, and ends when a step has them all."""
        return super()._handle_blocked_waiting_request(request) and (
            self.binding is None or self.lora_config is None or request.lora_request is None
            or self.binding.adapters.fits(request.lora_request, self.running))

    # What the engine calls.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """V1's, after the updates were applied."""
        if self.binding is None:
            return super().schedule(throttle_prefills)
        share = self.binding.before_schedule()
        output = self._schedule_share(share, throttle_prefills) if share else super().schedule(throttle_prefills)
        self.binding.after_schedule(output, throttle_prefills)
        return output

    def _schedule_share(self, share: StepShare, throttle_prefills: bool) -> SchedulerOutput:
        """V1's `schedule`, of a step that has no more than this share."""
        config = self.scheduler_config
        before = (self.max_num_scheduled_tokens, config.long_prefill_token_threshold,
                  self.adaptive_long_prefill_threshold)
        self.max_num_scheduled_tokens = min(share.tokens, before[0])  # 0 while a group comes to rest
        if share.of_each:
            least = 1 + self.num_spec_tokens  # V1 ends where it cuts off what it adds to a last token
            config.long_prefill_token_threshold = max(least, min(share.of_each, before[1] or share.of_each))
            self.adaptive_long_prefill_threshold = False
        try:
            return super().schedule(throttle_prefills)
        finally:
            (self.max_num_scheduled_tokens, config.long_prefill_token_threshold,
             self.adaptive_long_prefill_threshold) = before

    def update_from_output(self, scheduler_output: SchedulerOutput,
                           model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """V1's, without the outputs of our own requests."""
        if self.binding is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        self.binding.before_update(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.binding.after_update(outputs)
        return outputs

    def add_request(self, request: Request) -> None:
        """V1's. A client's own `kv_transfer_params` are for other connectors, and V1 ends if they are no map."""
        request.kv_transfer_params = None
        super().add_request(request)
        if self.binding is not None:
            self.binding.added(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """V1's; parked requests are gone at once, and our own are not among those that are returned."""
        if self.binding is None:
            return super().finish_requests(request_ids, finished_status)
        if request_ids is not None:
            request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in self.requests if request_ids is None else request_ids:
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.finished_recving_kv_req_ids.add(request_id)
        return self.binding.after_finish(super().finish_requests(request_ids, finished_status))

    def has_requests(self) -> bool:
        """V1's, but False while all that is left waits for peers, and nothing is new."""
        if self.binding is None:
            return super().has_requests()
        self.binding.look()
        if super().has_requests() and not self.binding.asleep:
            return True
        self.binding.rest()
        return False

    def has_unfinished_requests(self) -> bool:
        """V1's, but False as `has_requests`: the other ranks of a group must not step for it."""
        return super().has_unfinished_requests() and not (self.binding is not None and self.binding.asleep)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """V1's."""
        super().set_pause_state(pause_state)
        if self.binding is not None:
            self.binding.pause_changed(pause_state)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """V1's, which a parked request, a fence, or a step in flight would make fail: these steps are processed, parked
        requests fall back, and fences that come down soon are waited for."""
        if self.binding is not None and (reset_running_requests or not self.running):
            self._finish_steps()
            self.binding.fall_back_all()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def _finish_steps(self) -> None:
        """Process the outputs of all steps in flight, and schedule nothing meanwhile."""
        before = self.pause_state
        super().set_pause_state(PauseState.PAUSED_ALL)
        try:
            self.binding.finish_steps()
        finally:
            super().set_pause_state(before)
        if before is not PauseState.UNPAUSED:  # after a reset nothing goes on that was being computed
            self.binding.pause_changed(PauseState.PAUSED_ALL)

    def make_stats(self, *arguments: Any, **keywords: Any) -> SchedulerStats | None:
        """V1's, without our own requests."""
        stats = super().make_stats(*arguments, **keywords)
        if stats is not None and self.binding is not None:
            self.binding.remove_internal(stats)
        return stats


class SyncHandoverScheduler(HandoverScheduling):
    """For one step in flight."""


class AsyncHandoverScheduler(HandoverScheduling, AsyncScheduler):
    """For several steps in flight."""
