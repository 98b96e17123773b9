# SPDX-License-Identifier: Apache-2.0
"""The decode engine's half of a binding: which prompts go to a peer, and what becomes of them.

Life of a parked request: `decide` says that a peer is to prefill it, `commit` draws an attempt for it, the scheduler
parks it, and `start` is called. Then an event of the protocol ends the attempt, which the scheduler learns with the
next step. After an attempt that failed the request waits again, in front, and `decide` is asked anew: for another
attempt, on another peer, or for none. Requests that will be prefilled here are given back batch by batch, so that the
running ones go on. The blocks belong to the scheduler throughout.

Two records (`vllm_pd.handover.records`) hold all that is known: a `RemoteRequest` for as long as its request lives, and
a `RemoteAttempt` for as long as blocks are set aside for an attempt. A request may have a second attempt while a peer
may still write the first one's blocks.
"""
from __future__ import annotations

import logging
import secrets
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from vllm_pd.decisions.expected import Expected, expect
from vllm_pd.decisions.fallback import Fallbacks, is_fallback
from vllm_pd.decisions.measured import DecodeMeasures, StepSpeed
from vllm_pd.decisions.pace import FallbackPace
from vllm_pd.decisions.policy import AskedPlace, Decision, PolicyInput, Reason, asked_place, decide, may_read_hold
from vllm_pd.handover.own_policy import load_policy
from vllm_pd.handover.progress import ArrivalNotice, Progress
from vllm_pd.handover.records import AttemptStage, DecodeCapacity, RemoteAttempt, RemoteRequest
from vllm_pd.protocol.actions import Event, Fallback, FallbackReason, Prefilled, Released, Timed
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.holds import asks_for_hold, named_hold
from vllm_pd.protocol.messages import Attempt, Timings
from vllm_pd.protocol.metaserver import external_id, named_metaserver, posted_name, request_of
from vllm_pd.protocol.scope import NO_SCOPE, PromptScope
from vllm_pd.transfer.requests import CloseGrant, Finished, OpenGrant, TransferRequest

if TYPE_CHECKING:
    from vllm_pd.handover.metrics import PDMetrics
    from vllm_pd.peer.cluster import QueueView
    from vllm_pd.peer.decode import DecodeSession
    from vllm_pd.settings.engine import PDConfig

logger = logging.getLogger("vllm.pd")

REFUSED_LOG_S = 60.0  # one line about refused prompts in this time: their clients must not write one for each
KEPT_UNMEASURED = 256  # attempts that are done, and whose timings may still come
R = TypeVar("R")  # a request, as the engine's scheduler knows it; can be hashed and weakly referenced


