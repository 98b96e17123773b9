# SPDX-License-Identifier: Apache-2.0
"""Prefill first, on D: prompts whose KV it reads from the P that holds it.

Life of a read: D claims the hold for an attempt (CLAIMING), gets the ids of P's blocks and has its ranks read them into
its own (READING); when all of that has ended well the attempt is done, and D tells P. Its end is reported once, as that
of any attempt: `Prefilled`, or `Fallback`, or the engine's own `abort`.

An attempt that ends while its ranks read becomes STOPPING: its blocks stay set aside until the ranks have said that no
byte lands any more, for only they know; then come `Released`, and HoldDone to P. A read that failed, and may still
land, ends with P's death instead, or with our generation in which it began (`generations`), and so does one that does
not end. P gets its HoldDone at once, for nothing that still comes is used. An attempt without a record reads nothing,
and never will, for its number is used once. So a question of P about one is answered at once.

The claim is repeated while D reads, and P's answer renews the lease: a P that is silent for that long has lost the
attempt, whatever its memory still gives.
"""
from collections.abc import Iterable
from enum import Enum

import msgspec

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    Action,
    AttemptEnd,
    DropPeer,
    Fallback,
    FallbackReason,
    Prefilled,
    ReadHold,
    Released,
    StopRead,
    ToPrefill,
)
from vllm_pd.protocol.generations import DOUBT_S, Generations
from vllm_pd.protocol.moments import LONG_AGO, NEVER
from vllm_pd.protocol.names import generation_name, incarnation_of


class ReadState(Enum):
    """Where the read of a hold is."""
    CLAIMING = "claiming"
    READING = "reading"
    STOPPING = "stopping"


class _HoldRead:
    """One read. Times are those of the caller's clock."""

    def __init__(self, attempt: m.Attempt, hold: m.Attempt, digest: bytes, block_ids: list[int], cached_blocks: int,
                 deadline: float, lease_s: float):
        self.attempt = attempt
        self.hold = hold
        self.digest = digest
        self.block_ids = block_ids
        self.cached_blocks = cached_blocks
        self.deadline = deadline
        self.lease_s = lease_s  # ours, or P's if that is shorter
        self.state = ReadState.CLAIMING
        self.granted = False
        self.unproven = False  # it has failed, and its bytes may land until P, this engine or the generation has ended
        self.lease_until = self.next_claim = self.stopping_at = 0.0
        self.generation = 0  # of P, in which it is claimed
        self.own_generation = 0  # in which it began; once it is unproven, the newest one that it may have gone through

    @property
    def peer(self) -> str:
        return self.hold.incarnation

    @property
    def name(self) -> str:
        """What our transport calls P."""
        return generation_name(self.peer, self.generation)


class _KnownHolder(msgspec.Struct, frozen=True):
    """How the memory of a P that has greeted us is read at present."""
    metadata: bytes
    generation: int


