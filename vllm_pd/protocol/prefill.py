# SPDX-License-Identifier: Apache-2.0
"""The prefill engine's half of the protocol: every job that it was offered.

Life of a job: an offer from the queue waits until D is a peer (PEERING), is claimed at D (CLAIMING) and, once granted,
handed to the engine (RUNNING), which reports `sent` or `failed`; then the record is deleted. A cancel from D, the end
of the lease or the loss of D moves it to STOPPING: the engine gets `Cancelled`, and D waits for the engine's `ended`.
A job is UNPROVEN where a write of it has failed whose bytes may still land. It stays so until D is dead, or, of a D on
another machine, has ended the generation that it was written in (`generations`): D is told that the job was given up,
but nothing that would take its fence down. After such a failure of the read of D's prefix the job has failed, for
nothing was written; only the read is remembered until D is dead or our own generation has ended. From either on the two
are *parted*: a job of that D is claimed only to tell D so, and a hold is denied to it. A job of a D that the transport
could not add is claimed only to tell D so, too.

The lease counts from before the claim was sent, on this engine's clock, so it ends here before it ends on D. A record
is deleted only when nothing of the job can land any more; so a cancel of a claim without a record is answered at once.
"""
import collections
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from vllm_pd.errors import PeerMismatch
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Action, Cancelled, Prefill, ToDecode
from vllm_pd.protocol.generations import Generations, is_elsewhere
from vllm_pd.protocol.hashes import claim_number
from vllm_pd.protocol.hold_reads import HoldReads
from vllm_pd.protocol.holds import Holds
from vllm_pd.protocol.jobs import JobState, OfferedJob, OpenRenewal, PrefillLimits
from vllm_pd.protocol.moments import LONG_AGO, NEVER
from vllm_pd.protocol.names import generation_name, incarnation_of
from vllm_pd.protocol.peering import Peer, Peering, PeerState
from vllm_pd.protocol.scope import MAX_MEDIA_BYTES

# For how long an UNPROVEN job of a D is remembered that nobody knows any more, on another machine. Without it D's next
# request to stop would be answered as that of any unknown job; no kernel keeps the bytes of a connection for so long.
UNPROVEN_KEPT_S = 3600.0
ASK_S = 5.0  # between two questions to a D on another machine whether it has ended the generation of such a job


