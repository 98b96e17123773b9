# SPDX-License-Identifier: Apache-2.0
"""What the broker knows, pure: the members, their credits, the jobs that wait.

The queue is first in, first out, and holds promises only: a job lost with it is put again by its D, a job offered twice
is denied there. So nothing here has to outlive the process. A job waits only while nobody who may take it has room, or
only somebody across a slow link; who of those that have room gets it: `broker.choice`.
"""
import collections
import itertools
from collections.abc import Iterable

import msgspec

from vllm_pd.broker.choice import JobTaker, choose_or_wait
from vllm_pd.broker.prompts import block_names
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.locality import stays_on_loopback

OutgoingMessage = tuple[str, m.Message]


class QueueLimits(msgspec.Struct, frozen=True):
    """Bounds of the queue and the registry."""
    ttl_s: float = 5.0
    max_jobs: int = 4096
    max_tokens: int = 16_000_000
    max_members: int = 1024


def may_take(taker: m.Member, job: m.Job, owner: m.Member) -> bool:
    """Whether this member may do that job of the owner's."""
    return taker.incarnation not in job.avoid and may_prefill_for(taker, owner)


def may_prefill_for(taker: m.Member, owner: m.Member) -> bool:
    """Whether this member may do jobs of the owner's."""
    return (taker.incarnation != owner.incarnation and taker.role.prefills and not taker.draining
            and owner.incarnation not in taker.unreached
            and taker.fingerprint.first_difference(owner.fingerprint) is None)


def prefill_loads(asker: m.Member, members: Iterable[m.Member]) -> tuple[m.PrefillLoad, ...]:
    """The loads of the prefill engines among `members` that could take a job of the asker's; none for an engine that
    hands over none. At most `MAX_LOADS`."""
    if not asker.role.decodes:
        return ()
    fitting = (one for one in members if may_prefill_for(one, asker))
    return tuple(map(m.PrefillLoad.of, itertools.islice(fitting, m.MAX_LOADS)))


class _RegisteredMember:
    """One member, and what it could take."""

    def __init__(self, now: float, member: m.Member):
        self.taker = JobTaker()
        self.hear(now, member)

    def hear(self, now: float, member: m.Member) -> None:
        """Its heartbeat."""
        self.heard_at = now
        self.member = member
        self.taker.reported(member)


