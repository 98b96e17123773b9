# SPDX-License-Identifier: Apache-2.0
"""What the broker knows, pure: the members, their credits, the jobs that wait.

The queue is first in, first out, and holds promises only: a job lost with it is put again by its D, a job offered twice
is denied there. So nothing here has to outlive the process. A job waits only while nobody who may take it has room, or
only somebody across a slow link; who of those that have room gets it: `broker.choice`.
"""
import collections
import math
from collections.abc import Iterable

import msgspec

from vllm_pd.broker.changes import ChangeLog
from vllm_pd.broker.choice import JobTaker, choose_or_wait
from vllm_pd.broker.prompts import block_names
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.locality import stays_on_loopback

TICK_S = 0.5
GATHER_S = 0.1
FEW_MEMBERS = 32  # in an answer to one that asks; where more have changed, it gets all
LATE_TTLS = 0.25
MAX_INCARNATION_BYTES = 64  # others name it in their entries, and those are bounded too

OutgoingMessage = tuple[str, m.Message]


class QueueLimits(msgspec.Struct, frozen=True):
    """Bounds of the queue and the registry."""
    ttl_s: float = 5.0
    max_jobs: int = 4096
    max_tokens: int = 16_000_000
    max_members: int = 1024
    max_entry_bytes: int = 24 << 10  # max_members of them fit into one message

    @property
    def tick_s(self) -> float:
        """How often to look for what is due by time."""
        return min(TICK_S, LATE_TTLS / 2 * self.ttl_s)


def may_take(taker: m.Member, job: m.Job, owner: m.Member) -> bool:
    """Whether this member may do that job of the owner's."""
    return taker.incarnation not in job.avoid and job.scope.is_read_by(taker.scopes) and may_prefill_for(taker, owner)


def may_prefill_for(taker: m.Member, owner: m.Member) -> bool:
    """Whether this member may do jobs of the owner's."""
    return (taker.incarnation != owner.incarnation and taker.role.prefills and not taker.draining
            and owner.incarnation not in taker.unreached
            and taker.fingerprint.first_difference(owner.fingerprint) is None)


def prefill_loads(asker: m.Member, members: Iterable[m.Member]) -> tuple[m.PrefillLoad, ...]:
    """The loads of the prefill engines among `members` that could take a job of the asker's; none for an engine that
    hands over none."""
    if not asker.role.decodes:
        return ()
    return tuple(m.PrefillLoad.of(one) for one in members if may_prefill_for(one, asker))


class _RegisteredMember:
    """One member, and what it could take."""

    def __init__(self, member: m.Member):
        self.taker = JobTaker()
        self.silent_s = 0.0  # since its last message, without the time in which the broker did not listen
        self.hear(member)

    def hear(self, member: m.Member) -> None:
        """Its heartbeat."""
        self.member = member
        self.taker.reported(member)


