# SPDX-License-Identifier: Apache-2.0
"""Prefill first, on D: prompts whose KV it reads from the P that holds it.

Life of a read: D claims the hold for an attempt (CLAIMING), gets the ids of P's blocks and has its ranks read them into
its own (READING); when all of that has ended well the attempt is done, and D tells P. Its end is told once, as that of
any attempt: `Prefilled`, or `Fallback`, or the engine's own `abort`.

An attempt that ends while its ranks read becomes STOPPING: its blocks stay set aside until the ranks have said that no
byte lands any more, for only they know; then come `Released`, and HoldDone to P. A read that failed, and may still
land, ends with P's death instead. P gets its HoldDone at once, for nothing that still comes is used. An attempt without
a record reads nothing, and never will, for its number is used once. So a question of P about one is answered at once.

The claim is repeated while D reads, and P's answer renews the lease: a P that is silent for that long has lost the
attempt, whatever its memory still gives.
"""
from collections.abc import Iterable
from enum import Enum

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

_NEVER = float("inf")


class ReadState(Enum):
    """Where the read of a hold is."""
    CLAIMING = "claiming"
    READING = "reading"
    STOPPING = "stopping"


class _HoldRead:
    """One read. Times are those of the caller's clock."""

    def __init__(self, attempt: m.Attempt, hold: m.Attempt, digest: bytes, block_ids: list[int], cached_blocks: int,
                 deadline: float):
        self.attempt = attempt
        self.hold = hold
        self.digest = digest
        self.block_ids = block_ids
        self.cached_blocks = cached_blocks
        self.deadline = deadline
        self.state = ReadState.CLAIMING
        self.granted = False
        self.unproven = False  # it has failed, and its bytes may land until P or this engine has ended
        self.lease_until = self.next_claim = 0.0

    @property
    def peer(self) -> str:
        return self.hold.incarnation