class PrefillProtocol:
    """All jobs of one prefill engine. No method blocks, reads a clock, or raises because of what a peer does.
    `generations`: see `DecodeProtocol`; `reads`: the holds of others that the same engine reads, if it decodes, too."""

    def __init__(self, member: m.Member, transfer_metadata: bytes, limits: PrefillLimits,
                 generations: Generations | None = None, reads: HoldReads | None = None,
                 claim_secret: bytes = b""):
        """`claim_secret`: who names a claim may end it, so claim numbers follow from this, and nobody without it can
        guess one. Without it they are 1, 2, 3."""
        self.member = member
        self.scopes: Collection[str] = member.scopes  # those of its jobs, at present
        self.limits = limits
        self.counters: m.Counters = collections.Counter()
        self.dropped: m.Counters = collections.Counter()
        self.mismatch: str | None = None
        self.generations = generations or Generations(member.incarnation, transfer_metadata)
        self._jobs: dict[m.Attempt, OfferedJob] = {}
        # Of prefixes, for these jobs: they may land here, through no newer generation than that.
        self._unproven_reads: dict[m.Attempt, int] = {}
        self.holds = Holds(limits.holds, self.dropped, self.generations)
        self._reads = reads
        self._peering = Peering(member, limits, self.dropped, self.generations)
        self.renews = True  # False: the engine does not answer, so the leases of its jobs are to end
        self._claims = 0
        self._claim_secret = claim_secret
        self._handlers: dict[type, Callable[[float, str, m.Message], list[Action]]] = {
            m.HelloReply: self._on_hello_reply,
            m.Refused: self._on_refused,
            m.Grant: self._on_grant,
            m.Deny: self._on_deny,
            m.Renewed: self._on_renewed,
            m.Cancel: self._on_cancel,
            m.ClaimHold: self._on_claim_hold,
            m.HoldDone: self._on_hold_done,
        }

    # Calls of the engine.

    def may_write(self, now: float, attempt: m.Attempt) -> bool:
        """Whether a write of this attempt may be posted now. To be called right before each post."""
        job = self._jobs.get(attempt)
        return job is not None and job.state is JobState.RUNNING and now < job.lease_until

    def writing(self, now: float, attempt: m.Attempt) -> list[Action]:
        """The last write of this attempt, for which `may_write` was true, is about to be posted."""
        job = self._jobs.get(attempt)
        if job is None or job.sent_writing:
            return []
        job.sent_writing = True
        return self._to_decode(job, m.Writing(attempt, job.claim))

    def sent(self, now: float, attempt: m.Attempt, timings: m.Timings) -> list[Action]:
        """All transfer handles of all ranks are done."""
        job = self._forget(attempt)
        if job is None:
            return []
        if job.state is JobState.STOPPING:
            return self._to_decode(job, m.Stopped(attempt, job.claim)) + self._drop_idle(now, attempt.incarnation)
        timings = msgspec.structs.replace(timings, claim_s=job.claim_s)
        self.counters["sent"] += 1
        self._peering.written(attempt.incarnation)
        return self._to_decode(job, m.Sent(attempt, job.claim, timings)) + self._drop_idle(now, attempt.incarnation)

    def failed(self, now: float, attempt: m.Attempt, reason: str) -> list[Action]:
        """The engine gave the attempt up; no handle of it can write any more."""
        job = self._forget(attempt)
        if job is None:
            return []
        self.counters["failed"] += 1
        failed = m.Failed(attempt, job.claim, reason[:1000], attempt.incarnation in self.parted)
        return self._to_decode(job, failed) + self._drop_idle(now, attempt.incarnation)

    def ended(self, now: float, attempt: m.Attempt) -> list[Action]:
        """The engine's answer to `Cancelled`: no handle of it can write any more."""
        job = self._forget(attempt)
        if job is None:
            return []
        return self._to_decode(job, m.Stopped(attempt, job.claim)) + self._drop_idle(now, attempt.incarnation)

    def unproven(self, now: float, attempt: m.Attempt, reason: str) -> list[Action]:
        """A write of the job has failed, and its bytes may land until this engine or D has ended. What the engine
        reports of the job from now on has no effect."""
        job = self._jobs.get(attempt)
        if job is None or job.state is JobState.UNPROVEN:
            return []
        if self._is_fenced(job):
            return self.failed(now, attempt, reason)
        job.state = JobState.UNPROVEN
        job.next_ask, job.unproven_until = now + ASK_S, now + UNPROVEN_KEPT_S
        self._peering.failed(attempt.incarnation, job.generation)
        if job.generation >= self._peering.generation_of(attempt.incarnation):  # else D has a newer one already
            self.parted.add(attempt.incarnation)
        self.counters["unproven"] += 1
        return self._to_decode(job, m.GaveUp(attempt, job.claim, reason[:1000]))

    def read_unproven(self, now: float, attempt: m.Attempt, reason: str) -> list[Action]:
        """The read of D's prefix for this job has failed, and its bytes may land here until this engine or D has ended.
        The engine gives the job up, of which nothing was written: D may reuse all of its blocks."""
        self._unproven_reads[attempt] = self.generations.newest
        if attempt in self._jobs:
            self._peering.failed(attempt.incarnation, self._jobs[attempt].generation)
        self.parted.add(attempt.incarnation)
        self.counters["read_unproven"] += 1
        return self.failed(now, attempt, reason)

    # Messages of others.

    def offer(self, now: float, job: m.Job) -> list[Action]:
        """The broker offers this job."""
        attempt = job.attempt
        if attempt.incarnation == self.member.incarnation:
            return self._drop("offer_own")
        if attempt in self._jobs:
            return self._drop("offer_duplicate")
        if not job.scope.is_read_by(self.scopes):
            return self._drop("offer_scope")
        if len(self._jobs) - len(self.unproven_jobs()) >= self.limits.max_jobs:
            return self._drop("offer_too_many")
        if (media := job.scope.media_bytes) and (media > MAX_MEDIA_BYTES
                                                 or media + self.media_bytes() > self.limits.max_media_bytes):
            return self._drop("offer_media")
        peer, actions = self._peering.greet(now, attempt.incarnation, job.address)
        if peer is None or peer.state is PeerState.REFUSED:
            return self._drop("offer_refused_peer")
        if peer.is_unreached:  # its jobs would take the places of others' jobs, and would never be claimed
            return self._drop("offer_silent_peer")
        record = self._jobs[attempt] = OfferedJob(job, now)
        record.peering_until = now + min(self.limits.peering_s, job.deadline_s)
        if peer.state in (PeerState.PEER, PeerState.UNADDED) or attempt.incarnation in self.parted:
            actions += self._claim(now, record)
        return actions

    def members_are(self, now: float, members: list[m.Member]) -> list[Action]:
        """The registry lists these members."""
        return self._peering.members_are(now, members)

    def receive(self, now: float, sender: str, message: m.Message) -> list[Action]:
        """A message from a D."""
        handler = self._handlers.get(type(message))
        peer = self._peering.find(sender)
        if handler is None or peer is None:
            return self._drop("unexpected" if handler is None else "unknown_peer")
        self._peering.heard(now, peer)
        return handler(now, sender, message)

    def peer_unadded(self, now: float, name: str, reason: str = "") -> None:
        """The transport could not add the D that it calls so: nothing can be written there until it is added again,
        after a pause. The engine gives up the jobs of it that it has."""
        peer = self._peering.find(incarnation_of(name))
        if peer is not None and peer.state is PeerState.PEER and peer.name == name:
            self.counters["peer_unadded"] += 1
            self._peering.unadded(now, peer, reason)

    def peer_lost(self, now: float, incarnation: str) -> list[Action]:
        """A D is gone. Its running jobs are stopped; the peer is dropped when the last of them has ended."""
        peer = self._peering.find(incarnation)
        if peer is None:
            return []
        actions = self._stop_jobs(now, incarnation)
        return actions + self._peering.lose(peer) + self._drop_idle(now, incarnation)

    def _stop_jobs(self, now: float, incarnation: str) -> list[Action]:
        actions: list[Action] = []
        for job in [j for j in self._jobs.values() if j.attempt.incarnation == incarnation]:
            actions += self._give_up(now, job)
        return actions

    def read_ended(self, now: float, incarnation: str) -> list[Action]:
        """A read of a hold there has ended on all ranks."""
        return self._drop_idle(now, incarnation)

    def peer_dead(self, now: float, incarnation: str) -> list[Action]:
        """The process of a D is gone, as a fact: it neither reads nor wants anything any more, and has no blocks."""
        for job in [j for j in self._jobs.values() if j.attempt.incarnation == incarnation]:
            if job.state is JobState.UNPROVEN:
                del self._jobs[job.attempt]
        self._unproven_reads = {one: generation for one, generation in self._unproven_reads.items()
                                if one.incarnation != incarnation}
        self.parted.discard(incarnation)
        return self.holds.peer_dead(incarnation) + self.peer_lost(now, incarnation)

    def peer_seems_dead(self, now: float, incarnation: str) -> list[Action]:
        """A D on another machine can't be reached, and may live all the same. Its jobs are stopped, and it is greeted
        until it answers; what it reads here is kept until the generation has ended."""
        self.holds.peer_seems_dead(incarnation)
        self._peering.not_answered(now, incarnation)
        return self._stop_jobs(now, incarnation)

    def disconnected(self, now: float, incarnation: str) -> None:
        """The connection to this D has ended. It opens again by itself if that can be: then D is asked."""
        peer = self._peering.find(incarnation)
        if peer is not None and peer.state is PeerState.PEER:
            self._peering.ask(now, peer)

    # The generations: see `generations.Half`.

    def doubts_at(self) -> float:
        """See Half."""
        if self._unproven_reads or self.parted:
            return LONG_AGO
        return min([self.holds.doubts_at(), *(job.doubted_at for job in self._jobs.values())])

    def is_busy(self, now: float) -> bool:
        """See Half."""
        return self.holds.is_busy(now) or any(
            job.state in (JobState.RUNNING, JobState.STOPPING) and now < job.doubted_at
            for job in self._jobs.values() if job.own_generation < self.generations.current)

    def renewed(self, now: float) -> list[Action]:
        """See Half."""
        return self._peering.introduce_again(now)

    def close(self, now: float) -> list[Action]:
        """See Half. A write that goes on ends with the agents that it goes through, and is reported as failed."""
        return self.holds.close_older()

    def retired(self, now: float) -> list[Action]:
        """See Half."""
        self._unproven_reads = {attempt: newest for attempt, newest in self._unproven_reads.items()
                                if newest >= self.generations.oldest}
        actions = self.holds.retired()
        for incarnation in self._peering.names():
            actions += self._drop_idle(now, incarnation)
        return actions

    def shut(self, now: float) -> list[Action]:
        """The control thread ends: every job is to be stopped. What a D has claimed stays held: it can't be heard any
        more."""
        actions = self.holds.close_unclaimed()
        for job in list(self._jobs.values()):
            actions += self._give_up(now, job)
        return actions

    # Time.

    def handle_timeout(self, now: float) -> list[Action]:
        """Do what is due."""
        actions = self.holds.handle_timeout(now)
        for job in list(self._jobs.values()):
            if self._due(job) <= now:
                actions += self._on_due(now, job)
        for peer in self._peering.due(now):
            if self._peering.is_silent(now, peer):
                self.counters["peer_lost"] += 1
                actions += self.peer_lost(now, peer.incarnation)
            else:
                actions += self._peering.greet_again(now, peer, self._is_in_use(peer.incarnation))
        return actions

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is next due; None where nothing is."""
        held = self.holds.next_timeout()
        due = min([self._peering.next_timeout(), NEVER if held is None else held,
                   *(self._due(job) for job in self._jobs.values())])
        return None if due == NEVER else due

    # State, for the engine and the tests.

    @property
    def parted(self) -> set[str]:
        """See Generations."""
        return self.generations.parted

    @property
    def hello(self) -> m.Hello:
        """How this engine introduces itself."""
        return self._peering.hello

    def states(self) -> dict[m.Attempt, JobState]:
        """All jobs that still have a record."""
        return {attempt: job.state for attempt, job in self._jobs.items()}

    def unproven_jobs(self) -> set[m.Attempt]:
        """The jobs that end with D's death or with this engine; of a D on another machine also with D's generation."""
        return {attempt for attempt, job in self._jobs.items() if job.state is JobState.UNPROVEN}

    def remembered(self) -> set[m.Attempt]:
        """The unproven jobs of Ds on other machines that are not known at present. A record of each is kept only to
        answer its D, should that come back."""
        return {attempt for attempt in self.unproven_jobs() if self._jobs[attempt].is_elsewhere
                and self._peering.find(attempt.incarnation) is None}

    def unproven_reads(self) -> set[m.Attempt]:
        """The jobs whose reads may still land here. They end with D's death, this engine or its generation, and have no
        record."""
        return set(self._unproven_reads)

    def media_bytes(self) -> int:
        """Of the media of all jobs, in bytes, whether or not they have come."""
        return sum(job.job.scope.media_bytes for job in self._jobs.values() if job.state is not JobState.UNPROVEN)

    def waiting_tokens(self) -> list[int]:
        """Of each job that may still come to the engine: the tokens that it has to compute."""
        return [job.job.new_tokens for job in self._jobs.values()
                if job.state in (JobState.PEERING, JobState.CLAIMING)]

    def peers(self) -> dict[str, m.Member]:
        """Decode engines that have answered."""
        return self._peering.members()

    def unreached_peers(self, now: float) -> list[str]:
        """Decode engines that do not answer, or can't be written to: this engine can't do anything for them."""
        return self._peering.unreached(now)

    def unadded_peers(self) -> dict[str, str]:
        """Decode engines that the transport could not add, and why."""
        return self._peering.unadded_members()

    def busy_peers(self) -> set[str]:
        """Decode engines with a job here, that may read here, or that a read of ours may still come from."""
        return {attempt.incarnation for attempt in (*self._jobs, *self._unproven_reads)} | self.holds.readers()

    def debug_state(self) -> dict[m.Attempt, dict[str, Any]]:
        """What is known of each job with a record, for tests alone. Times are those of the caller's clock."""
        return {attempt: {"state": job.state, "lease_until": job.lease_until} for attempt, job in self._jobs.items()}

    # Messages, one by one.

    def _on_hello_reply(self, now: float, sender: str, message: m.HelloReply) -> list[Action]:
        peer = self._peering.find(sender)
        if message.member.incarnation != sender:
            return self._drop("hello_reply_duplicate")
        self._learn_oldest(peer, message.oldest)
        is_newer = peer.state in (PeerState.PEER, PeerState.UNADDED) and message.generation > peer.generation
        if not is_newer and (peer.state is not PeerState.GREETED or message.generation < peer.generation):
            return self._drop("hello_reply_duplicate")
        if is_newer:
            self.parted.discard(sender)
        difference = self.member.fingerprint.first_difference(message.member.fingerprint)
        if difference is not None:
            return self._refuse(peer, *difference)
        actions = self._peering.accept(peer, message) + self._drop_idle(now, sender)
        for job in list(self._jobs.values()):
            if job.attempt.incarnation == sender and job.state is JobState.PEERING:
                actions += self._claim(now, job)
        return actions

    def _learn_oldest(self, peer: Peer, oldest: int) -> None:
        """That D has ended its generations before `oldest`, and by that fenced what was written there."""
        peer.oldest = max(peer.oldest, oldest)
        for job in [j for j in self._jobs.values() if j.state is JobState.UNPROVEN and self._is_fenced(j)]:
            del self._jobs[job.attempt]

    def _is_fenced(self, job: OfferedJob) -> bool:
        """Whether nothing of this job lands at D any more, by D's own act."""
        peer = self._peering.find(job.attempt.incarnation)
        return peer is not None and job.is_elsewhere and job.generation < peer.oldest

    def _on_refused(self, now: float, sender: str, message: m.Refused) -> list[Action]:
        peer = self._peering.find(sender)
        if peer.state is not PeerState.GREETED:
            return self._drop("refused_unexpected")
        return self._refuse(peer, message.key, message.theirs, message.ours)

    def _on_grant(self, now: float, sender: str, grant: m.Grant) -> list[Action]:
        job = self._held(sender, grant, JobState.CLAIMING)
        if job is None:
            return self._drop("grant_unknown")
        job.lease_s = grant.lease_s
        job.lease_until = job.claimed_at + grant.lease_s
        job.next_renew = now + grant.lease_s / 3
        if problem := job.problem(now, self.member.fingerprint.rows, grant):
            self.dropped["grant_bad"] += 1
            return self.failed(now, job.attempt, problem)
        if sender in self.parted:
            self.counters["parted"] += 1
            return self.failed(now, job.attempt,
                               "an earlier transfer between the two failed, and it has not begun anew since")
        if self._peering.find(sender).state is not PeerState.PEER:
            return self.failed(now, job.attempt, "the transport could not add the decode engine: see the log there")
        job.own_generation = self.generations.current
        job.is_elsewhere = is_elsewhere(self.member, self._peering.find(sender).member)
        if self._is_fenced(job) or self._peering.has_failed(sender, job.generation):  # the two go on in a newer one
            self.counters["parted"] += 1
            return self.failed(now, job.attempt, "nothing can be written any more where this was granted")
        job.state = JobState.RUNNING
        job.claim_s = max(0.0, now - job.claimed_at)
        self.counters["granted"] += 1
        return [Prefill(job.attempt, job.job.token_ids, grant.block_ids[grant.cached_blocks:], grant.cached_blocks,
                        grant.block_ids[:grant.cached_blocks], generation_name(sender, job.generation),
                        job.job.priority, job.job.scope, grant.media, grant.next_token)]

    def _on_deny(self, now: float, sender: str, deny: m.Deny) -> list[Action]:
        job = self._held(sender, deny, JobState.CLAIMING)
        if job is None:
            return self._drop("deny_unknown")
        self.counters["denied_" + deny.reason.value] += 1
        if deny.reason is not m.DenyReason.UNPEERED or now >= job.peering_until:
            self._forget(job.attempt)
            return self._drop_idle(now, sender)
        job.state = JobState.PEERING
        job.claim = -1
        job.next_claim = now + self.limits.claim_retry_s / 10
        return [self._peering.introduce(now, self._peering.find(sender))]

    def _on_renewed(self, now: float, sender: str, message: m.Renewed) -> list[Action]:
        job = self._held(sender, message, JobState.RUNNING)
        if job is None or message.stamp not in [renewal.stamp for renewal in job.renewals]:
            return self._drop("renewed_unknown")
        while (renewal := job.renewals.popleft()).stamp != message.stamp:
            pass  # an older one: its answer would say less
        job.lease_until = max(job.lease_until, renewal.renewed_at + message.lease_s)
        return []

    def _on_cancel(self, now: float, sender: str, cancel: m.Cancel) -> list[Action]:
        job = self._jobs.get(cancel.attempt)
        if cancel.attempt.incarnation != sender:
            return self._drop("cancel_foreign")
        if job is None or job.claim != cancel.claim:
            self.dropped["cancel_unknown"] += 1
            return [ToDecode(sender, m.Stopped(cancel.attempt, cancel.claim))]
        if job.state is JobState.RUNNING:
            self.counters["cancelled"] += 1
            return self._stop(now, job)
        if job.state is JobState.UNPROVEN:  # the message that says so may be lost
            return self._to_decode(job, m.GaveUp(job.attempt, job.claim, "a write of it failed"))
        if job.state is JobState.STOPPING:
            return self._drop("cancel_duplicate")
        self._forget(job.attempt)
        return self._to_decode(job, m.Stopped(job.attempt, job.claim))

    def _on_claim_hold(self, now: float, sender: str, message: m.ClaimHold) -> list[Action]:
        if not self.holds.has_claimed(message.attempt, message.hold):  # what it reads already it may read on
            if sender in self.parted:  # nobody can say when it may: it is to go on at once
                self.counters["parted"] += 1
                return [ToDecode(sender, m.HoldDenied(message.attempt, message.hold, m.DenyReason.UNKNOWN))]
            state = self._peering.find(sender).state
            if state not in (PeerState.PEER, PeerState.UNADDED):  # one that is leaving is to be met anew
                return self._drop("hold_not_peer")  # it asks again
            if message.generation != self.generations.current:  # it asks again, once it knows the present one
                self.dropped["hold_generation"] += 1
                return [self._peering.introduce(now, self._peering.find(sender))]
        member = self._peering.find(sender).member
        return self.holds.claim(now, sender, message, member is not None and is_elsewhere(self.member, member))

    def _on_hold_done(self, now: float, sender: str, message: m.HoldDone) -> list[Action]:
        return self.holds.done(sender, message) + self._drop_idle(now, sender)

    # Moves.

    def _refuse(self, peer: Peer, key: str, ours: object, theirs: object) -> list[Action]:
        self.counters["peer_refused"] += 1
        self.mismatch = str(PeerMismatch(key, ours, theirs))
        for job in [j for j in self._jobs.values() if j.attempt.incarnation == peer.incarnation]:
            self._forget(job.attempt)
        return self._peering.refuse(peer)

    def _claim(self, now: float, job: OfferedJob) -> list[Action]:
        self._claims += 1
        number = self._claims if not self._claim_secret else claim_number(self._claim_secret, self._claims)
        job.begin_claim(now, number, self._peering.generation_of(job.attempt.incarnation), self.limits.claim_retry_s)
        return self._to_decode(job, job.claim_message(self.member.fingerprint))

    def _give_up(self, now: float, job: OfferedJob) -> list[Action]:
        """Have the engine stop this job, or forget one that the engine does not have."""
        if job.state is JobState.RUNNING:
            return self._stop(now, job)
        if job.state in (JobState.PEERING, JobState.CLAIMING):
            self._forget(job.attempt)
        return []

    def _stop(self, now: float, job: OfferedJob) -> list[Action]:
        job.state = JobState.STOPPING
        if job.is_elsewhere:
            job.stopping_at = now
        return [Cancelled(job.attempt)]

    def _drop_idle(self, now: float, incarnation: str) -> list[Action]:
        """Drop a peer that is leaving, once no job of it can write, we read nothing there, and it reads nothing here.
        It could not say so without a connection."""
        actions = self._peering.drop_older(incarnation, lambda one: self._is_touched(incarnation, one))
        busy = self.holds.readers() | self.parted | {attempt.incarnation for attempt in self._unproven_reads}
        if incarnation in busy or self._is_read(incarnation) or any(
                job.attempt.incarnation == incarnation and job.state is not JobState.PEERING
                and not (job.state is JobState.UNPROVEN and job.is_elsewhere) for job in self._jobs.values()):
            return actions
        return actions + self._peering.drop_if_leaving(now, incarnation)

    def _is_touched(self, incarnation: str, generation: int) -> bool:
        """Whether a job may write, or has failed to, in that generation of that D, or we read what it holds."""
        name = generation_name(incarnation, generation)
        return (self._reads is not None and name in self._reads.open_names()) or any(
            generation_name(job.attempt.incarnation, job.generation) == name and job.state is not JobState.PEERING
            for job in self._jobs.values())

    def _is_read(self, incarnation: str) -> bool:
        """Whether this engine reads a hold of that one."""
        return self._reads is not None and incarnation in self._reads.open_peers()

    def _is_in_use(self, incarnation: str) -> bool:
        """Whether writes to this D, or reads of what it holds, may be under way. It can't be dropped then."""
        return incarnation in self.parted or self._is_read(incarnation) or any(
            job.attempt.incarnation == incarnation and job.state in (JobState.RUNNING, JobState.STOPPING)
            for job in self._jobs.values())

    def _due(self, job: OfferedJob) -> float:
        return job.due(self.limits.claim_wait_s, self.renews)

    def _on_due(self, now: float, job: OfferedJob) -> list[Action]:
        """Ask again, renew the lease, or give the job up: what its state has due."""
        if job.state is JobState.UNPROVEN:
            return self._ask_or_forget(now, job)
        if job.state is JobState.PEERING:
            if now >= job.peering_until:
                self._forget(job.attempt)
                self.counters["peering_timeout"] += 1
                return []
            return self._claim(now, job)
        if job.state is JobState.CLAIMING:
            if now >= job.claimed_at + self.limits.claim_wait_s:
                self.counters["claim_timeout"] += 1
                self._peering.not_answered(now, job.attempt.incarnation)
                return self.failed(now, job.attempt, "the claim was not answered in time")
            job.next_claim = now + self.limits.claim_retry_s
            return self._to_decode(job, job.claim_message(self.member.fingerprint))
        if now >= job.lease_until:
            self.counters["lease_over"] += 1
            return self._stop(now, job)
        job.stamp += 1
        job.renewals.append(OpenRenewal(job.stamp, now))
        job.next_renew = now + job.lease_s / 3
        return self._to_decode(job, m.Renew(job.attempt, job.claim, job.stamp))

    def _ask_or_forget(self, now: float, job: OfferedJob) -> list[Action]:
        """Greet the D of an UNPROVEN job: its word that the generation has ended may be lost. Forget the job where
        nobody has known its D for long."""
        peer = self._peering.find(job.attempt.incarnation)
        job.next_ask = now + ASK_S
        if peer is None:
            if now >= job.unproven_until:
                del self._jobs[job.attempt]
            return []
        job.unproven_until = now + UNPROVEN_KEPT_S
        asks = peer.state is PeerState.PEER and peer.asked_at is None  # once for all of its jobs
        return [self._peering.introduce(now, peer)] if asks else []

    # Helpers.

    def _held(self, sender: str, message: m.Message, state: JobState) -> OfferedJob | None:
        """The job that this answer is about; None where its state, claim or sender is another."""
        job = self._jobs.get(message.attempt)
        if job is None or job.state is not state or job.claim != message.claim or job.attempt.incarnation != sender:
            return None
        return job

    def _forget(self, attempt: m.Attempt) -> OfferedJob | None:
        """Delete this job's record, and return it; None where there is none, or it is UNPROVEN."""
        job = self._jobs.get(attempt)
        return None if job is None or job.state is JobState.UNPROVEN else self._jobs.pop(attempt)

    @staticmethod
    def _to_decode(job: OfferedJob, message: m.Message) -> list[Action]:
        return [ToDecode(job.attempt.incarnation, message)]

    def _drop(self, name: str) -> list[Action]:
        """Count a message that changes nothing else."""
        self.dropped[name] += 1
        return []
