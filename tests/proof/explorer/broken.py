# SPDX-License-Identifier: Apache-2.0
"""The protocol, broken on purpose: each class leaves out one thing that the proof is about.

`VARIANTS` says, for each, in which scene the search has to find that out, and within how many steps.
"""
import dataclasses
from dataclasses import dataclass

from explorer.model import Shape
from explorer.world import Scene
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import FallbackReason
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.generations import Generations
from vllm_pd.protocol.jobs import JobState
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.protocol.writes import AttemptWrites

NEVER = float("inf")


class NoFence(DecodeProtocol):
    """The blocks of an attempt are free with its end."""

    def _end(self, now, record, outcome, reason, detail=""):
        record.fenced = False
        return super()._end(now, record, outcome, reason, detail)


class ReuseByTime(DecodeProtocol):
    """The blocks of an attempt that has ended are free when its lease is over."""

    def _on_due(self, now, record):
        if record.state.ended and now >= record.lease_until:
            return self._release(record)
        return super()._on_due(now, record)


class AckAtDequeue(DecodeProtocol):
    """A job is put once. Whoever is offered it has it, also if the offer gets lost."""

    def _put(self, now, record):
        if record.next_put == NEVER:
            return []
        actions = super()._put(now, record)
        record.next_put = NEVER
        return actions


class NoRankCount(DecodeProtocol):
    """The first rank's notice is taken for all."""

    def arrived(self, now, attempt, rank):
        record = self._records.get(attempt)
        if record is not None:
            record.ranks = 1
        return super().arrived(now, attempt, 0)


class NoClaimNumber(DecodeProtocol):
    """A word of P counts for its present claim, whichever it was about."""

    def _held_by(self, sender, message):
        record = self._records.get(message.attempt)
        return None if record is None or not record.fenced or record.peer != sender else record


class GrantsToAll(DecodeProtocol):
    """A second P that claims is granted, too."""

    def _on_claim(self, now, sender, message):
        record = self._records.get(message.attempt)
        if record is not None and not record.state.ended and record.peer != sender:
            record.state = type(record.state).QUEUED
        return super()._on_claim(now, sender, message)


class LeaseFromGrant(PrefillProtocol):
    """P counts its lease from when the grant comes."""

    def _on_grant(self, now, sender, grant):
        job = self._held(sender, grant, JobState.CLAIMING)
        if job is not None:
            job.claimed_at = now
        return super()._on_grant(now, sender, grant)


class StopsTooSoon(PrefillProtocol):
    """P answers a cancel before its writes have ended."""

    def _stop(self, now, job):
        return super()._stop(now, job) + self._to_decode(job, m.Stopped(job.attempt, job.claim))


class NoLease(PrefillProtocol):
    """P posts its writes whenever it comes round to it."""

    def may_write(self, now, attempt):
        job = self._jobs.get(attempt)
        return job is not None and job.state is JobState.RUNNING


class TrustsErrors(PrefillProtocol):
    """A write that has failed has ended."""

    def unproven(self, now, attempt, reason):
        return []


class MeetsOnce(PrefillProtocol):
    """A D that comes back while P still stops its jobs, or while it still reads, is not met again, so P never hears
    what it asks."""

    def _drop_idle(self, now, incarnation):
        peer = self._peering.find(incarnation)
        if peer is not None:
            peer.wanted = False
        return super()._drop_idle(now, incarnation)


class DropsTooSoon(PrefillProtocol):
    """A D that a rank could not add is dropped and added again, whatever the other ranks do."""

    def _is_in_use(self, incarnation):
        return False


class TakesSeemingForDeath(DecodeProtocol):
    """A P on another machine that can't be reached is dead."""

    def peer_seems_dead(self, now, incarnation):
        return self.peer_dead(now, incarnation)


class FencesWithTheRenewal(Generations):
    """Once there are new agents, the old ones count as destroyed."""

    def renewed(self, now, metadata, halves):
        actions = super().renewed(now, metadata, halves)
        self.oldest = self.current
        return actions + [action for half in halves for action in half.retired(now)]


class EndsAllWithOne(DecodeProtocol):
    """Once the older agents are destroyed, everything that was in doubt has ended: also what was granted in the present
    generation."""

    def retired(self, now):
        actions = super().retired(now)
        for record in [one for one in self._records.values() if one.fenced and one.state.ended and one.is_elsewhere]:
            actions += self._p_stopped(now, record, FallbackReason.LEASE, "")
        return actions


class WritesInTheNewest(PrefillProtocol):
    """A job is written to D's present agents, whichever it was granted in."""

    def _on_grant(self, now, sender, grant):
        job = self._held(sender, grant, JobState.CLAIMING)
        if job is not None:
            job.generation = self._peering.generation_of(sender)
        return super()._on_grant(now, sender, grant)


class TakesTheNewForTheEnd(PrefillProtocol):
    """A D that has new agents has destroyed its old ones."""

    def _learn_oldest(self, peer, oldest):
        super()._learn_oldest(peer, peer.generation)


class AnswersTooSoon(AttemptWrites):
    """The attempt is over as soon as no further write begins."""

    @property
    def is_over(self):
        return self._closed


class ForgetsFailures(AttemptWrites):
    """What follows a chunk that has failed is sent, with the notice."""

    def end(self, ok, nbytes=0, error=""):
        super().end(ok or not self._closed, nbytes, error)