class Registry:
    """Members and queue of one broker process. Methods return messages to send, each with its receiver. All members get
    the same update of the registry, `GATHER_S` after the first change in it."""

    def __init__(self, incarnation: str, limits: QueueLimits, local_only: bool = False):
        """`local_only`: members with an address beyond the loopback are refused."""
        self.incarnation = incarnation
        self._local_only = local_only
        self.limits = limits
        self.counters: m.Counters = collections.Counter()
        self._entries: dict[str, _RegisteredMember] = {}
        self._log = ChangeLog()
        self._published = self._log.version
        self._publish_at = math.inf
        self._whole: m.Peers | None = None  # the last answer with all members
        self._whole_until = 0.0
        self._looked_at = math.inf  # not yet
        self._jobs: dict[m.Attempt, tuple[m.Job, float]] = {}  # insertion order is the queue's
        self._front: dict[m.Attempt, tuple[m.Job, float]] = {}  # offers that came back, served first
        self._names: dict[m.Attempt, list[int]] = {}  # of the blocks of jobs that wait for a nearer engine
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._jobs) + len(self._front)

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._entries

    @property
    def version(self) -> int:
        """Grows with each change that matters to others; a new load does not."""
        return self._log.version

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens of all jobs that wait."""
        return self._tokens

    def members(self) -> list[m.Member]:
        """Everybody who is registered."""
        return [entry.member for entry in self._entries.values()]

    def receive(self, now: float, sender: str, message: m.Message) -> list[OutgoingMessage]:
        """A message from an engine."""
        entry = self._entries.get(sender)
        if entry is not None:
            entry.silent_s = 0.0
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
            self._drop_members(now, [sender])
            return []
        if isinstance(message, m.ListMembers):
            return [(sender, self._answer(now, message.broker, message.version))]
        self.counters["unexpected"] += 1
        return []

    def next_timeout(self) -> float:
        """When the members are next to hear what has changed, in `handle_timeout`; infinite where nothing has."""
        return self._publish_at

    def handle_timeout(self, now: float) -> list[OutgoingMessage]:
        """Remove silent members, and jobs whose time is over; tell all what has changed. To be called when that is due
        and every `tick_s`, each time after at least one message of each member that waited was received. Of the time
        since the last call no more than `LATE_TTLS` of `ttl_s` counts as silence: a broker that was suspended, or has
        much to do, does not listen."""
        for attempt in [job.attempt for job, until in self._in_order() if until <= now]:
            self._remove(attempt)
            self.counters["job_expired"] += 1
        passed_s, self._looked_at = max(0.0, now - self._looked_at), now
        listened_s = min(passed_s, LATE_TTLS * self.limits.ttl_s)
        self.counters["late"] += listened_s < passed_s
        silent = []
        for name, entry in self._entries.items():
            entry.silent_s += listened_s
            if entry.silent_s >= self.limits.ttl_s:
                silent.append(name)
        self.counters["member_silent"] += len(silent)
        self._drop_members(now, silent)
        return self._publish(now) + self._offers(now)

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
        if gone:
            self._drop_members(now, [to])
        return self._offers(now)

    # Messages, one by one.

    def _register(self, now: float, sender: str, message: m.Register) -> list[OutgoingMessage]:
        """A heartbeat: admit the sender, or renew its entry. The answer is Refused where it can't be a member, an
        update where it lacks something that was published, else Heard. A heartbeat for another member is counted and
        dropped."""
        member = message.member
        if member.incarnation != sender:
            self.counters["foreign"] += 1
            return []
        if (size := len(sender.encode())) > MAX_INCARNATION_BYTES:
            self.counters["name_too_long"] += 1
            return [(sender, m.Refused("incarnation", f"at most {MAX_INCARNATION_BYTES} bytes", f"{size} bytes"))]
        if (size := len(msgspec.msgpack.encode(member))) > self.limits.max_entry_bytes:
            self.counters["entry_too_large"] += 1
            return [(sender, m.Refused("entry", f"at most {self.limits.max_entry_bytes} bytes", f"{size} bytes"))]
        if self._local_only and not stays_on_loopback(member):
            self.counters["beyond_loopback"] += 1
            return [(sender, m.Refused("keys", "none, so no address beyond the loopback", member.address))]
        entry = self._entries.get(sender)
        if entry is None:
            if len(self._entries) >= self.limits.max_members:
                self.counters["too_many_members"] += 1
                return [(sender, m.Refused("members", str(self.limits.max_members), "one more"))]
            self._entries[sender] = _RegisteredMember(member)
            self._changed(now, sender)
        else:
            if msgspec.structs.replace(member, load=entry.member.load) != entry.member:
                self._changed(now, sender)
            entry.hear(member)
        if message.broker != self.incarnation or not self._published <= message.version <= self.version:
            return [(sender, self._answer(now, message.broker, message.version))]
        tokens = self._tokens_before(member) if member.role.decodes else None
        return [(sender, m.Heard(self.incarnation, len(self), tokens, prefill_loads(member, self.members())))]

    def _put(self, now: float, sender: str, job: m.Job) -> list[OutgoingMessage]:
        """Queue a job of the sender's, unless it waits already, and offer the jobs that somebody may have now. The
        reply has the length of the queue after that."""
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
            names = self._names.pop(job.attempt, None) or block_names(job)
            full = [entry.taker for entry in self._entries.values()
                    if job.detours and not entry.taker.has_room() and self._fits(entry, job)]
            waited_s = now + job.deadline_s - until
            chosen = choose_or_wait([entry.taker for entry in fitting], full, job, names, waited_s)
            if chosen is None:
                self._names[job.attempt] = names  # it is looked at again soon
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

    def _drop_members(self, now: float, names: list[str]) -> None:
        dropped = [name for name in names if self._entries.pop(name, None) is not None]
        for name in dropped:
            self._changed(now, name)
        for attempt in [job.attempt for job, _ in self._in_order() if job.attempt.incarnation in dropped]:
            self._remove(attempt)

    def _remove(self, attempt: m.Attempt) -> None:
        item = self._front.pop(attempt, None) or self._jobs.pop(attempt, None)  # it is in one of them at most
        self._names.pop(attempt, None)
        if item is not None:
            self._tokens -= len(item[0].token_ids)

    def _changed(self, now: float, name: str) -> None:
        self._log.note(name)
        self._publish_at = min(self._publish_at, now + GATHER_S)

    def empty_update(self) -> m.Peers:
        """An update with nothing in it. Who has another version sees that by it, and sends a heartbeat."""
        return m.Peers(self.incarnation, self.version, [], len(self), self.version)

    def _publish(self, now: float) -> list[OutgoingMessage]:
        """What has changed since the last time: one message for all, which is to be encoded once."""
        if now < self._publish_at:
            return []
        update = self._update(self.incarnation, self._published)
        self._published, self._publish_at = self.version, math.inf
        return [(name, update) for name in self._entries]

    def _answer(self, now: float, broker: str, version: int) -> m.Peers:
        """An update for one that asks. A large one is the same for all that ask within GATHER_S, so that a thousand
        questions of one sender leave one answer in the broker's memory."""
        update = self._update(broker, version)
        if len(update.members) <= FEW_MEMBERS:
            return update
        if self._whole is None or self._whole.version != self.version or now >= self._whole_until:
            self._whole, self._whole_until = self._update("", 0), now + GATHER_S
        return self._whole

    def _update(self, broker: str, version: int) -> m.Peers:
        """What one that knows this version of this broker's registry has to know."""
        names = self._log.since(version) if broker == self.incarnation else None
        if names is None:
            return m.Peers(self.incarnation, self.version, self.members(), len(self))
        changed = [self._entries[name].member for name in names if name in self._entries]
        gone = [name for name in names if name not in self._entries]
        return m.Peers(self.incarnation, self.version, changed, len(self), version, gone)
