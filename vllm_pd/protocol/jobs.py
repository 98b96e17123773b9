# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine notes of each job that it was offered, and the bounds of one. `prefill` moves it."""
import collections
from enum import Enum

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.generations import DOUBT_S
from vllm_pd.protocol.holds import HoldLimits
from vllm_pd.protocol.moments import NEVER
from vllm_pd.protocol.peering import PeeringLimits
from vllm_pd.protocol.rows import BlockRows

_MAX_OPEN_RENEWALS = 4  # a lease contains three


class JobState(Enum):
    """Where a job is on P."""
    PEERING = "peering"
    CLAIMING = "claiming"
    RUNNING = "running"
    STOPPING = "stopping"
    UNPROVEN = "unproven"


class PrefillLimits(PeeringLimits, frozen=True):
    """Bounds of jobs, besides those of peers. `max_jobs`, `max_media_bytes`: without those that are UNPROVEN."""
    peering_s: float = 5.0
    claim_wait_s: float = 5.0
    claim_retry_s: float = 0.5
    max_jobs: int = 256
    max_media_bytes: int = 256 << 20  # of the media of all jobs
    holds: HoldLimits = HoldLimits()


class OpenRenewal:
    """A renewal of a lease that was sent and has not been answered."""

    def __init__(self, stamp: int, renewed_at: float):
        self.stamp = stamp
        self.renewed_at = renewed_at


class OfferedJob:
    """One job. Times are those of the caller's clock."""

    def __init__(self, job: m.Job, now: float):
        self.job = job
        self.attempt = job.attempt
        self.state = JobState.PEERING
        self.claim = -1
        self.claimed_at = self.next_claim = 0.0
        self.peering_until = now
        self.lease_s = self.lease_until = 0.0
        self.next_renew = 0.0
        self.stamp = 0
        self.renewals: collections.deque[OpenRenewal] = collections.deque(maxlen=_MAX_OPEN_RENEWALS)
        self.sent_writing = False
        self.claim_s = 0.0
        self.generation = 0  # of D, in which it is claimed
        self.own_generation = 0  # in which its writes begin
        self.is_elsewhere = False  # D
        self.stopping_at = 0.0
        self.next_ask = self.unproven_until = 0.0  # while it is UNPROVEN

    def due(self, claim_wait_s: float, renews: bool) -> float:
        """When there is next something to do about it; infinite: not as it stands. `renews`: whether leases are."""
        if self.state is JobState.PEERING:
            return min(self.peering_until, self.next_claim or NEVER)
        if self.state is JobState.CLAIMING:
            return min(self.next_claim, self.claimed_at + claim_wait_s)
        if self.state is JobState.RUNNING:
            return min(self.lease_until, self.next_renew) if renews else self.lease_until
        if self.state is JobState.UNPROVEN and self.is_elsewhere:
            return min(self.next_ask, self.unproven_until)
        return NEVER

    def begin_claim(self, now: float, number: int, generation: int, retry_s: float) -> None:
        """It is claimed now, by this number, in this generation of its D, and again after `retry_s`."""
        self.claim, self.generation = number, generation
        self.state = JobState.CLAIMING
        self.claimed_at, self.next_claim = now, now + retry_s

    def claim_message(self, ours: m.Fingerprint) -> m.Claim:
        """What is said to its D, with the ranks of our engine, whose fingerprint this is."""
        return m.Claim(self.attempt, self.claim, ours.tp * ours.pp, self.generation, self.job.scope.digest)

    def problem(self, now: float, rows: BlockRows, grant: m.Grant) -> str:
        """What is wrong with this grant of its claim, by an engine whose groups of blocks these are; empty: nothing."""
        tokens = len(self.job.token_ids)
        blocks = -(-tokens // rows.block_size)
        if grant.cached_blocks >= blocks:
            return f"{grant.cached_blocks} of {blocks} blocks are cached: nothing to do"
        if not len(set(grant.block_ids)) == len(grant.block_ids) == rows.count(tokens, grant.cached_blocks):
            return f"{len(grant.block_ids)} blocks granted for {tokens} tokens of {rows.block_size} a block"
        if [len(data) for data in grant.media] != [item.size for item in self.job.scope.media]:
            return "its media are not those of the job"
        if now >= self.lease_until:
            return "the lease was over when it came"
        return ""

    @property
    def doubted_at(self) -> float:
        """From when on a write that was stopped is in doubt: its D may be gone, and TCP tries for a quarter of an
        hour."""
        return self.stopping_at + DOUBT_S if self.is_elsewhere and self.state is JobState.STOPPING else NEVER