class HoldReads:
    """All reads of one decode engine. It counts in the caller's counters. A claim waits `claim_wait_s` for its first
    answer, and a read `lease_s` for each further one."""

    def __init__(self, member: m.Member, claim_wait_s: float, claim_retry_s: float, lease_s: float,
                 counters: m.Counters, dropped: m.Counters):
        self.member = member
        self.claim_wait_s = claim_wait_s
        self.claim_retry_s = claim_retry_s
        self.lease_s = lease_s
        self.counters = counters
        self.dropped = dropped
        self._reads: dict[m.Attempt, _HoldRead] = {}
        self._metadata: dict[str, bytes] = {}  # by P, of those that have greeted us
        self._read_from: set[str] = set()  # the Ps that our ranks know
        self._leaving: set[str] = set()  # those of them that are gone, to be dropped when no read is open
        self._missing: dict[str, float] = {}  # those of them that nobody has known since then, and that are not read

    # Calls of the engine.

    def claim(self, now: float, attempt: m.Attempt, hold: m.Attempt, digest: bytes, block_ids: list[int],
              cached_blocks: int, deadline_s: float) -> list[Action]:
        """Read what the hold's P keeps into `block_ids[cached_blocks:]`, for a prompt whose tokens have this digest and
        take all of `block_ids`. The caller keeps those set aside until `Prefilled` or `Released`."""
        read = _HoldRead(attempt, hold, digest, list(block_ids), cached_blocks, now + deadline_s)
        self._reads[attempt] = read
        if not self.knows(read.peer):
            return self._end(read, AttemptEnd.FAILED, FallbackReason.PEER, "the prefill engine is not known")
        read.lease_until = now + self.claim_wait_s
        return self._claim(now, read)

    def abort(self, attempt: m.Attempt) -> list[Action]:
        """The client is gone. This call ends the attempt; `Released` follows when the blocks may be reused."""
        read = self._reads.get(attempt)
        if read is None or read.state is ReadState.STOPPING:
            return []
        return self._end(read, AttemptEnd.CANCELLED, None)

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
        return actions + self._done(read.peer, attempt, read.hold) + self._drop_leaving(read.peer)

    def unproven(self, attempt: m.Attempt, error: str) -> list[Action]:
        """As `ended`, but bytes of the read may land in our blocks until P or this engine has ended. P's are free."""
        read = self._reads.get(attempt)
        if read is None or read.state is ReadState.CLAIMING:
            return self._drop("hold_read_unknown")
        self.counters["read_unproven"] += not read.unproven
        read.unproven = True
        stopping = read.state is ReadState.STOPPING
        actions = [] if stopping else self._end(read, AttemptEnd.FAILED, FallbackReason.FAILED, error)
        return actions + self._done(read.peer, attempt, read.hold)

    # Who is there.

    def met(self, peer: str, metadata: bytes) -> None:
        """This P has greeted us, and fits."""
        self._metadata[peer] = metadata
        self._leaving.discard(peer)

    def forget(self, peer: str) -> list[Action]:
        """It is none of our peers any more."""
        self._metadata.pop(peer, None)
        if peer in self._read_from:
            self._leaving.add(peer)
        return self._drop_leaving(peer)

    def known_are(self, now: float, known: Iterable[str]) -> list[Action]:
        """These engines are in the registry, or not to be forgotten for another reason. Our ranks forget a P that has
        not been among them for as long as a claim waits, and that nothing is read from: its death may never be seen.
        If it lives, the next read has them add it."""
        idle = self._read_from.difference(known, self.peers())
        self._missing = {peer: self._missing.get(peer, now) for peer in idle}
        gone = [peer for peer, since in self._missing.items() if now >= since + self.claim_wait_s]
        self._read_from.difference_update(gone)
        return [DropPeer(peer) for peer in gone]

    def knows(self, peer: str) -> bool:
        """Whether it can be read from."""
        return peer in self._metadata

    def peer_dead(self, peer: str) -> list[Action]:
        """The process of a P is gone, as a fact."""
        actions: list[Action] = []
        for read in [one for one in self._reads.values() if one.peer == peer and one.state is not ReadState.STOPPING]:
            actions += self._end(read, AttemptEnd.FAILED, FallbackReason.PEER, "the prefill engine died")
        for read in [one for one in self._reads.values() if one.peer == peer and one.unproven]:
            actions += self.ended(read.attempt, "the prefill engine died")
        return actions + self.forget(peer)

    def peers(self) -> set[str]:
        """Ps that are read from, or asked."""
        return {read.peer for read in self._reads.values()}

    def open_peers(self) -> set[str]:
        """Ps that our ranks may read from at this moment."""
        return {read.peer for read in self._reads.values() if read.state is not ReadState.CLAIMING}

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
            return self._end(read, AttemptEnd.FAILED, FallbackReason.HOLD,
                             f"the prefill engine denies it: {message.reason.value}")
        read.lease_until = now + self.lease_s
        return self._begin(read, message.block_ids) if read.state is ReadState.CLAIMING else []

    def peer_of(self, attempt: m.Attempt) -> str:
        """The P that is read from for this attempt; "" where it has no record."""
        read = self._reads.get(attempt)
        return "" if read is None else read.peer

    # Time.

    def handle_timeout(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for read in [one for one in self._reads.values() if self._due(one) <= now]:
            if now >= read.deadline:
                actions += self._end(read, AttemptEnd.EXPIRED, FallbackReason.DEADLINE, "the attempt took too long")
            elif now >= read.lease_until:
                actions += self._end(read, AttemptEnd.EXPIRED, FallbackReason.LEASE, "the prefill engine fell silent")
            else:
                actions += self._claim(now, read)
        return actions

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is next due; None where nothing is."""
        return min(map(self._due, self._reads.values()), default=None)

    def shut(self, detail: str) -> list[Action]:
        """The control thread ends: every attempt that is open falls back."""
        actions: list[Action] = []
        for read in [one for one in self._reads.values() if one.state is not ReadState.STOPPING]:
            actions += self._end(read, AttemptEnd.FAILED, FallbackReason.CONTROL, detail)
        return actions

    def states(self) -> dict[m.Attempt, ReadState]:
        """All attempts that have a record here."""
        return {attempt: read.state for attempt, read in self._reads.items()}

    def unproven_reads(self) -> set[m.Attempt]:
        """Those that end with P's death or with this engine."""
        return {attempt for attempt, read in self._reads.items() if read.unproven}

    # Inside.

    def _claim(self, now: float, read: _HoldRead) -> list[Action]:
        read.next_claim = now + (self.claim_retry_s if read.state is ReadState.CLAIMING else self.lease_s / 3)
        return [ToPrefill(read.peer, m.ClaimHold(read.attempt, read.hold, read.digest))]

    def _begin(self, read: _HoldRead, remote_block_ids: list[int]) -> list[Action]:
        """P has granted the claim: its blocks may be read."""
        read.granted = True
        if len(remote_block_ids) != len(read.block_ids) or len(set(remote_block_ids)) != len(remote_block_ids):
            self.dropped["hold_bad"] += 1
            return self._end(read, AttemptEnd.FAILED, FallbackReason.HOLD,
                             f"the prefill engine holds {len(remote_block_ids)} blocks of {len(read.block_ids)}")
        if not self.knows(read.peer):  # forgotten since
            return self._end(read, AttemptEnd.FAILED, FallbackReason.PEER, "the prefill engine is not known any more")
        read.state = ReadState.READING
        self._read_from.add(read.peer)
        return [ReadHold(read.attempt, read.peer, self._metadata[read.peer], read.block_ids[read.cached_blocks:],
                         remote_block_ids[read.cached_blocks:])]

    def _end(self, read: _HoldRead, outcome: AttemptEnd, reason: FallbackReason | None,
             detail: str = "") -> list[Action]:
        """The one place where an attempt ends before its read has."""
        self.counters["read_" + outcome.value] += 1
        actions: list[Action] = [] if reason is None else [self._fallback(read, outcome, reason, detail)]
        if read.state is ReadState.READING:
            read.state = ReadState.STOPPING
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

    def _drop_leaving(self, peer: str) -> list[Action]:
        """Our ranks forget a P that is gone, once no read of it is open."""
        if peer not in self._leaving or peer in self.peers():
            return []
        self._leaving.discard(peer)
        self._read_from.discard(peer)
        return [DropPeer(peer)]

    @staticmethod
    def _due(read: _HoldRead) -> float:
        if read.state is ReadState.STOPPING:
            return _NEVER
        return min(read.deadline, read.lease_until, read.next_claim)

    def _drop(self, name: str) -> list[Action]:
        self.dropped[name] += 1
        return []