class DecodeHandover(ABC, Generic[R]):
    """All prompts of one decode engine that are, or may be, prefilled elsewhere. Used from the step loop only. A
    binding derives from it and says what its engine's requests and queues are (at the end). `speed` is that of the
    engine, if it measures it."""

    def __init__(self, config: PDConfig, session: DecodeSession, capacity: DecodeCapacity, metrics: PDMetrics,
                 speed: StepSpeed) -> None:
        self._session = session
        self._metrics = metrics
        self._capacity = capacity
        self._policy = config.bounds
        self._own_policy = load_policy(config.policy, config.bounds)
        self._log_decisions = config.log_decisions
        # With max_local_prefill_tokens auto only; None: nothing is measured.
        self.measures = DecodeMeasures(capacity.batch_tokens, speed,
                                       config.job_order) if config.decides_by_time else None
        self.fallbacks: Fallbacks[R] | None = None  # None: each is prefilled here. For a binding that sets it
        self._refused_log_due, self._unlogged = float("-inf"), 0
        self.job_tokens = 0  # of peers' jobs that are to be computed here too
        self.unproven_blocks = 0  # which reads for peers' jobs may still fill
        self.held_blocks = 0  # of prompts that are kept for others
        self._local: list[tuple[R, int]] = []  # requests that stay and are not computed yet, and their tokens
        self._unmeasured: dict[Attempt, tuple[int, float]] = {}  # done, without timings: tokens, time in all
        self._deadline_s = config.attempt_deadline_s
        self._metaservers = frozenset(config.metaserver_urls)
        self._warned_of_url = False
        self._requests: weakref.WeakKeyDictionary[R, RemoteRequest] = weakref.WeakKeyDictionary()
        self._attempts: dict[Attempt, RemoteAttempt] = {}
        self._resuming: list[R] = []  # their KV has come; they have no token yet
        self._pace = FallbackPace(config.max_fallback_share)
        # Passes requests on to our own ranks, with a two-sided transport; None: peers need nothing of them.
        self.send_grants: Callable[[list[TransferRequest]], None] | None = None
        self._closing: dict[str, Attempt] = {}  # by name: grants that our ranks are to close
        self._batch: list[R] = []  # the last ones that were given back to be prefilled here

    @property
    def waiting_for_peers(self) -> bool:
        """Whether a notice may arrive."""
        return bool(self._attempts)

    @property
    def falling_back(self) -> bool:
        """Whether a request whose attempt has failed waits for its turn."""
        return any(attempt.stage is AttemptStage.FAILED for attempt in self._attempts.values())

    def debug_state(self) -> dict[str, int]:
        """How many attempts have blocks, how many of them failed and were not given back, and how many requests wait
        for their first token: for tests and chaos. All are 0 at rest."""
        return {"held_blocks": len(self._attempts), "resumed": len(self._resuming),
                "given_up": sum(attempt.is_given_up for attempt in self._attempts.values())}

    def decide_and_commit(self, request: R, cached_tokens: int) -> Attempt | None:
        """The attempt under which the prompt is to be prefilled elsewhere, or None. For a scheduler that
        acts on the answer at once."""
        decision = self.decide(request, cached_tokens)
        return None if decision is None else self.commit(request, decision)

    def decide(self, request: R, cached_tokens: int) -> Decision | None:
        """Where the request's prompt is to be prefilled, of which `cached_tokens` are a prefix hit; None where it was
        settled before that it stays, and in an engine that hands nothing over, unless the request asks for that.
        Changes nothing: it may be asked any number of times."""
        remote = self._request(request)
        if remote.stays:
            return None
        state = self._session.state
        if not state.hands_over and (self.fallbacks is None or not state.role.decodes):
            return Decision(False, Reason.ROLE) if self._asked(request) is AskedPlace.REMOTE else None
        avoid = self._useless(request, remote)
        decision = self._decide(request, cached_tokens, remote, avoid, self._session.view(avoid), self._count_blocks(),
                                len(self._parked()))
        if decision.remote and not state.hands_over:  # its peers are lost to it
            return Decision(False, Reason.PEER, decision.expected)
        return decision

    def commit(self, request: R, decision: Decision) -> Attempt | None:
        """The scheduler acts on `decide`. Counted once a stay in the waiting queue: a request that is to stay is not
        asked about again. Returns the attempt to park it under; None where it stays."""
        tokens = self._note_decision(request, decision, "remote" if decision.remote else "local")
        if self.measures is not None and decision.reason is not Reason.HELD:
            self.measures.decided(time.monotonic(), decision.remote, tokens)
        self.settle_hold(request, decision)
        if self.fallbacks is not None:
            self.fallbacks.forget(request)
        if not decision.remote:
            if self.falls_back(request, decision):
                self.fallbacks.begin(request, self._num_tokens(request))
            self._stay(request)
            if self.measures is not None and decision.reason is not Reason.ROLE:
                self._local.append((request, tokens))
            return None
        remote = self._request(request)
        if remote.began_at is None:
            remote.began_at = time.monotonic()
        remote.attempts += 1
        request_id = self._request_id(request)
        # Later attempts go through the queue: the proxy may choose the same prefill engine again.
        remote.metaserver = self._metaserver(request) if remote.attempts == 1 and remote.hold is None else None
        return self._session.next_attempt(posted_name(request_id, secrets.token_hex(16)) if remote.metaserver
                                           else request_id)

    def falls_back(self, request: R, decision: Decision) -> bool:
        """Whether `fallbacks` says what becomes of the request. Not of one that was computed before, here or by a peer:
        its client waits for the rest of the answer."""
        return (self.fallbacks is not None and is_fallback(decision) and not self._has_outputs(request)
                and not self._request(request).arrived)

    def refuse(self, request: R, decision: Decision) -> None:
        """The scheduler is about to end a request with an error that falls back by this decision, once."""
        self._note_decision(request, decision, "refused")
        now = time.monotonic()
        if now < self._refused_log_due:
            self._unlogged += 1
            return
        logger.warning("request %s is refused: its prompt can't be prefilled remotely (%s), and may not be prefilled "
                       "here (the key fallback)%s", self._request_id(request), decision.reason.value,
                       f"; {self._unlogged} more since the last such line" if self._unlogged else "")
        self._refused_log_due, self._unlogged = now + REFUSED_LOG_S, 0

    def uncount_attempt(self, request: R) -> None:
        """This engine itself has withdrawn the last one: no reason to refuse the prompt."""
        if self.fallbacks is not None:
            self._request(request).attempts -= 1

    def settle_hold(self, request: R, decision: Decision | None = None) -> None:
        """The hold that the request names, if any, is to be claimed, or is not wanted: its prefill engine learns that.
        None: the request has ended."""
        hold, remote = self._hold(request), self._request(request)
        if hold is None or remote.hold_settled:
            return
        remote.hold_settled = True
        if decision is not None and decision.reason is Reason.HELD:
            remote.hold = hold
        else:
            self._metrics.hold("unused")
            self._session.drop_hold(hold)

    def start(self, attempt: Attempt, request: R, block_ids: list[int], cached_tokens: int) -> None:
        """The request is parked: submit its job. `block_ids` are the rows of what a peer is to have computed of its
        prompt, the cached prefix included (`protocol.rows`)."""
        cached_blocks = cached_tokens // self._capacity.block_size
        remote, prompt, scope = self._requests[request], self._prompt(request), self._scope(request)
        remote.parked_at = time.monotonic()
        left_s = remote.time_left_s(remote.parked_at, self._deadline_s)
        self._session.note_prompt(self._request_id(request), attempts=remote.attempts, cached_tokens=cached_tokens,
                                  peer=remote.hold.incarnation if remote.hold is not None else "", outcome="",
                                  detail="")
        self._attempts[attempt] = RemoteAttempt(remote, len(block_ids) - cached_blocks, len(prompt) - cached_tokens)
        if request in self._batch:  # it was to be prefilled here, but now there is a peer for it
            self._batch.remove(request)
        if remote.hold is not None:
            hold, remote.hold = remote.hold, None
            self._session.claim_hold(attempt, hold, token_digest(prompt, scope), list(block_ids), cached_blocks, left_s)
            return
        if self.send_grants is not None:
            self.send_grants([OpenGrant(str(attempt), list(block_ids[cached_blocks:]))])
        if remote.metaserver is not None:
            self._session.post_job(attempt, remote.metaserver, external_id(self._request_id(request)))
        more = {"media": self._media(request)} if scope.media else {}
        if (next_token := self._next_token(request)) is not None:
            more["next_token"] = next_token
        self._session.submit(attempt, prompt, list(block_ids), cached_blocks, remote.failed_peers, left_s,
                             self._priority(request), scope, **more)

    def abort(self, attempt: Attempt) -> None:
        """The client is gone. The blocks come back with the attempt's Released."""
        self._session.abort(attempt)
        self._close_grant(attempt)
        remote = self._attempts.get(attempt)
        if remote is None:
            return
        if remote.stage is AttemptStage.PARKED:  # else it has ended, and was counted
            self._metrics.attempt("cancelled")
            self._session.note_prompt(request_of(attempt), outcome="cancelled")
        remote.stage = AttemptStage.LEFT

    def notice(self, payload: bytes) -> None:
        """A notice has arrived with a peer's write. One that can't be decoded is counted and dropped."""
        notice = ArrivalNotice.decode(payload)
        if notice is None:
            self._metrics.frames_dropped("notice_malformed")
        else:
            self._session.arrived(notice.attempt, notice.rank)

    def handle(self, event: Event, progress: Progress) -> None:
        """Turn an event of the protocol into progress for the scheduler."""
        if isinstance(event, Prefilled | Fallback):
            self._close_grant(event.attempt)
        if isinstance(event, Prefilled):
            remote = self._attempts.pop(event.attempt, None)
            if remote is None:
                return  # it has ended before
            progress.finished_prefills.append(event.attempt)
            self._metrics.attempt("done")
            self._session.note_prompt(request_of(event.attempt), outcome="done",
                                      **({"peer": event.peer} if event.peer else {}))
            if self.measures is not None:
                self._unmeasured[event.attempt] = remote.tokens, time.monotonic() - remote.request.parked_at
                if len(self._unmeasured) > KEPT_UNMEASURED:
                    del self._unmeasured[next(iter(self._unmeasured))]
            self._count_timings(event.attempt, event.timings)
            request = self._parked().get(event.attempt)
            if request is not None:
                remote.request.attempts = self._policy.attempts  # if it is preempted later, it stays here (B8)
                remote.request.arrived = True
                for sibling in self._siblings(request):
                    if sibling is not request:
                        self._request(sibling).stays = True
                self._resuming.append(request)
        elif isinstance(event, Timed):
            self._count_timings(event.attempt, event.timings)
        elif isinstance(event, Fallback):
            self._fall_back(event)
        elif isinstance(event, Released):
            remote = self._attempts.get(event.attempt)
            if remote is not None and remote.stage is AttemptStage.FAILED:
                remote.released = True
            else:
                self._free(event.attempt, progress)

    def grant_closed(self, end: Finished) -> None:
        """A transfer has ended. If it is the answer of our ranks to a `CloseGrant`, they receive nothing more for the
        attempt."""
        attempt = self._closing.pop(end.key, None)
        if attempt is not None and end.ok:
            self._session.grant_closed(attempt)

    def scheduled(self) -> None:
        """A step was scheduled. Note which requests it resumed whose KV has come."""
        for request in self._resuming:
            remote = self._requests[request]
            if remote.resumed_at is None and self._is_running(request):
                remote.resumed_at = time.time()
                parked_s = time.monotonic() - remote.parked_at
                self._metrics.parked(parked_s)
                self._session.note_prompt(self._request_id(request), parked_s=parked_s)

    def give_back(self, progress: Progress, stalled: bool) -> None:
        """Return the requests whose attempt failed to the scheduler. One that another peer will prefill returns at
        once, and so does one of which `fallbacks` says when it may begin. Those that this engine must prefill return in
        batches, so that running requests are not held up for long. `stalled`: the last batch can't run with the free
        blocks, so the next one need not wait for it."""
        now = time.monotonic()
        if not any(self._awaits_prefill(request) for request in self._batch):
            self._batch.clear()
            self._pace.ended(now)
        for attempt, remote in list(self._attempts.items()):
            if remote.stage is AttemptStage.LEFT and remote.released:
                self._free(attempt, progress)  # it was aborted after its Released had come
        failed = [item for item in self._attempts.items() if item[1].stage is AttemptStage.FAILED]
        if not failed:
            return
        views: dict[tuple[str, ...], QueueView] = {}
        blocks, parked, local = self._count_blocks(), self._parked(), []
        for attempt, remote in failed:
            request = parked[attempt]
            avoid = self._useless(request, remote.request)
            if avoid not in views:
                views[avoid] = self._session.view(avoid)
            free_again = remote.blocks if remote.released else 0
            decision = self._decide(request, 0, remote.request, avoid, views[avoid], blocks - free_again,
                                    len(parked) - 1)
            if decision.remote or self.falls_back(request, decision):
                self._give_back(attempt, progress)
            else:
                local.append((attempt, request))
        if not local or not (stalled or self._pace.may_begin(now, self._has_running())):
            return
        self._pace.began(now)
        tokens = 0
        for attempt, request in local:
            tokens += self._num_tokens(request)
            if tokens > self._capacity.batch_tokens and request is not local[0][1]:
                break
            self._batch.append(request)
            self._give_back(attempt, progress)

    @property
    def quarantined_blocks(self) -> int:
        """How many blocks of attempts that have ended a peer may still write."""
        quarantined = self._quarantined() if self._attempts else ()
        return sum(remote.blocks for attempt, remote in self._attempts.items() if attempt in quarantined)

    @property
    def set_aside_blocks(self) -> int:
        """How many blocks are set aside for attempts and for failed reads, quarantined ones included."""
        return self.unproven_blocks + sum(remote.blocks for remote in self._attempts.values())

    def update_metrics(self) -> None:
        """Set the gauges, and count the first tokens since the last call."""
        quarantined = self.quarantined_blocks + self.unproven_blocks
        self._metrics.quarantined_blocks.set(quarantined)
        self._metrics.parked_blocks.set(self.set_aside_blocks - quarantined)
        if self.fallbacks is not None:
            self._metrics.waiting_fallbacks.set(len(self.fallbacks.waiting))
        waiting = []
        for request in self._resuming:
            resumed_at, first_token_at = self._requests[request].resumed_at, self._first_token_at(request)
            if resumed_at is not None and first_token_at is not None:
                first_step_s = max(0.0, first_token_at - resumed_at)
                self._metrics.handover("first_step", first_step_s)
                self._session.note_prompt(self._request_id(request), first_step_s=first_step_s)
            elif resumed_at is None or not self._is_finished(request):
                waiting.append(request)
        self._resuming = waiting

    # Inside.

    def _request(self, request: R) -> RemoteRequest:
        return self._requests.setdefault(request, RemoteRequest())

    def _note_decision(self, request: R, decision: Decision, where: str) -> int:
        """Count the decision, remember and log it. Returns the prompt's tokens; those to compute where `expected` has
        them."""
        self._metrics.decision(where, decision.reason.value)
        asked = asked_place(self._extra_args(request))
        if asked is not AskedPlace.AUTO:
            self._metrics.asked(asked.value, where)
        self._session.prompt_decided(self._request_id(request), self._request(request).attempts > 0, asked=asked.value,
                                     tokens=self._num_tokens(request), decision=where, reason=decision.reason.value)
        expected = decision.expected
        tokens = self._num_tokens(request) if expected is None else expected.tokens
        if self._log_decisions:
            logger.info("request %s, %d tokens%s: %s, reason %s%s", self._request_id(request), tokens,
                        "" if expected is None else " to compute", where, decision.reason.value,
                        "" if expected is None else f": {expected.explained()}")
        return tokens

    def _asked(self, request: R) -> AskedPlace:
        """Where it is to be prefilled, as far as it says so."""
        extra_args = self._extra_args(request)
        place = asked_place(extra_args)  # what is to be held is computed by the engine that was chosen for it
        return AskedPlace.LOCAL if place is AskedPlace.AUTO and asks_for_hold(extra_args) else place

    def _hold(self, request: R) -> Attempt | None:
        """The hold of a prefill engine that it names. With several groups of blocks nobody keeps any."""
        return None if self._capacity.rows.windows else named_hold(self._extra_args(request))

    def _metaserver(self, request: R) -> str | None:
        """The metaserver that it names, if this engine may post there."""
        url = named_metaserver(self._extra_args(request))
        if url is None or url in self._metaservers:
            return url
        if not self._warned_of_url:  # once: a client must not write a line for each request
            self._warned_of_url = True
            logger.warning("kv_transfer_params.metaserver=%r is not used: if it is your proxy's, add it to the key "
                           "metaservers of this engine; its prompts go through the broker", url[:200])
        return None

    def _count_blocks(self) -> int:
        """Blocks that are set aside or held."""
        return self.set_aside_blocks + self.held_blocks

    def _has_turn(self, request: R) -> bool:
        """Whether it fell back and is of the batch that is prefilled here now."""
        return request in self._batch

    def _stay(self, request: R) -> None:
        """Keep this request and its siblings here: `decide` answers None for each of them."""
        for one in (request, *self._siblings(request)):
            self._request(one).stays = True

    def _fall_back(self, event: Fallback) -> None:
        """An attempt has ended without the KV: another one may follow, or none."""
        attempt = event.attempt
        # A name that a client has made up must not write a line for each request; `totals` has the reasons.
        level = logging.DEBUG if event.reason is FallbackReason.HOLD else logging.WARNING
        logger.log(level, "remote prefill %d of request %s has ended (%s): %s", attempt.number, request_of(attempt),
                   event.reason.value, event.detail)
        self._metrics.attempt(event.outcome.value)
        self._session.note_prompt(request_of(attempt), outcome=event.outcome.value, peer=event.peer,
                                  detail=f"{event.reason.value}: {event.detail}")
        if attempt not in self._parked():
            return  # aborted in the meantime
        remote = self._attempts[attempt] = self._attempts.pop(attempt)  # failed ones are in the order of their failures
        remote.stage = AttemptStage.FAILED
        if not event.reason.another_may_help:
            remote.request.attempts = self._policy.attempts
        elif event.peer:
            remote.request.failed_peers += (event.peer, )

    def _close_grant(self, attempt: Attempt) -> None:
        if self.send_grants is not None and str(attempt) not in self._closing:
            self._closing[str(attempt)] = attempt
            self.send_grants([CloseGrant(str(attempt))])

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

    def _decide(self, request: R, cached_tokens: int, remote: RemoteRequest, avoid: tuple[str, ...], view: QueueView,
                parked_blocks: int, parked_requests: int) -> Decision:
        """Apply the policy, with the `view` of the prefill engines but those to `avoid`. `parked_blocks` and
        `parked_requests` do not count the request itself."""
        rows, tokens, attempts = self._capacity.rows, self._num_tokens(request), remote.attempts
        cached_blocks, theirs = cached_tokens // rows.block_size, tokens - rows.own_tokens
        if self._has_outputs(request):  # preempted: a job is a prompt, and its blocks would hold the outputs too
            attempts = self._policy.attempts
        found = PolicyInput(prompt_tokens=tokens,
                            cached_tokens=cached_tokens,
                            blocks=rows.count(tokens, cached_blocks) - cached_blocks,
                            can_go_remote=self._can_go_remote(request),
                            attempts_made=attempts,
                            time_left_s=remote.time_left_s(time.monotonic(), self._deadline_s),
                            broker_up=view.broker_up,
                            prefill_peers=view.prefill_peers,
                            queue_length=view.queue_length,
                            parked_blocks=parked_blocks,
                            total_blocks=self._capacity.total_blocks,
                            parked_requests=parked_requests,
                            total_requests=self._capacity.total_requests,
                            expected=self._expected(tokens - cached_tokens, avoid),
                            asked=self._asked(request),
                            whole_blocks=theirs // rows.block_size - cached_blocks,
                            has_media_room=self._has_media_room(request))
        hold = None if remote.hold_settled else self._hold(request)
        if hold is not None and may_read_hold(
                msgspec.structs.replace(found, prefill_peers=int(self._session.knows_holder(hold.incarnation))),
                self._policy):
            return Decision(True, Reason.HELD)
        return decide(found, self._policy, self._own_policy)

    def _useless(self, request: R, remote: RemoteRequest) -> tuple[str, ...]:
        """The prefill engines that have failed at this request, or can't do jobs like it."""
        scope = self._scope(request)
        return remote.failed_peers if scope == NO_SCOPE else (*remote.failed_peers, *self._session.unable(scope))

    def _expected(self, tokens: int, avoid: tuple[str, ...]) -> Expected | None:
        """When a prompt with so many tokens to compute would have its first token, here and there. None with a fixed
        threshold, and where nothing is measured."""
        if self.measures is None:
            return None
        left = [(request, min(stays, self._uncomputed(request))) for request, stays in self._local
                if not self._is_finished(request)]
        self._local = [one for one in left if one[1]]
        before = self.job_tokens + sum(stays for _, stays in self._local)
        now, loads = time.monotonic(), self._session.prefill_loads(avoid, tokens)
        here = self.measures.here(now, before, self._num_decoding(), [rate for _, rate in loads.busy])
        there = self.measures.there(now, tokens, loads.queued_tokens, loads.busy, loads.ours, loads.paths_s)
        return expect(max(1, tokens), here, there)

    def _count_timings(self, attempt: Attempt, timings: Timings) -> None:
        """The stages of an attempt that is done have come."""
        if timings.measured and attempt in self._unmeasured:
            tokens, total_s = self._unmeasured.pop(attempt)
            last_tokens = tokens * timings.last_bytes / timings.bytes if timings.bytes and timings.last_bytes else None
            self.measures.handed_over(time.monotonic(), tokens, total_s, timings.queue_s + timings.prefill_s,
                                      timings.transfer_s, last_tokens)
        if timings.measured:
            self._session.note_prompt(request_of(attempt), timings=timings)
            self._metrics.transfer_bytes(timings.bytes)
            for stage, seconds in timings.stages():
                self._metrics.handover(stage, seconds)

    # What a binding knows of its engine.

    @abstractmethod
    def _parked(self) -> Mapping[Attempt, R]:
        """The parked requests."""

    @abstractmethod
    def _quarantined(self) -> Collection[Attempt]:
        """Attempts that have ended, and whose blocks a peer may still write."""

    @abstractmethod
    def _has_running(self) -> bool:
        """Whether a request runs, which would have to wait for a prefill."""

    @abstractmethod
    def _can_go_remote(self, request: R) -> bool:
        """Whether all that the request needs can come from another engine."""

    def _has_media_room(self, request: R) -> bool:
        """Whether what a job carries beside tokens has room beside that of other prompts."""
        return True

    @abstractmethod
    def _extra_args(self, request: R) -> Any:
        """What its client asks for beyond sampling; anything, None where there can be nothing."""

    @abstractmethod
    def _request_id(self, request: R) -> str:
        """Its id in this engine."""

    @abstractmethod
    def _prompt(self, request: R) -> list[int]:
        """The token ids of its prompt that a peer is to compute, those of its prefix hit included."""

    def _scope(self, request: R) -> PromptScope:
        """What decides beside these whose KV the prompt may use."""
        return NO_SCOPE

    def _media(self, request: R) -> tuple[bytes, ...]:
        """The encoded data of each of the scope's items."""
        return ()

    def _next_token(self, request: R) -> int | None:
        """The token after those that a peer is to compute, where the KV of the last of them depends on it."""
        return None

    @abstractmethod
    def _priority(self, request: R) -> int:
        """Its priority; lower comes first."""

    @abstractmethod
    def _num_tokens(self, request: R) -> int:
        """Tokens of its prompt and its outputs."""

    @abstractmethod
    def _has_outputs(self, request: R) -> bool:
        """Whether it has tokens beyond its prompt."""

    @abstractmethod
    def _awaits_prefill(self, request: R) -> bool:
        """Whether it goes on, and its prompt is not computed."""

    @abstractmethod
    def _uncomputed(self, request: R) -> int:
        """How many tokens of its prompt are to be computed yet, a prefix hit that is not applied yet included."""

    @abstractmethod
    def _num_decoding(self) -> int:
        """How many requests run whose prompt is computed."""

    @abstractmethod
    def _is_running(self, request: R) -> bool:
        """Whether it is scheduled."""

    @abstractmethod
    def _is_finished(self, request: R) -> bool:
        """Whether it has ended."""

    @abstractmethod
    def _first_token_at(self, request: R) -> float | None:
        """When it got its first token, on the wall clock."""

    def _siblings(self, request: R) -> Collection[R]:
        """All parts of a request with n > 1 that have not ended, this one included; none of any other request."""
        return ()
