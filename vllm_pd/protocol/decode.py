# SPDX-License-Identifier: Apache-2.0
"""The decode engine's half of the protocol: every attempt that it has open.

Life of an attempt: `submit` puts a job on the queue (QUEUED); the first claim gets its blocks (GRANTED); the last
rank's notice ends it (DONE). Or it ends as FAILED (P's message, P's death, no queue, no P), CANCELLED (`abort`) or
EXPIRED (lease or deadline). An end is final and comes once.

The *fence* is separate from the state: from the grant on, P may write the blocks. They are free again only by a message
of P (failed, stopped, every rank's notice), by P's death as a fact, or, of a P on another machine, once the generation
ends in which they were granted (`generations`); never by time. An attempt that has ended while its fence is up is kept,
and P is asked to stop again and again, until one of these comes. Then the record is deleted; a message about an attempt
without a record changes nothing but a counter.
"""
import collections
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from vllm_pd.errors import PeerMismatch
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    Action,
    AttemptEnd,
    Fallback,
    FallbackReason,
    Prefilled,
    Released,
    Timed,
    ToBroker,
    ToPrefill,
)
from vllm_pd.protocol.attempts import AttemptRecord, AttemptState, DecodeLimits
from vllm_pd.protocol.generations import Generations, is_elsewhere
from vllm_pd.protocol.hold_reads import HoldReads
from vllm_pd.protocol.moments import LONG_AGO, NEVER
from vllm_pd.protocol.scope import NO_SCOPE, PromptScope

MEDIA_SENDS = 3  # of one attempt
KEPT_DONE = 256  # attempts whose Sent may still come after their end
_SEEMS_DEAD = "the prefill engine, on another machine, can't be reached any more"
_TOO_SLOW = "it took longer than a lease after this engine has made new transfer agents"