class HoldReads:
    """All reads of one decode engine. It counts in the caller's counters. A claim waits `claim_wait_s` for its first
    answer, and a read `lease_s` for each further one. `generations` are the engine's."""

    def __init__(self, member: m.Member, claim_wait_s: float, claim_retry_s: float, lease_s: float,
                 counters: m.Counters, dropped: m.Counters, generations: Generations):
        self.member = member
        self.claim_wait_s = claim_wait_s
        self.claim_retry_s = claim_retry_s
        self.lease_s = lease_s
        self.counters = counters
        self.dropped = dropped
        self._generations = generations
        self._reads: dict[m.Attempt, _HoldRead] = {}
        self._holders: dict[str, _KnownHolder] = {}  # the Ps that have greeted us
        self._read_from: set[str] = set()  # transport names that our ranks know
        self._leaving: set[str] = set()  # those of them that are gone, to be dropped when no read is open
        self._missing: dict[str, float] = {}  # those of them that nobody has known since then, and that are not read

    # Calls of the engine.

    def claim(self, now: float, attempt: m.Attempt, hold: m.Attempt, digest: bytes, block_ids: list[int],
              cached_blocks: int, deadline_s: float) -> list[Action]:
        """Read what the hold's P keeps into `block_ids[cached_blocks:]`, for a prompt whose tokens have this digest and
        take all of `block_ids`. The caller keeps those set aside until `Prefilled` or `Released`."""
        read = _HoldRead(attempt, hold, digest, list(block_ids), cached_blocks, now + deadline_s, self.lease_s)
        self._reads[attempt] = read
        if not self.knows(read.peer):
            return self._end(now, read, AttemptEnd.FAILED, FallbackReason.PEER, "the prefill engine is not known")
        read.lease_until = now + self.claim_wait_s
        return self._claim(now, read)

    def abort(self, now: float, attempt: m.Attempt) -> list[Action]:
        """The client is gone. This call ends the attempt; `Released` follows when the blocks may be reused."""
        read = self._reads.get(attempt)
        if read is None or read.state is ReadState.STOPPING:
            return []
        return self._end(now, read, AttemptEnd.CANCELLED, None)

    def ended(self, attempt: m.Attempt, error: str) -> list[Action]:
        """No byte of this attempt's read lands any more, on any rank. `error`: empty if all of it has arrived."""
        read = self._reads.get(attempt)
        if read is None or read.state is ReadState.CLAIMING:
            return self._drop("hold_read_unknown")
        del self._reads[attempt]
        actions: list[Action] = []
        if read.state is ReadState.STOPPING:
            actions.append(Released(attempt))
        elif error:
            self.counters["read_failed"] += 1
            actions += [self._fallback(read, AttemptEnd.FAILED, FallbackReason.FAILED, error), Released(attempt)]
        else:
            self.counters["read_done"] += 1
            actions.append(Prefilled(attempt, m.Timings()))
        return actions + self._done(read.peer, attempt, read.hold) + self._drop_leaving(read.name)

    def unproven(self, now: float, attempt: m.Attempt, error: str) -> list[Action]:
        """As `ended`, but bytes of the read may land in our blocks until P, this engine or the generation has ended.
        P's are free."""
        read = self._reads.get(attempt)
        if read is None or read.state is ReadState.CLAIMING:
            return self._drop("hold_read_unknown")
        self.counters["read_unproven"] += not read.unproven
        read.unproven, read.own_generation = True, self._generations.newest
        stopping = read.state is ReadState.STOPPING
        actions = [] if stopping else self._end(now, read, AttemptEnd.FAILED, FallbackReason.FAILED, error)
        return actions + self._done(read.peer, attempt, read.hold)

    # Who is there.

    def met(self, peer: str, metadata: bytes, generation: int = 0) -> list[Action]:
        """This P has greeted us, and fits; its memory is read so, in this generation of its."""
        known = self._holders.get(peer)
        if known is not None and generation < known.generation:  # an old message
            return []
        self._holders[peer] = _KnownHolder(metadata, generation)
        self._leaving.discard(generation_name(peer, generation))
        return self._leave(peer, generation_name(peer, generation))

    def forget(self, peer: str) -> list[Action]:
        """It is none of our peers any more."""
        self._holders.pop(peer, None)
        return self._leave(peer)

    def _leave(self, peer: str, but: str = "") -> list[Action]:
        """Our ranks forget this P, once no read of it is open, but not under that name."""
        names = sorted(name for name in self._read_from if incarnation_of(name) == peer and name != but)
        self._leaving.update(names)
        return [action for name in names for action in self._drop_leaving(name)]

    def known_are(self, now: float, known: Iterable[str]) -> list[Action]:
        """These engines are in the registry, or not to be forgotten for another reason. Our ranks forget a P that has
        not been among them for as long as a claim waits, and that nothing is read from: its death may never be seen.
        If it lives, the next read has them add it."""
        needed = {*known, *self.peers()}
        idle = sorted(name for name in self._read_from if incarnation_of(name) not in needed)
        self._missing = {name: self._missing.get(name, now) for name in idle}
        gone = [name for name, since in self._missing.items() if now >= since + self.claim_wait_s]
        self._read_from.difference_update(gone)
        return [DropPeer(name, was_read=True) for name in gone]

    def knows(self, peer: str) -> bool:
        """Whether it can be read from."""
        return peer in self._holders

    def peer_dead(self, now: float, peer: str) -> list[Action]:
        """The process of a P is gone, as a fact."""
        actions = self._fail_open(now, peer, "the prefill engine died")
        for read in [one for one in self._reads.values() if one.peer == peer and one.unproven]:
            actions += self.ended(read.attempt, "the prefill engine died")
        return actions + self.forget(peer)

    def peer_seems_dead(self, now: float, peer: str) -> list[Action]:
        """A P on another machine can't be reached, and may live all the same."""
        return self._fail_open(now, peer, "the prefill engine can't be reached")

    def _fail_open(self, now: float, peer: str, detail: str) -> list[Action]:
        """The attempts that read from this P, or ask it, fall back."""
        actions: list[Action] = []
        for read in [one for one in self._reads.values() if one.peer == peer and one.state is not ReadState.STOPPING]:
            actions += self._end(now, read, AttemptEnd.FAILED, FallbackReason.PEER, detail)
        return actions

    # Our generations: see `generations.Half`.

    def doubts_at(self) -> float:
        """See Half: at once about a read that has failed, and about one that does not end, after a while."""
        return min((LONG_AGO if read.unproven else read.stopping_at + DOUBT_S for read in self._reads.values()
                    if read.state is ReadState.STOPPING), default=NEVER)

    def is_busy(self, now: float) -> bool:
        """See Half."""
        return any(read.state is ReadState.READING or read.state is ReadState.STOPPING and not read.unproven
                   and now < read.stopping_at + DOUBT_S for read in self._reads.values()
                   if read.own_generation < self._generations.current)

    def retired(self) -> list[Action]:
        """See Half. Of a read that went on until now the ranks report that it has ended."""
        actions: list[Action] = []
        for read in [one for one in self._reads.values() if one.unproven]:
            if read.own_generation < self._generations.oldest:
                actions += self.ended(read.attempt, "the transfer agents that read it were destroyed")
        return actions

    def peers(self) -> set[str]:
        """Ps that are read from, or asked."""
        return {read.peer for read in self._reads.values()}

    def open_peers(self) -> set[str]:
        """Ps that our ranks may read from at this moment."""
        return set(map(incarnation_of, self.open_names()))

    def open_names(self) -> set[str]:
        """What our transport calls these."""
        return {read.name for read in self._reads.values() if read.state is not ReadState.CLAIMING}

    # Messages of a P.

    def receive(self, now: float, sender: str, message: m.HoldGrant | m.HoldDenied | m.HoldQuery) -> list[Action]:
        """A message of a P."""
        if message.attempt.incarnation != self.member.incarnation:
            return self._drop("hold_foreign")
        read = self._reads.get(message.attempt)
        if read is None:
            self.dropped["hold_unknown"] += 1
            return [] if isinstance(message, m.HoldDenied) else self._done(sender, message.attempt, message.hold)
        if (read.peer, read.hold) != (sender, message.hold):
            return self._drop("hold_foreign")
        if read.unproven and isinstance(message, m.HoldQuery):
            return self._done(sender, message.attempt, message.hold)
        if read.state is ReadState.STOPPING or isinstance(message, m.HoldQuery):
            return []
        if isinstance(message, m.HoldDenied):  # also in the middle of a read: then what it brings may be anything
            self.counters["read_denied_" + message.reason.value] += 1
            return self._end(now, read, AttemptEnd.FAILED, FallbackReason.HOLD,
                             f"the prefill engine denies it: {message.reason.value}")
        known = self._holders.get(read.peer)
        if read.state is ReadState.CLAIMING and known is not None and known.generation != message.generation:
            return self._drop("hold_generation")  # it is claimed again
        read.lease_s = min(self.lease_s, message.lease_s)
        read.lease_until = now + read.lease_s
        return self._begin(now, read, message) if read.state is ReadState.CLAIMING else []

    def peer_of(self, attempt: m.Attempt) -> str:
        """The P that is read from for this attempt; "" where it has no record."""
        read = self._reads.get(attempt)
        return "" if read is None else read.peer

    def is_wanted(self, attempt: m.Attempt) -> bool:
        """Whether what is read for this attempt is to be used: nobody has given it up."""
        read = self._reads.get(attempt)
        return read is not None and read.state is ReadState.READING

    # Time.

    def handle_timeout(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for read in [one for one in self._reads.values() if self._due(one) <= now]:
            if now >= read.deadline:
                actions += self._end(now, read, AttemptEnd.EXPIRED, FallbackReason.DEADLINE,
                                     "the attempt took too long")
            elif now >= read.lease_until:
                actions += self._end(now, read, AttemptEnd.EXPIRED, FallbackReason.LEASE,
                                     "the prefill engine fell silent")
            else:
                actions += self._claim(now, read)
        return actions

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is next due; None where nothing is."""
        return min(map(self._due, self._reads.values()), default=None)

    def shut(self, now: float, detail: str) -> list[Action]:
        """The control thread ends: every attempt that is open falls back."""
        actions: list[Action] = []
        for read in [one for one in self._reads.values() if one.state is not ReadState.STOPPING]:
            actions += self._end(now, read, AttemptEnd.FAILED, FallbackReason.CONTROL, detail)
        return actions

    def states(self) -> dict[m.Attempt, ReadState]:
        """All attempts that have a record here."""
        return {attempt: read.state for attempt, read in self._reads.items()}

    def unproven_reads(self) -> set[m.Attempt]:
        """Those that end with P's death, this engine or the generation that they went through."""
        return {attempt for attempt, read in self._reads.items() if read.unproven}

    # Inside.

    def _claim(self, now: float, read: _HoldRead) -> list[Action]:
        read.next_claim = now + (self.claim_retry_s if read.state is ReadState.CLAIMING else read.lease_s / 3)
        known = self._holders.get(read.peer)
        if read.state is ReadState.CLAIMING and known is not None:
            read.generation = known.generation
        return [ToPrefill(read.peer, m.ClaimHold(read.attempt, read.hold, read.digest, read.generation))]

    def _begin(self, now: float, read: _HoldRead, grant: m.HoldGrant) -> list[Action]:
        """P has granted the claim: its blocks may be read."""
        read.granted, remote_block_ids = True, grant.block_ids
        if len(remote_block_ids) != len(read.block_ids) or len(set(remote_block_ids)) != len(remote_block_ids):
            self.dropped["hold_bad"] += 1
            return self._end(now, read, AttemptEnd.FAILED, FallbackReason.HOLD,
                             f"the prefill engine holds {len(remote_block_ids)} blocks of {len(read.block_ids)}")
        known = self._holders.get(read.peer)
        if known is None:  # forgotten since
            return self._end(now, read, AttemptEnd.FAILED, FallbackReason.PEER,
                             "the prefill engine is not known any more")
        read.state = ReadState.READING
        read.generation, read.own_generation = grant.generation, self._generations.current
        self._read_from.add(read.name)
        return [ReadHold(read.attempt, read.name, known.metadata, read.block_ids[read.cached_blocks:],
                         remote_block_ids[read.cached_blocks:])]

    def _end(self, now: float, read: _HoldRead, outcome: AttemptEnd, reason: FallbackReason | None,
             detail: str = "") -> list[Action]:
        """The one place where an attempt ends before its read has."""
        self.counters["read_" + outcome.value] += 1
        actions: list[Action] = [] if reason is None else [self._fallback(read, outcome, reason, detail)]
        if read.state is ReadState.READING:
            read.state, read.stopping_at = ReadState.STOPPING, now
            return [*actions, StopRead(read.attempt)]
        del self._reads[read.attempt]
        actions.append(Released(read.attempt))
        if reason is FallbackReason.HOLD and not read.granted:
            return actions  # what P has denied may be another's: it is not ours to give up
        return actions + self._done(read.peer, read.attempt, read.hold)

    @staticmethod
    def _fallback(read: _HoldRead, outcome: AttemptEnd, reason: FallbackReason, detail: str) -> Fallback:
        # A P that does not hold this prompt (any more) may be the best one to compute it.
        return Fallback(read.attempt, reason, outcome, detail, "" if reason is FallbackReason.HOLD else read.peer)

    @staticmethod
    def _done(peer: str, attempt: m.Attempt, hold: m.Attempt) -> list[Action]:
        return [ToPrefill(peer, m.HoldDone(attempt, hold))]

    def _drop_leaving(self, name: str) -> list[Action]:
        """Our ranks forget a P that is gone, once no read of it is open."""
        if name not in self._leaving or name in self.open_names():
            return []
        self._leaving.discard(name)
        self._read_from.discard(name)
        return [DropPeer(name, was_read=True)]

    @staticmethod
    def _due(read: _HoldRead) -> float:
        if read.state is ReadState.STOPPING:
            return NEVER
        return min(read.deadline, read.lease_until, read.next_claim)

    def _drop(self, name: str) -> list[Action]:
        self.dropped[name] += 1
        return []
