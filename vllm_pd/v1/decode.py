# SPDX-License-Identifier: Apache-2.0
"""The decode engine's half of the binding, for V1's requests: see `vllm_pd.handover.decode`.

A parked request is in V1's status WAITING_FOR_REMOTE_KVS and has no seat. V1 asks for a decision whenever the request
is at the head of its queue, and acts on it only where blocks are free. So `match` decides and changes nothing;
`allocated` commits.
"""
from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_pd.decisions.fallback import FallbackAnswer, FallbackRule, Fallbacks
from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.decisions.policy import Decision, Reason
from vllm_pd.handover.decode import DecodeHandover
from vllm_pd.handover.fence import BlockFence
from vllm_pd.handover.lookups import PrefixLookups
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.progress import Progress
from vllm_pd.handover.records import DecodeCapacity
from vllm_pd.peer.decode import DecodeSession
from vllm_pd.protocol.actions import Event
from vllm_pd.protocol.messages import Attempt
from vllm_pd.protocol.rows import BlockRows
from vllm_pd.protocol.scope import PromptScope
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v1.adapters import AdapterBook
from vllm_pd.v1.features import can_go_remote, scope_of
from vllm_pd.v1.groups import draft_blocks, needs_next_token, usable_hit
from vllm_pd.v1.media import MediaBook
from vllm_pd.v1.spans import PromptSpans

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

_QUEUED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_NO_PEER = (Reason.TTFT, Reason.BROKER, Reason.PEER, Reason.QUEUE, Reason.CAP)  # no peer can do it, or not soon