class DecodeProtocol:
    """All attempts of one decode engine. No method blocks, reads a clock, or raises because of what a peer does.
    `generations` are those of the engine, which both of its halves have; one that never renews where none are given."""

    def __init__(self, member: m.Member, transfer_metadata: bytes, limits: DecodeLimits,
                 generations: Generations | None = None):
        self.member = member
        self.limits = limits
        self.mismatch: str | None = None
        self.generations = generations or Generations(member.incarnation, transfer_metadata, limits.lease_s)
        self.counters: m.Counters = collections.Counter()
        self.dropped: m.Counters = collections.Counter()
        self.peers: dict[str, m.Member] = {}
        self._listed: Collection[str] = ()  # see `peers_are`
        self.reads = HoldReads(member, limits.ttl_s, limits.claim_retry_s / 4, limits.lease_s, self.counters,
                               self.dropped, self.generations)
        self._records: dict[m.Attempt, AttemptRecord] = {}
        self._done: dict[m.Attempt, AttemptRecord] = {}
        self._done_order: collections.deque[m.Attempt] = collections.deque()
        self._last_number = -1
        self._broker_lost_at: float | None = None
        self._handlers: dict[type, Callable[[float, str, m.Message], list[Action]]] = {
            m.Hello: self._on_hello,
            m.Claim: self._on_claim,
            m.Renew: self._on_renew,
            m.Writing: self._on_writing,
            m.Sent: self._on_sent,
            m.Failed: self._on_failed,
            m.GaveUp: self._on_gave_up,
            m.Stopped: self._on_stopped,
            m.HoldGrant: self._on_hold,
            m.HoldDenied: self._on_hold,
            m.HoldQuery: self._on_hold,
        }

    # Calls of the engine.

    def submit(self, now: float, attempt: m.Attempt, token_ids: list[int], block_ids: list[int],
               cached_blocks: int, avoid: tuple[str, ...] = (), deadline_s: float | None = None,
               priority: int = 0, scope: PromptScope = NO_SCOPE, media: tuple[bytes, ...] = (),
               next_token: int | None = None) -> list[Action]:
        """Queue a job for any P but those to `avoid`. The caller keeps the blocks set aside until `Prefilled` or
        `Released`. `deadline_s` is less than the limits' where earlier attempts took some of it. The rest: see `Job`
        and, of `media` and `next_token`, `Grant`.
        Attempt numbers must grow from call to call (ValueError), or a late notice could be taken for another
        attempt's."""
        if attempt.number <= self._last_number or attempt.incarnation != self.member.incarnation:
            raise ValueError(f"attempt {attempt} is not newer than number {self._last_number} of this engine")
        self._last_number = attempt.number
        priority = max(-m.MAX_PRIORITY, min(m.MAX_PRIORITY, int(priority)))  # a client's may be any number
        record = AttemptRecord(attempt, list(token_ids), list(block_ids), cached_blocks, avoid, priority, scope,
                               media, next_token)
        self._records[attempt] = record
        record.submitted = now
        record.deadline = now + (self.limits.deadline_s if deadline_s is None else deadline_s)
        if len(attempt.request_id) > m.MAX_ID_CHARS:
            return self._end(now, record, AttemptEnd.FAILED, FallbackReason.FEATURE, "the request id is too long")
        if self._broker_lost_at is not None:
            return self._end(now, record, AttemptEnd.FAILED, FallbackReason.BROKER, "no answer from the broker")
        return self._put(now, record)

    def abort(self, now: float, attempt: m.Attempt) -> list[Action]:
        """The client is gone. This call ends the attempt; `Released` follows when the blocks may be reused."""
        record = self._records.get(attempt)
        if record is None or record.state.ended:
            return []
        return self._end(now, record, AttemptEnd.CANCELLED, None)

    def arrived(self, now: float, attempt: m.Attempt, rank: int) -> list[Action]:
        """The transfer's notice: all of this rank's data is in our blocks."""
        record = self._records.get(attempt)
        if record is None or not record.fenced or not 0 <= rank < record.ranks:
            return self._drop("notice_unknown")
        if rank in record.arrived:
            return self._drop("notice_duplicate")
        record.arrived.add(rank)
        if len(record.arrived) < record.ranks:
            return []
        if record.state.ended:
            return self._p_stopped(now, record, FallbackReason.FAILED, "")
        record.state = AttemptState.DONE
        self.counters["done"] += 1
        record.moved_tokens = self._new_tokens(record)
        del self._records[attempt]
        if not record.timings.measured:
            self._remember(record)
        return [Prefilled(attempt, record.timings, record.peer, record.moved_tokens)]

    def grant_closed(self, now: float, attempt: m.Attempt) -> list[Action]:
        """With `own_fence`, after the attempt has ended: our ranks receive nothing for it any more, whatever P does."""
        record = self._records.get(attempt)
        if record is None or not record.state.ended or not self.limits.own_fence:
            return []
        return self._release(record)

    # Messages of others.

    def receive(self, now: float, sender: str, message: m.Message) -> list[Action]:
        """A message from a P."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return self._drop("unexpected")
        return handler(now, sender, message)

    def put_reply(self, now: float, reply: m.PutReply) -> list[Action]:
        """The answer of the broker to a `Put`."""
        record = self._records.get(reply.attempt)
        if record is None or record.state is not AttemptState.QUEUED:
            return [] if reply.refusal is None else self._drop("put_reply_unknown")
        if reply.refusal is m.PutRefusal.FULL:
            return self._end(now, record, AttemptEnd.FAILED, FallbackReason.QUEUE, "the prefill queue is full")
        if reply.refusal is not None:  # a broker that has just started has no members yet
            record.next_put = min(record.next_put, now + self.limits.claim_retry_s / 10)
        record.times_queued += reply.is_new
        if record.times_queued > self.limits.max_unclaimed:
            return self._end(now, record, AttemptEnd.FAILED, FallbackReason.PEER,
                             f"it was offered {self.limits.max_unclaimed} times, and no claim has come")
        return []

    def put_failed(self, now: float, attempt: m.Attempt) -> list[Action]:
        """The broker could not be reached when the first `Put` of this attempt was to be sent."""
        record = self._records.get(attempt)
        if (record is None or record.state is not AttemptState.QUEUED
                or now - record.submitted >= self.limits.claim_retry_s):
            return []
        return self._end(now, record, AttemptEnd.FAILED, FallbackReason.BROKER, "the broker can't be reached")

    def unclaimable(self, now: float, attempt: m.Attempt, detail: str) -> list[Action]:
        """No P will claim this attempt, whose job went another way than the queue. No effect once one has."""
        record = self._records.get(attempt)
        if record is None or record.state is not AttemptState.QUEUED:
            return []
        return self._end(now, record, AttemptEnd.FAILED, FallbackReason.PEER, detail)

    def broker_is(self, now: float, up: bool) -> list[Action]:
        """Whether the broker answers. Jobs wait `ttl_s` for its return, and are put again when it is back."""
        if not up:
            if self._broker_lost_at is None:
                self._broker_lost_at = now
            return []
        if self._broker_lost_at is None:
            return []
        self._broker_lost_at = None
        return self.requeue(now)

    def requeue(self, now: float) -> list[Action]:
        """Put every unclaimed job again: the broker that had them is gone."""
        actions: list[Action] = []
        for record in list(self._records.values()):
            if record.state is AttemptState.QUEUED:
                record.times_queued = 0
                actions += self._put(now, record)
        return actions

    def peers_are(self, now: float, live: Collection[str], listed: Collection[str] = ()) -> None:
        """The compatible Ps that are known, and, where some are parted, all engines of the registry. A job waits
        `ttl_s` for a P that it need not avoid."""
        self._listed = listed
        for record in self._records.values():
            if record.state is not AttemptState.QUEUED:
                continue
            if any(name not in record.avoid for name in live):
                record.peers_lost_at = None
            elif record.peers_lost_at is None:
                record.peers_lost_at = now

    def peer_dead(self, now: float, incarnation: str) -> list[Action]:
        """The process of a P is gone, as a fact: it will never write again."""
        self.peers.pop(incarnation, None)
        self.parted.discard(incarnation)
        actions = self.reads.peer_dead(now, incarnation)
        for record in self._fenced_by(incarnation):
            actions += self._p_stopped(now, record, FallbackReason.PEER, "the prefill engine died")
        return actions

    def peer_seems_dead(self, now: float, incarnation: str) -> list[Action]:
        """A P on another machine can't be reached, and may live all the same. Nothing is waited for that it has; its
        fences stay up until the generation has ended. If it lives, it is a peer as before."""
        actions = self.reads.peer_seems_dead(now, incarnation)
        for record in self._fenced_by(incarnation):
            record.seems_lost = True
            if self.limits.own_fence:
                actions += self._p_stopped(now, record, FallbackReason.PEER, _SEEMS_DEAD)
            elif not record.state.ended:
                actions += self._end(now, record, AttemptEnd.FAILED, FallbackReason.PEER, _SEEMS_DEAD)
        return actions

    # The generations: see `generations.Half`.

    def doubts_at(self) -> float:
        """See Half."""
        if self.parted:
            return LONG_AGO
        return min([self.reads.doubts_at(), *(record.doubted_at for record in self._records.values())])

    def is_busy(self, now: float) -> bool:
        """See Half. Of a P on this machine nothing goes on in a write that it has given up."""
        return self.reads.is_busy(now) or any(
            record.fenced and not record.unproven and now < record.doubted_at
            for record in self._records.values() if self.generations.is_closing(record.generation))

    def renewed(self, now: float) -> list[Action]:
        """See Half."""
        return self._tell_peers()

    def close(self, now: float) -> list[Action]:
        """See Half."""
        actions: list[Action] = []
        for record in [r for r in self._records.values() if r.fenced and self.generations.is_closing(r.generation)]:
            if not record.state.ended:
                actions += self._end(now, record, AttemptEnd.EXPIRED, FallbackReason.LEASE, _TOO_SLOW)
        return actions

    def retired(self, now: float) -> list[Action]:
        """See Half. What a P on this machine may do stays as it is."""
        actions = self.reads.retired() + self._tell_peers()
        for record in [r for r in self._records.values() if r.fenced and r.generation < self.generations.oldest]:
            if record.is_elsewhere:
                self.counters["fenced_by_retiring"] += 1
                actions += self._p_stopped(now, record, FallbackReason.LEASE, _TOO_SLOW)
        return actions

    def _tell_peers(self) -> list[Action]:
        """All Ps are to know the generations."""
        return [ToPrefill(name, self.hello_reply) for name in self.peers]

    def shut(self, now: float, detail: str) -> list[Action]:
        """The control thread ends: every open attempt falls back. Fences stay up, for P can't be heard any more."""
        actions = self.reads.shut(now, detail)
        for record in list(self._records.values()):
            if not record.state.ended:
                actions += self._end(now, record, AttemptEnd.FAILED, FallbackReason.CONTROL, detail)
        self._broker_lost_at = now
        return actions

    # Time.

    def handle_timeout(self, now: float) -> list[Action]:
        """Do what is due."""
        actions = self.reads.handle_timeout(now)
        for record in list(self._records.values()):
            if self._due(record) <= now:
                actions += self._on_due(now, record)
        return actions

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is next due; None where nothing is."""
        held = self.reads.next_timeout()
        due = min([NEVER if held is None else held, *(self._due(record) for record in self._records.values())])
        return None if due == NEVER else due

    # State, for the engine and the tests.

    @property
    def parted(self) -> set[str]:
        """See Generations."""
        return self.generations.parted

    @property
    def hello_reply(self) -> m.HelloReply:
        """The answer to a P that fits."""
        ours = self.generations
        return m.HelloReply(self.member, ours.metadata, ours.current, ours.oldest)

    def uncomputed(self) -> dict[str, list[int]]:
        """The prompt tokens, without what is cached here, of each job that no P has computed as far as is known: by the
        P that has it, or by "" of those that nobody has claimed."""
        found: dict[str, list[int]] = {}
        for record in self._records.values():
            if record.is_uncomputed:
                taken = record.peer if record.state is AttemptState.GRANTED else ""
                found.setdefault(taken, []).append(self._new_tokens(record))
        return found

    def taken(self, now: float) -> dict[str, list[tuple[int, float]]]:
        """Those of `uncomputed` that a P has, by P: their tokens, and for how many seconds it has each."""
        found: dict[str, list[tuple[int, float]]] = {}
        for record in self._records.values():
            if record.state is AttemptState.GRANTED and record.is_uncomputed:
                found.setdefault(record.peer, []).append((self._new_tokens(record), max(0.0, now - record.granted_at)))
        return found

    def states(self) -> dict[m.Attempt, AttemptState]:
        """All attempts that still have a record."""
        return {attempt: record.state for attempt, record in self._records.items()}

    def fenced(self) -> dict[m.Attempt, str]:
        """Attempts whose blocks a P may write, and which P."""
        return {attempt: record.peer for attempt, record in self._records.items() if record.fenced}

    def unproven(self) -> set[m.Attempt]:
        """Attempts that end with P's death or with this engine; of a P on another machine also with the generation."""
        return {attempt for attempt, record in self._records.items() if record.unproven}

    def busy_peers(self) -> set[str]:
        """Ps that may write, or are read from."""
        return {record.peer for record in self._records.values() if record.fenced} | self.reads.peers()

    def writing_since(self) -> float | None:
        """When a P last reported that it writes, or has written, into our blocks; -inf where one may write and has
        reported nothing; None where none may write."""
        return max((LONG_AGO if record.writing_at is None else record.writing_at
                    for record in self._records.values() if record.fenced), default=None)

    def awaited_timings(self) -> int:
        """Attempts that are DONE, and whose `Sent` has not come."""
        return len(self._done)

    def media_bytes(self) -> int:
        """Of the media of all attempts with a record, in bytes. Those of one that has ended count until its P has
        answered: till then they may be in a queue to it."""
        return sum(record.media_bytes for record in self._records.values())

    def queued(self) -> int:
        """Jobs nobody has claimed yet."""
        return sum(record.state is AttemptState.QUEUED for record in self._records.values())

    def debug_state(self) -> dict[m.Attempt, dict[str, Any]]:
        """What is known of each attempt with a record, for tests alone. Times are those of the caller's clock."""
        return {attempt: record.debug_state() for attempt, record in self._records.items()}

    def bring_forward(self, until: float, leases: bool) -> int:
        """For tests alone: the leases, or else the deadlines, of the open attempts end at `until` at the latest.
        Returns how many attempts are open."""
        records = [record for record in self._records.values() if not record.state.ended]
        for record in records:
            record.bring_forward(until, leases)
        return len(records)

    # Messages, one by one.

    def _on_hello(self, now: float, sender: str, message: m.Hello) -> list[Action]:
        """A prefill engine introduces itself: it fits and is known from now on, or is refused."""
        theirs = message.member
        if theirs.incarnation != sender or sender == self.member.incarnation:
            return self._drop("hello_foreign")
        if not (self.member.role.decodes and theirs.role.prefills):
            return self._drop("hello_role")
        difference = self.member.fingerprint.first_difference(theirs.fingerprint)
        if difference is not None:
            self.dropped["hello_refused"] += 1
            self.mismatch = str(PeerMismatch(*difference))
            return [ToPrefill(sender, m.Refused(*map(str, difference)))]
        actions = [] if sender in self.peers else self._forget_idle_peers()
        self.peers[sender] = theirs
        actions += self.reads.met(sender, message.transfer_metadata, message.generation)
        return [*actions, ToPrefill(sender, self.hello_reply)]

    def _forget_idle_peers(self) -> list[Action]:
        """Keep the table bounded. A P that was forgotten is denied its next claim (UNPEERED) and sends Hello again."""
        busy = self.busy_peers() | self.parted if len(self.peers) >= self.limits.max_peers else set()
        actions: list[Action] = []
        while len(self.peers) >= self.limits.max_peers + len(busy):
            forgotten = next(name for name in self.peers if name not in busy)
            del self.peers[forgotten]
            actions += self.reads.forget(forgotten)
        return actions

    def _on_hold(self, now: float, sender: str, message: m.Message) -> list[Action]:
        return self.reads.receive(now, sender, message)

    def _on_claim(self, now: float, sender: str, message: m.Claim) -> list[Action]:
        """A P asks for the blocks of an attempt. The first claim that fits gets them, and raises the fence; its
        repetition gets the same grant again. Others are denied, or dropped where they can't be right."""
        record = self._records.get(message.attempt)
        if record is None:
            return self._deny(sender, message, m.DenyReason.UNKNOWN)
        if sender not in self.peers:
            return self._deny(sender, message, m.DenyReason.UNPEERED)
        if record.state.ended:
            return self._deny(sender, message, m.DenyReason.ENDED)
        if sender in record.avoid or (sender in self.parted and record.state is AttemptState.QUEUED):
            return self._deny(sender, message, m.DenyReason.AVOIDED)
        fingerprint = self.peers[sender].fingerprint
        if message.ranks != fingerprint.tp * fingerprint.pp:
            return self._drop("claim_ranks")  # with fewer, D would begin before all has arrived
        if record.state is AttemptState.GRANTED:
            if (record.peer, record.claim) != (sender, message.claim):
                return self._deny(sender, message, m.DenyReason.TAKEN)
            self.dropped["claim_duplicate"] += 1
            if record.media and (record.media_sends >= MEDIA_SENDS
                                 or now < record.media_sent_at + self.limits.claim_retry_s):
                return []  # they are large, and most probably under way, or in a queue to P
            return self._grant(now, record)
        if message.scope != record.scope.digest:  # of an older release, or the job has lost it at an older broker
            record.avoid += (sender, )
            record.next_put = now
            return self._deny(sender, message, m.DenyReason.AVOIDED)
        if message.generation != self.generations.current:  # it is to learn the present one
            return self._deny(sender, message, m.DenyReason.UNPEERED)
        record.state, record.fenced = AttemptState.GRANTED, True
        record.peer, record.claim, record.ranks = sender, message.claim, message.ranks
        record.generation, record.is_elsewhere = message.generation, is_elsewhere(self.member, self.peers[sender])
        record.granted_at = now
        record.lease_until = now + self.limits.lease_s
        record.timings = msgspec.structs.replace(record.timings, queue_s=max(0.0, now - record.submitted))
        self.counters["granted"] += 1
        return self._grant(now, record)

    def _on_renew(self, now: float, sender: str, message: m.Renew) -> list[Action]:
        record = self._held_by(sender, message)
        if record is None or record.state.ended:
            self.dropped["renew_unknown" if record is None else "renew_ended"] += 1
            return [ToPrefill(sender, m.Cancel(message.attempt, message.claim))]
        record.lease_until = now + self.limits.lease_s
        return [ToPrefill(sender, m.Renewed(message.attempt, message.claim, message.stamp, self.limits.lease_s))]

    def _on_writing(self, now: float, sender: str, message: m.Writing) -> list[Action]:
        record = self._held_by(sender, message)
        if record is None or record.writing_at is not None:
            return self._drop("writing_unknown" if record is None else "writing_duplicate")
        record.writing_at = now
        return []

    def _on_sent(self, now: float, sender: str, message: m.Sent) -> list[Action]:
        """P has written all, and these are its timings. They travel apart from the transfer's notices, so the attempt
        may be DONE already; it is kept for them in `_done`."""
        late = self._done.get(message.attempt)
        if late is not None and (late.peer, late.claim) == (sender, message.claim):
            del self._done[message.attempt]
            return [Timed(message.attempt, late.measured(message.timings), sender, late.moved_tokens)]
        record = self._held_by(sender, message)
        if record is None or record.timings.measured:
            return self._drop("sent_unknown" if record is None else "sent_duplicate")
        record.timings = record.measured(message.timings)
        record.writing_at = now
        record.lease_until = now + self.limits.lease_s  # P renews no longer, and the engine may be in a long step
        return []

    def _on_failed(self, now: float, sender: str, message: m.Failed) -> list[Action]:
        record = self._held_by(sender, message)
        if record is None:
            return self._drop("failed_unknown")
        if message.parted and record.generation == self.generations.current:  # as with GaveUp
            self.parted.add(sender)
        return self._p_stopped(now, record, FallbackReason.FAILED, message.reason)

    def _on_gave_up(self, now: float, sender: str, message: m.GaveUp) -> list[Action]:
        record = self._held_by(sender, message)
        if record is None or record.unproven:
            return self._drop("gave_up_unknown")
        record.unproven = True
        record.media_bytes = 0  # P has answered
        if record.generation == self.generations.current:  # else the two have begun anew already
            self.parted.add(sender)
        if record.state.ended:
            return self._cancel(now, record)
        return self._end(now, record, AttemptEnd.FAILED, FallbackReason.FAILED, message.reason)

    def _on_stopped(self, now: float, sender: str, message: m.Stopped) -> list[Action]:
        record = self._held_by(sender, message)
        if record is None:
            return self._drop("stopped_unknown")
        return self._p_stopped(now, record, FallbackReason.FAILED, "the prefill engine stopped")

    # Moves.

    def _p_stopped(self, now: float, record: AttemptRecord, reason: FallbackReason, detail: str) -> list[Action]:
        """P will not write any more, whatever the state of the attempt is. With `own_fence` that is not enough: what it
        has sent may lie here, and not in the blocks yet. The engine closes the grant of an attempt that ends."""
        if self.limits.own_fence:
            return [] if record.state.ended else self._end(now, record, AttemptEnd.FAILED, reason, detail)
        record.fenced = False
        if record.state.ended:
            return self._release(record)
        return self._end(now, record, AttemptEnd.FAILED, reason, detail)

    def _end(self, now: float, record: AttemptRecord, outcome: AttemptEnd, reason: FallbackReason | None,
             detail: str = "") -> list[Action]:
        """The one place where an attempt ends other than DONE."""
        was_queued = record.state is AttemptState.QUEUED
        record.media = ()
        record.state = AttemptState(outcome.value)
        self.counters[outcome.value] += 1
        actions: list[Action] = []
        if reason is not None:
            actions.append(Fallback(record.attempt, reason, outcome, detail, record.peer))
        if was_queued and self._broker_lost_at is None:
            actions.append(ToBroker(m.Withdraw(record.attempt)))
        if not record.fenced:
            return actions + self._release(record)
        if record.is_elsewhere:
            record.cancelled_at = now
        return actions + self._cancel(now, record)

    def _release(self, record: AttemptRecord) -> list[Action]:
        del self._records[record.attempt]
        return [Released(record.attempt)]

    def _cancel(self, now: float, record: AttemptRecord) -> list[Action]:
        record.set_next_cancel(now, self.limits)
        return [] if record.unproven else [ToPrefill(record.peer, m.Cancel(record.attempt, record.claim))]

    def _put(self, now: float, record: AttemptRecord) -> list[Action]:
        record.next_put = now + self.limits.claim_retry_s
        parted = sorted(self.parted.difference(record.avoid), key=lambda name: (name not in self._listed, name))
        avoid = (*record.avoid, *parted)[:m.MAX_AVOIDED]  # first of all those that may be offered it
        return [ToBroker(m.Put(record.job(now, self.member.address, self._cached_tokens(record), avoid)))]

    def _cached_tokens(self, record: AttemptRecord) -> int:
        return record.cached_blocks * self.member.fingerprint.block_size

    def _new_tokens(self, record: AttemptRecord) -> int:
        return max(0, len(record.token_ids) - self._cached_tokens(record))

    def _due(self, record: AttemptRecord) -> float:
        return record.due(self._broker_lost_at, self.limits.ttl_s)

    def _on_due(self, now: float, record: AttemptRecord) -> list[Action]:
        """The record's time has come: ask P again to stop, end the attempt, or put its unclaimed job again."""
        if record.state.ended:
            return self._cancel(now, record)
        if now >= record.deadline:
            return self._end(now, record, AttemptEnd.EXPIRED, FallbackReason.DEADLINE, "the attempt took too long")
        if record.state is AttemptState.GRANTED:
            return self._end(now, record, AttemptEnd.EXPIRED, FallbackReason.LEASE, "the prefill engine fell silent")
        for lost_at, reason, detail in ((self._broker_lost_at, FallbackReason.BROKER, "the broker went away"),
                                        (record.peers_lost_at, FallbackReason.PEER, "no prefill engine is left")):
            if lost_at is not None and now >= record.waited_from(lost_at) + self.limits.ttl_s:
                return self._end(now, record, AttemptEnd.FAILED, reason, detail)
        self.counters["requeued"] += 1
        return self._put(now, record)

    # Helpers.

    def _fenced_by(self, peer: str) -> list[AttemptRecord]:
        """The records whose blocks this P may write."""
        return [record for record in self._records.values() if record.fenced and record.peer == peer]

    def _held_by(self, sender: str, message: m.Message) -> AttemptRecord | None:
        """The record that was granted to this sender for this claim, if its fence is up; else None."""
        record = self._records.get(message.attempt)
        if record is None or not record.fenced or (record.peer, record.claim) != (sender, message.claim):
            return None
        return record

    def _grant(self, now: float, record: AttemptRecord) -> list[Action]:
        return [ToPrefill(record.peer, record.grant(now, self.limits.lease_s))]

    def _deny(self, sender: str, claim: m.Claim, reason: m.DenyReason) -> list[Action]:
        self.dropped["claim_" + reason.value] += 1
        return [ToPrefill(sender, m.Deny(claim.attempt, claim.claim, reason))]

    def _remember(self, record: AttemptRecord) -> None:
        record.token_ids = record.block_ids = []
        record.media = ()
        self._done[record.attempt] = record
        self._done_order.append(record.attempt)
        if len(self._done_order) > KEPT_DONE:
            self._done.pop(self._done_order.popleft(), None)

    def _drop(self, name: str) -> list[Action]:
        """Count a message that changes nothing else."""
        self.dropped[name] += 1
        return []