class Registry:
    """Members and queue of one broker process. Methods return messages to send, each with its receiver."""

    def __init__(self, incarnation: str, limits: QueueLimits, local_only: bool = False):
        """`local_only`: members with an address beyond the loopback are refused."""
        self.incarnation = incarnation
        self._local_only = local_only
        self.limits = limits
        self.version = 1
        self.counters: m.Counters = collections.Counter()
        self._entries: dict[str, _RegisteredMember] = {}
        self._jobs: dict[m.Attempt, tuple[m.Job, float]] = {}  # insertion order is the queue's
        self._front: dict[m.Attempt, tuple[m.Job, float]] = {}  # offers that came back, served first
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._jobs) + len(self._front)

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens of all jobs that wait."""
        return self._tokens

    def members(self) -> list[m.Member]:
        """Everybody who is registered."""
        return [entry.member for entry in self._entries.values()]

    def receive(self, now: float, sender: str, message: m.Message) -> list[OutgoingMessage]:
        """A message from an engine."""
        if isinstance(message, m.Register):
            return self._register(now, sender, message)
        if isinstance(message, m.Put):
            return self._put(now, sender, message.job)
        if isinstance(message, m.Credit):
            return self._credit(now, sender, message)
        if isinstance(message, m.Withdraw):
            if message.attempt.incarnation == sender:
                self._remove(message.attempt)
            return []
        if isinstance(message, m.Leave):
            return self._drop_members([sender])
        if isinstance(message, m.ListMembers):
            return [(sender, self._peers())]
        self.counters["unexpected"] += 1
        return []

    def handle_timeout(self, now: float) -> list[OutgoingMessage]:
        """Remove silent members, and jobs whose time is over."""
        for attempt in [job.attempt for job, until in self._in_order() if until <= now]:
            self._remove(attempt)
            self.counters["job_expired"] += 1
        silent = [name for name, entry in self._entries.items() if now - entry.heard_at >= self.limits.ttl_s]
        self.counters["member_silent"] += len(silent)
        return self._drop_members(silent) + self._offers(now)

    def undeliverable(self, now: float, to: str, message: m.Message, gone: bool) -> list[OutgoingMessage]:
        """A message that the socket did not take. `gone`: nobody is connected under that name."""
        entry = self._entries.get(to)
        if isinstance(message, m.Offer):
            job = message.job
            if job.attempt.incarnation in self._entries and not self._is_queued(job.attempt):
                self._front[job.attempt] = (job, now + job.deadline_s)
                self._tokens += len(job.token_ids)
        if entry is not None:
            entry.taker.close()
        return (self._drop_members([to]) if gone else []) + self._offers(now)

    # Messages, one by one.

    def _register(self, now: float, sender: str, message: m.Register) -> list[OutgoingMessage]:
        member = message.member
        if member.incarnation != sender:
            self.counters["foreign"] += 1
            return []
        if self._local_only and not stays_on_loopback(member):
            self.counters["beyond_loopback"] += 1
            return [(sender, m.Refused("keys", "none, so no address beyond the loopback", member.address))]
        entry = self._entries.get(sender)
        if entry is None:
            if len(self._entries) >= self.limits.max_members:
                self.counters["too_many_members"] += 1
                return [(sender, m.Refused("members", str(self.limits.max_members), "one more"))]
            entry = self._entries[sender] = _RegisteredMember(now, member)
            return self._changed()
        changed = msgspec.structs.replace(member, load=entry.member.load) != entry.member
        entry.hear(now, member)
        if changed:
            return self._changed()
        if (message.broker, message.version) != (self.incarnation, self.version):
            return [(sender, self._peers())]
        tokens = self._tokens_before(member) if member.role.decodes else None
        return [(sender, m.Heard(self.incarnation, len(self), tokens, prefill_loads(member, self.members())))]

    def _put(self, now: float, sender: str, job: m.Job) -> list[OutgoingMessage]:
        attempt = job.attempt
        if attempt.incarnation != sender:
            self.counters["foreign"] += 1
            return []
        refusal = self._refusal(sender, job)
        is_new = refusal is None and not self._is_queued(attempt)
        if is_new:
            self._jobs[attempt] = (job, now + job.deadline_s)
            self._tokens += len(job.token_ids)
        offers = self._offers(now)
        return [*offers, (sender, m.PutReply(attempt, refusal, len(self), is_new))]

    def _refusal(self, sender: str, job: m.Job) -> m.PutRefusal | None:
        if sender not in self._entries:
            return m.PutRefusal.UNREGISTERED
        if self._is_queued(job.attempt):
            return None
        if len(self) >= self.limits.max_jobs or self._tokens + len(job.token_ids) > self.limits.max_tokens:
            return m.PutRefusal.FULL
        if not any(self._fits(entry, job) for entry in self._entries.values()):
            return m.PutRefusal.NO_PEER
        return None

    def _credit(self, now: float, sender: str, message: m.Credit) -> list[OutgoingMessage]:
        entry = self._entries.get(sender)
        if entry is None:
            self.counters["unregistered"] += 1
            return []
        # An offer unseen for so long was lost with its connection.
        entry.taker.set_credit(message, all_seen=now - entry.taker.offered_at >= self.limits.ttl_s)
        return self._offers(now)

    # Moves.

    def _offers(self, now: float) -> list[OutgoingMessage]:
        """Offer jobs to those who have room, the oldest job first."""
        messages: list[OutgoingMessage] = []
        open_to = [entry for entry in self._entries.values() if entry.taker.has_room()]
        for job, until in self._in_order() if open_to else ():
            fitting = [entry for entry in open_to if self._fits(entry, job)] if until > now else ()
            if not fitting:
                continue
            names = block_names(job)
            full = [entry.taker for entry in self._entries.values()
                    if job.detours and not entry.taker.has_room() and self._fits(entry, job)]
            waited_s = now + job.deadline_s - until
            chosen = choose_or_wait([entry.taker for entry in fitting], full, job, names, waited_s)
            if chosen is None:
                continue
            entry = next(entry for entry in fitting if entry.taker is chosen)
            serial = chosen.offer(now, job, names)
            self._remove(job.attempt)
            offer = m.Offer(msgspec.structs.replace(job, deadline_s=max(0.0, until - now)), serial)
            messages.append((entry.member.incarnation, offer))
            if not chosen.has_room():
                open_to.remove(entry)
                if not open_to:
                    break
        return messages

    def _in_order(self) -> list[tuple[m.Job, float]]:
        return [*self._front.values(), *self._jobs.values()]

    def _is_queued(self, attempt: m.Attempt) -> bool:
        return attempt in self._front or attempt in self._jobs

    def _fits(self, entry: _RegisteredMember, job: m.Job) -> bool:
        """Whether this member may take that job."""
        theirs = self._entries.get(job.attempt.incarnation)
        return theirs is not None and may_take(entry.member, job, theirs.member)

    def _tokens_before(self, member: m.Member) -> int:
        """Prompt tokens to be computed that wait in the queue for the prefill engines that fit this member."""
        by_owner: collections.Counter[str] = collections.Counter()
        for job, _ in self._in_order():
            by_owner[job.attempt.incarnation] += job.new_tokens
        return sum(tokens for name, tokens in by_owner.items() if name in self._entries and
                   self._entries[name].member.fingerprint.first_difference(member.fingerprint) is None)

    def _drop_members(self, names: list[str]) -> list[OutgoingMessage]:
        dropped = [name for name in names if self._entries.pop(name, None) is not None]
        if not dropped:
            return []
        for attempt in [job.attempt for job, _ in self._in_order() if job.attempt.incarnation in dropped]:
            self._remove(attempt)
        return self._changed()

    def _remove(self, attempt: m.Attempt) -> None:
        item = self._front.pop(attempt, None) or self._jobs.pop(attempt, None)  # it is in one of them at most
        if item is not None:
            self._tokens -= len(item[0].token_ids)

    def _changed(self) -> list[OutgoingMessage]:
        self.version += 1
        peers = self._peers()
        return [(name, peers) for name in self._entries]

    def _peers(self) -> m.Peers:
        return m.Peers(self.incarnation, self.version, self.members(), len(self))