class ParkedRequests(DecodeHandover["Request"]):
    """All prompts of one V1 engine that are, or may be, prefilled elsewhere."""

    def __init__(self, config: PDConfig, session: DecodeSession, scheduler: Scheduler, fence: BlockFence,
                 rows: BlockRows, metrics: PDMetrics, speed: StepSpeed, adapters: AdapterBook,
                 media: MediaBook) -> None:
        self._adapters, self._media_book = adapters, media
        cache, batch = scheduler.cache_config, scheduler.scheduler_config
        for_drafts = scheduler._spec_decode_step_blocks  # V1 parks a request only where so many are free beside it
        blocks = cache.num_gpu_blocks - (for_drafts + 1 if for_drafts else 0)  # nor is its null block ever free
        blocks -= draft_blocks(scheduler.kv_cache_config.kv_cache_groups)
        super().__init__(config, session, DecodeCapacity(rows, blocks, batch.max_num_seqs,
                                                         scheduler.max_num_scheduled_tokens), metrics, speed)
        self._rows = rows
        self._scheduler = scheduler
        self._fence = fence
        self._caching = bool(cache.enable_prefix_caching)
        self._says_next_token = needs_next_token(scheduler, rows)
        self._by_attempt: dict[Attempt, Request] = {}
        self._by_id: dict[str, Attempt] = {}
        self._matched: dict[str, tuple[Decision, int]] = {}  # by request id: the last decision and its prefix hit
        self._first_tokens: weakref.WeakKeyDictionary[Request, float] = weakref.WeakKeyDictionary()
        self._looked_up: dict[str, int] = {}  # by request id: the prefix hit, from the look-up to the allocation
        self._hits: dict[Attempt, int] = {}  # the prefix hits of the parked requests
        self._lookups: PrefixLookups | None = None
        self._ended: list[Request] = []  # as they were at their end, while a step in flight still computes them
        self._spans = PromptSpans()
        self._refused: dict[Request, Decision] = {}  # to be ended between two steps
        if config.fallback_config.rule is not FallbackRule.LOCAL:
            self.fallbacks = Fallbacks(config.fallback_config, self._uncomputed_here)

    def match(self, request: Request, cached_tokens: int) -> int | None:
        """How many of the prompt's tokens after the `cached_tokens` a peer is to compute: all but our own, or 0. None:
        ask again with the next step. May be asked any number of times."""
        self._matched.pop(request.request_id, None)
        self._looked_up[request.request_id] = cached_tokens
        usable, decision = self._decide_with_hit(request, cached_tokens)
        if decision is None:
            return 0
        if decision.remote and cached_tokens >= self._num_remote(request):
            decision = Decision(False, Reason.THRESHOLD)  # nothing but a state is missing, which goes with blocks only
        if self._awaits_twin(request, cached_tokens, decision) or self._awaits_hit(request, cached_tokens, decision):
            return None
        if (self.falls_back(request, decision)
                and self._ask(time.monotonic(), request, usable, decision) is not FallbackAnswer.LOCAL):
            return None
        self._matched[request.request_id] = decision, cached_tokens
        return self._num_remote(request) - cached_tokens if decision.remote else 0

    def allocated(self, request: Request, tables: tuple[list[int], ...], remote_tokens: int) -> None:
        """The request has blocks for what a peer is to compute, or for what is computed here next. `tables`: the block
        ids of each group. `remote_tokens`: as `match` answered; more than 0 where the request is being parked."""
        if (looked_up := self._looked_up.pop(request.request_id, None)) is not None and not request.num_preemptions:
            self._uncount(request, looked_up, remote_tokens)
        decision, cached_tokens = self._matched.pop(request.request_id, (None, 0))
        if decision is None or decision.remote != (remote_tokens > 0):
            return  # it was settled before
        self._spans.decided(request.trace_headers, decision, request.num_tokens)
        if (attempt := self.commit(request, decision)) is not None:
            block_ids = self._rows.pick(tables, self._num_remote(request), cached_tokens // self._rows.block_size)
            self._fence.hold(attempt, block_ids)
            self._by_attempt[attempt] = request
            self._by_id[request.request_id] = attempt
            self._hits[attempt] = cached_tokens
            if request.prefill_stats is not None:  # what a peer computes was cached nowhere, as the client's usage says
                request.prefill_stats.num_cached_tokens = cached_tokens
            self._spans.parked(attempt, request.trace_headers, self._num_remote(request), cached_tokens)
            self.start(attempt, request, block_ids, cached_tokens)

    def look_at_fallbacks(self, stalled: bool) -> bool:
        """Whether a prompt that waits as a fallback may go on now. To be asked while the engine is `stalled`, and at
        `next_deadline`: those that have waited as long as they may are refused, or V1 is to ask about them anew."""
        if self.fallbacks is None:
            return False
        now, goes = time.monotonic(), False
        self.fallbacks.begin_round()
        overdue = self.fallbacks.overdue(now)
        for request in list(self.fallbacks.waiting) if stalled else overdue:
            if request.status not in _QUEUED:
                continue  # the store has some of it by now, which is being loaded
            cached_tokens = self._looked_up.get(request.request_id, 0)
            usable, decision = self._decide_with_hit(request, cached_tokens)
            if decision is not None and self._awaits_twin(request, cached_tokens, decision):
                self.fallbacks.forget(request)  # as `match` asks it first
            elif decision is not None and self.falls_back(request, decision):
                goes |= self._ask(now, request, usable, decision) is FallbackAnswer.LOCAL
            else:
                goes = True
        for request in overdue:
            self.fallbacks.forget(request)
        return goes

    def begin_round(self) -> None:
        """V1 is about to ask about those that wait, in their order."""
        if self.fallbacks is not None:
            self.fallbacks.begin_round()

    def waiting_fallbacks(self) -> list[str]:
        """The ids of the requests that wait because they may not be prefilled here, the first one first."""
        return [] if self.fallbacks is None else [request.request_id for request in self.fallbacks.waiting]

    def next_deadline(self) -> float | None:
        """When the first of them is to be looked at, of the monotonic clock; None where none waits."""
        return None if self.fallbacks is None else self.fallbacks.next_deadline

    def take_refused(self) -> list[str]:
        """The ids of the requests that are to be ended with an error, each once."""
        refused, self._refused = self._refused, {}
        for request, decision in refused.items():
            self.refuse(request, decision)
            self._spans.decided(request.trace_headers, decision, request.num_tokens, True)
        return [request.request_id for request in refused]

    def handle(self, event: Event, progress: Progress) -> None:
        """As the base class says."""
        super().handle(event, progress)
        self._spans.handle(event)

    def abort(self, attempt: Attempt) -> None:
        """As the base class says."""
        super().abort(attempt)
        self._spans.aborted(attempt)

    def leave(self, attempt: Attempt) -> Request | None:
        """The attempt's request goes on without it: resumed, or to be computed here. Returns it; None where it was
        aborted."""
        request = self._by_attempt.pop(attempt, None)
        if request is not None:
            del self._by_id[request.request_id]
            self._hits.pop(attempt, None)
        return request

    def note_arrived(self, attempt: Attempt) -> None:
        """The KV of the attempt's request has come: V1 counts its look-up now. To be called before `leave`."""
        request, hit = self._by_attempt.get(attempt), self._hits.get(attempt)
        stats = self._scheduler.connector_prefix_cache_stats
        if request is None or hit is None or stats is None:
            return
        came = self._num_remote(request) - hit
        self._scheduler.kv_cache_manager.record_prefix_cache_stats(request, hit)
        stats.record(came, came, False, self._scheduler.connector.get_external_cache_hit_sources(request, came))

    def take_lookups_out_of(self, stats: SchedulerStats) -> None:
        """V1 has counted look-ups since the last call in `stats` that it should not have: count them no more."""
        if self._lookups is not None:
            self._lookups.take_out_of(stats)
            self._lookups = None

    def withdraw(self, request_id: str) -> Request | None:
        """The request does not wait for a peer any more: it was aborted, or its blocks are needed. Its fence stays
        until the attempt's Released. Returns the request; None if it is not parked."""
        self._matched.pop(request_id, None)
        self._looked_up.pop(request_id, None)
        attempt = self._by_id.get(request_id)
        if attempt is None:
            return None
        request = self.leave(attempt)
        self.abort(attempt)
        return request

    def parked_ids(self) -> list[str]:
        """The ids of the parked requests."""
        return list(self._by_id)

    def parked_attempts(self) -> list[Attempt]:
        """Their attempts."""
        return list(self._by_attempt)

    def note_first_tokens(self) -> None:
        """A step's output was processed. Note which resumed requests got their first token."""
        for request in self._resuming:
            if request.num_output_tokens and request not in self._first_tokens:
                self._first_tokens[request] = time.time()

    def note_ended(self, request: Request) -> None:
        """Any request has ended, peers' jobs included. V1 preempts none that a step in flight computes."""
        self._refused.pop(request, None)
        if self.fallbacks is not None:
            self.fallbacks.forget(request)
        self._ended = [one for one in (*self._ended, request)
                       if one.last_sched_seq > self._scheduler.processed_step_seq]

    def _uncount(self, request: Request, cached_tokens: int, remote_tokens: int) -> None:
        """V1 counts the look-ups of a request that it admits. Those of a parked one count when its KV has come: if it
        does not come, the request is admitted again. One that may use no cache is looked up nowhere, as V1 itself says
        of its own cache."""
        uncached = request.num_tokens - cached_tokens
        if remote_tokens:
            made = PrefixLookups(1, request.num_tokens, cached_tokens, 1, uncached, remote_tokens)
        elif request.skip_reading_prefix_cache:
            made = PrefixLookups(peer_requests=1, peer_queries=uncached)
        else:
            return
        self._lookups = made if self._lookups is None else self._lookups + made

    def _decide_with_hit(self, request: Request, cached_tokens: int) -> tuple[int, Decision | None]:
        """How many of these tokens are a hit for what is computed next, and `decide` with them."""
        usable = cached_tokens if self._request(request).stays else usable_hit(self._scheduler, self._rows, request,
                                                                               cached_tokens)
        return usable, self.decide(request, usable)

    def _ask(self, now: float, request: Request, cached_tokens: int, decision: Decision) -> FallbackAnswer:
        """What a fallback may do. One that is refused is ended between two steps."""
        answer = self.fallbacks.ask(now, request, request.num_tokens - cached_tokens, decision.reason)
        if answer is FallbackAnswer.REFUSE:
            self._refused[request] = decision
        return answer

    def _uncomputed_here(self, request: Request) -> int:
        return 0 if request.is_finished() else self._uncomputed(request)

    def _awaits_twin(self, request: Request, cached_tokens: int, decision: Decision) -> bool:
        """Whether a peer prefills blocks for another request that are this one's prefix hit later: so go the samples of
        a request with n > 1. No prompt waits that is to stay here anyway, or lacks only its last block, or has its turn
        after a fallback: others wait for it. One that is held waits only while another reads what is held. A state that
        comes is a hit only at the end of a block, and a window only where blocks of all sizes end, so with states, or
        with such sizes, nobody waits."""
        if self._rows.state_tokens or self._rows.sizes:
            return False
        hashes, is_held = request.block_hashes, decision.reason is Reason.HELD
        return bool(self._caching and hashes and not request.num_output_tokens and not self._has_turn(request)
                    and (decision.remote or decision.reason in _NO_PEER)
                    and request.num_prompt_tokens - cached_tokens > self._capacity.block_size
                    and any(len(twin.block_hashes) == len(hashes) and twin.block_hashes[-1] == hashes[-1]
                            and (not is_held or self._hold(twin) is not None) for twin in self._by_attempt.values()))

    def _awaits_hit(self, request: Request, cached_tokens: int, decision: Decision) -> bool:
        """Whether a peer may read the prefix hit, and its KV is not in memory yet. V1 hashes a block when the step that
        fills it is scheduled, and several steps may be in flight, also when the request has ended meanwhile."""
        if not cached_tokens or not decision.remote or decision.reason is Reason.HELD or self._rows.windows:
            return False  # with several groups no peer reads it
        size, hashes = self._capacity.block_size, request.block_hashes
        ended = (one for one in self._ended if one.last_sched_seq > self._scheduler.processed_step_seq)
        for other in (*self._scheduler.running, *ended):
            final = (other.num_computed_tokens - other.num_in_flight_tokens) // size
            if final < cached_tokens // size and other.block_hashes[final:final + 1] == hashes[final:final + 1]:
                return True  # a block's hash is that of all tokens up to it
        return False

    def _hold(self, request: Request) -> Attempt | None:
        if request.lora_request is not None or request.mm_features:
            return None  # nobody keeps such a prompt
        return super()._hold(request)

    def _num_remote(self, request: Request) -> int:
        """How many tokens of its prompt a peer is to compute, those of its prefix hit included."""
        return request.num_prompt_tokens - self._rows.own_tokens

    def _parked(self) -> Mapping[Attempt, Request]:
        return self._by_attempt

    def _quarantined(self) -> Collection[Attempt]:
        return self._attempts.keys() - self._by_attempt.keys()

    def _has_running(self) -> bool:
        return bool(self._scheduler.running)

    def _can_go_remote(self, request: Request) -> bool:
        return can_go_remote(request, self._adapters, self._media_book)

    def _has_media_room(self, request: Request) -> bool:
        if not request.mm_features or not self._can_go_remote(request):
            return True
        return self._session.takes_media(self._scope(request).media_bytes)

    def _extra_args(self, request: Request) -> Any:
        return request.sampling_params and request.sampling_params.extra_args

    def _request_id(self, request: Request) -> str:
        return request.request_id

    def _prompt(self, request: Request) -> list[int]:
        return request.prompt_token_ids[:self._num_remote(request)]

    def _scope(self, request: Request) -> PromptScope:
        return scope_of(request, self._adapters, self._media_book)

    def _media(self, request: Request) -> tuple[bytes, ...]:
        return self._media_book.encoded(request)

    def _next_token(self, request: Request) -> int | None:
        return request.prompt_token_ids[self._num_remote(request)] if self._says_next_token else None

    def _priority(self, request: Request) -> int:
        return request.priority

    def _num_tokens(self, request: Request) -> int:
        return request.num_tokens

    def _has_outputs(self, request: Request) -> bool:
        return request.num_output_tokens > 0

    def _awaits_prefill(self, request: Request) -> bool:
        return request.status in _QUEUED or (not request.is_finished() and request.is_prefill_chunk)

    def _uncomputed(self, request: Request) -> int:
        return max(0, request.num_prompt_tokens - request.num_computed_tokens)

    def _num_decoding(self) -> int:
        return sum(not self._uncomputed(request) for request in self._scheduler.running)

    def _is_running(self, request: Request) -> bool:
        return request.status is RequestStatus.RUNNING or request.is_finished()

    def _is_finished(self, request: Request) -> bool:
        return request.is_finished()

    def _first_token_at(self, request: Request) -> float | None:
        return self._first_tokens.get(request)
