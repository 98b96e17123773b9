# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine calls: how many jobs it takes, how its jobs of peers go, and what it holds for others to read.

A job comes as the event `Prefill`, and the engine answers it once: `sent`, `failed`, `unproven` or `read_unproven`, or
`ended` once it was cancelled. Sans-IO; each method holds the lock.
"""
import collections

from vllm_pd.peer.core import Session, locked
from vllm_pd.protocol import messages as m

MAX_REASON_CHARS = 500  # of a transport, in a status


class PrefillSession(Session):
    """The calls of a prefill engine, and those of its control thread that are about its jobs and holds."""

    @locked
    def set_credits(self, jobs: int, queued_tokens: int | None = None, is_paused: bool = False) -> None:
        """The engine could take so many jobs beyond those that it has got from `poll_event`, for which it has so many
        prompt tokens to compute; None: it does not count them. `is_paused`: it computes nothing until the next call
        without. This ends `refuse_jobs`."""
        self._core.refusal = ""
        self._core.credits.set(jobs, queued_tokens)
        if self.state.set_paused(is_paused):
            self._core.state_changed()
        if self._core.new_credit() is not None:
            self._core.wake()

    @locked
    def refuse_jobs(self, reason: str) -> None:
        """The engine does not poll for now, and nobody is to wait for it: it is paused until `set_credits`. Jobs that
        it has not polled, and those that are on their way, are given back for this reason."""
        self.set_credits(0, is_paused=True)
        self._core.refusal = reason
        events, self._core.events = self._core.events, collections.deque()
        self._do(list(events))

    @locked
    def take_job(self, job: m.Job) -> str:
        """A client brought this job, past the queue: claim it. Returns why not, empty where it has a record now.
        Nothing is connected to because a client says so: a decode engine of the registry must be at that address."""
        if not self.state.takes_jobs:
            return f"this engine takes no jobs: it {self._why_no_jobs()}"
        if not any(member.role.decodes and (member.incarnation, member.address)
                   == (job.attempt.incarnation, job.address) for member in self._cluster.members()):
            return "the registry has no such decode engine at that address"
        self._do(self._prefill.offer(self._clock(), job))
        return "" if job.attempt in self._prefill.states() else "it has too many jobs, or the two don't fit or meet"

    @locked
    def set_scopes(self, scopes: tuple[str, ...]) -> None:
        """What this engine can do jobs of, beside those without a scope."""
        self._prefill.scopes = self.state.scopes = scopes
        self._core.state_changed()

    @locked
    def may_write(self, attempt: m.Attempt) -> bool:
        """Whether the lease stands. To be asked right before the last write of an attempt is posted; D then gets a
        message that the notice comes. Before another write: `lease_stands`."""
        now = self._clock()
        allowed = self._prefill.may_write(now, attempt)
        if allowed:
            self._do(self._prefill.writing(now, attempt))
        return allowed

    @locked
    def lease_stands(self, attempt: m.Attempt) -> bool:
        """Whether the job is still wanted, and a write that is not its last may be posted. D keeps what it granted
        either way."""
        return self._prefill.may_write(self._clock(), attempt)

    @locked
    def sent(self, attempt: m.Attempt, timings: m.Timings) -> None:
        """The job was written: all transfer handles of all ranks are done and released."""
        self._do(self._prefill.sent(self._clock(), attempt, timings))

    @locked
    def failed(self, attempt: m.Attempt, reason: str) -> None:
        """The engine gave the job up; no transfer handle of it exists any more."""
        self._do(self._prefill.failed(self._clock(), attempt, reason))

    @locked
    def ended(self, attempt: m.Attempt) -> None:
        """The answer to `Cancelled`: no transfer handle of the job exists any more."""
        self._do(self._prefill.ended(self._clock(), attempt))

    @locked
    def unproven(self, attempt: m.Attempt, reason: str) -> None:
        """A write of the job has failed, and its bytes may land until this engine, D or its generation has ended. To be
        called while the engine still has that write as open: what it reports of the job later has no effect."""
        if self._cluster.is_dead(attempt.incarnation):
            self._do(self._prefill.ended(self._clock(), attempt))
        else:
            self._do(self._prefill.unproven(self._clock(), attempt, reason))

    @locked
    def read_unproven(self, attempt: m.Attempt, reason: str) -> None:
        """The job has failed, for the read of D's prefix has, and that may land in our blocks while `may_land`. To be
        called while the job is the protocol's: D may be forgotten afterwards."""
        if self._cluster.is_dead(attempt.incarnation):
            self._do(self._prefill.failed(self._clock(), attempt, reason))
        else:
            self._do(self._prefill.read_unproven(self._clock(), attempt, reason))

    @locked
    def peer_unadded(self, name: str, reason: str) -> None:
        """The transport could not add this engine, of which an `AddPeer` was polled, under this name."""
        self._prefill.peer_unadded(self._clock(), name, reason[:MAX_REASON_CHARS])
        self._core.wake()

    @locked
    def may_land(self, attempt: m.Attempt) -> bool:
        """Whether a read that failed, of D's prefix for this job, may still land in our blocks."""
        return attempt in self._prefill.unproven_reads()

    @locked
    def jobs(self) -> set[m.Attempt]:
        """The jobs of peers that something is still done for here."""
        return self._core.jobs()

    @locked
    def hold(self, hold: m.Attempt, digest: bytes, block_ids: list[int]) -> bool:
        """Let a decode engine read these blocks of a whole prompt, whose tokens have this digest. False: not in this
        engine's state. Else the caller keeps them until the `HoldEnded` of this name, which must be new."""
        if self._core.shut_detail or self.state.draining or self.state.has_other_weights:
            return False
        self._prefill.holds.add(self._clock(), hold, digest, block_ids)
        self._core.wake()
        return True

    @locked
    def end_old_holds(self) -> None:
        """A request waits for blocks, and nothing runs that would free some: end the holds that nobody has claimed for
        a few seconds."""
        self._do(self._prefill.holds.end_old(self._clock()))
        self._core.wake()

    @locked
    def close_unclaimed_holds(self) -> None:
        """End the holds that nobody has claimed."""
        self._do(self._prefill.holds.close_unclaimed())

    @locked
    def lasting_hold_blocks(self) -> int:
        """How many blocks decode engines have claimed here and not read for some time. They come free with the messages
        or deaths of these."""
        return self._prefill.holds.lasting_blocks()

    @locked
    def close_holds(self) -> None:
        """The memory of this engine's blocks is about to end: what a decode engine reads there is not to be used any
        more."""
        self._do(self._prefill.holds.close())

    @locked
    def is_read(self) -> bool:
        """Whether a decode engine may read here."""
        return bool(self._prefill.holds.readers())

    def _why_no_jobs(self) -> str:
        state = self.state
        return ("drains" if state.draining else "is paused" if state.paused else "hangs" if state.hangs
                else "has lost its address" if state.lost_address
                else "can make no new transfer agents" if state.agents_problem else "only decodes")