class NoticeWithEach(AttemptWrites):
    """Every write has the notice."""

    def begin(self):
        self.open = super().begin()._replace(is_last=True)
        return self.open


def _without_number(incarnation: str, request_id: str, number: int) -> m.Attempt:
    return m.Attempt(incarnation, request_id, 0)


@dataclass(frozen=True)
class Variant:
    """What is broken, where it shows, and a part of what the search then says."""
    name: str
    scene: Scene
    depth: int
    says: str
    heal: bool = False  # whether it only shows in what becomes of it

    @property
    def mended(self) -> Scene:
        """The same scene with the real protocol."""
        shape = self.scene.shape
        return dataclasses.replace(self.scene, shape=Shape(
            ranks=shape.ranks, requests=shape.requests, lives=shape.lives, blocks=shape.blocks,
            prefill_blocks=shape.prefill_blocks, attempts=shape.attempts, prompt_blocks=shape.prompt_blocks,
            chunks=shape.chunks, far=shape.far))


CHUNKS = {"blocks": 4, "prompt_blocks": 2, "chunks": 2}

VARIANTS = [
    Variant("no fence", Scene(aborts=1, shape=Shape(decode_type=NoFence)), 8, "may reuse"),
    Variant("reuse by time", Scene(pauses=4, shape=Shape(decode_type=ReuseByTime)), 12, "may reuse"),
    Variant("id without attempt number",
            Scene(aborts=1, shape=Shape(lives=2, attempts=1, attempt_of=_without_number, names_come_again=True)), 18,
            "reads KV that is not its own"),
    Variant("ack at dequeue", Scene(shape=Shape(decode_type=AckAtDequeue)), 6, "never claimed", heal=True),
    Variant("free at finish", Scene(shape=Shape(requests=2, prefill_blocks=1, frees_at_finish=True)), 14,
            "reads KV that is not its own"),
    Variant("lease from the grant", Scene(pauses=3, shape=Shape(prefill_type=LeaseFromGrant)), 12,
            "saw its lease end"),
    Variant("no lease", Scene(pauses=4, shape=Shape(prefill_type=NoLease)), 12, "saw its lease end"),
    Variant("notice without rank count", Scene(shape=Shape(ranks=2, decode_type=NoRankCount)), 10,
            "reads KV that is not its own"),
    Variant("no claim number", Scene(pauses=3, shape=Shape(decode_type=NoClaimNumber)), 14, "may reuse"),
    Variant("granted to all", Scene(prefills=2, shape=Shape(decode_type=GrantsToAll)), 8, "granted twice"),
    Variant("met once", Scene(losses=1, shape=Shape(requests=2, prefill_type=MeetsOnce)), 11, "not over", heal=True),
    Variant("stopped before the writes have ended", Scene(aborts=1, shape=Shape(prefill_type=StopsTooSoon)), 10,
            "may reuse"),
    Variant("an error taken for the end of the write", Scene(drifts=1, shape=Shape(prefill_type=TrustsErrors)), 10,
            "may reuse"),
    Variant("added again while another rank writes",
            Scene(pauses=3, unadded=1, shape=Shape(ranks=2, prefill_type=DropsTooSoon)), 14, "while it was written to"),
    Variant("a chunk before it is computed", Scene(shape=Shape(**CHUNKS, sends_early=True)), 10,
            "reads KV that is not its own"),
    Variant("over while a chunk is under way", Scene(aborts=1, shape=Shape(**CHUNKS, writes_type=AnswersTooSoon)), 12,
            "may reuse"),
    Variant("the lease asked for before the first chunk alone", Scene(pauses=3, shape=Shape(**CHUNKS, asks_once=True)),
            14, "saw its lease end"),
    Variant("a chunk's failure is forgotten", Scene(errors=1, shape=Shape(**CHUNKS, writes_type=ForgetsFailures)), 12,
            "reads KV that is not its own"),
    Variant("far: a P that can't be reached is taken for dead",
            Scene(false_deaths=1, shape=Shape(far=True, decode_type=TakesSeemingForDeath)), 10, "may reuse"),
    Variant("far: the new agents taken for the end of the old ones",
            Scene(false_deaths=1, shape=Shape(far=True, generations_type=FencesWithTheRenewal)), 12, "may reuse"),
    Variant("far: the first rank that has destroyed its agents taken for all",
            Scene(false_deaths=1, shape=Shape(far=True, ranks=2, first_is_all=True)), 12, "may reuse"),
    Variant("far: granted in one generation, written in another",
            Scene(false_deaths=2, shape=Shape(far=True, requests=2, blocks=4, prefill_type=WritesInTheNewest)), 14,
            "may reuse"),
    Variant("far: two doubts, the end of the first taken for that of both",
            Scene(false_deaths=2, shape=Shape(far=True, requests=2, blocks=2, attempts=1, decode_type=EndsAllWithOne)),
            14, "may reuse"),
    Variant("far: P forgets what may land when D has new agents",
            Scene(false_deaths=1, drifts=1, shape=Shape(far=True, prefill_type=TakesTheNewForTheEnd)), 14, "may reuse"),
    Variant("a notice with each chunk", Scene(shape=Shape(**CHUNKS, writes_type=NoticeWithEach)), 10,
            "reads KV that is not its own"),
]
