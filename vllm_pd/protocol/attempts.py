# SPDX-License-Identifier: Apache-2.0
"""What a decode engine notes of each attempt that it has open, and the bounds of one. `decode` moves it."""
from enum import Enum
from typing import Any

import msgspec

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.generations import DOUBT_S
from vllm_pd.protocol.moments import LONG_AGO, NEVER
from vllm_pd.protocol.scope import NO_SCOPE, PromptScope


class AttemptState(Enum):
    """Where an attempt is on D."""
    QUEUED = "queued"
    GRANTED = "granted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def ended(self) -> bool:
        """Whether the attempt has ended: the engine has its event."""
        return self not in (AttemptState.QUEUED, AttemptState.GRANTED)


class DecodeLimits(msgspec.Struct, frozen=True):
    """Durations that bound an attempt, how many Ps are remembered, and which side brings a fence down."""
    lease_s: float = 30.0
    deadline_s: float = 120.0
    claim_retry_s: float = 2.0
    max_unclaimed: int = 5  # so often a job may be taken from the queue and not be claimed
    ttl_s: float = 5.0
    cancel_retry_max_s: float = 10.0
    max_peers: int = 1024
    max_media_bytes: int = 256 << 20  # of all attempts that may have to be granted, or whose P may not have got them
    own_fence: bool = False  # the transport is two-sided: our own ranks bring the fence down, and P does not


class AttemptRecord:
    """One open attempt. Times are those of the caller's clock."""

    def __init__(self, attempt: m.Attempt, token_ids: list[int], block_ids: list[int], cached_blocks: int,
                 avoid: tuple[str, ...], priority: int, scope: PromptScope = NO_SCOPE,
                 media: tuple[bytes, ...] = (), next_token: int | None = None):
        self.attempt = attempt
        self.avoid = avoid
        self.priority = priority
        self.scope = scope
        self.media = media  # until it ends
        self.media_bytes = sum(map(len, media))  # while there is a record: they may be in a queue to P
        self.media_sent_at = LONG_AGO
        self.media_sends = 0
        self.token_ids = token_ids
        self.next_token = next_token
        self.block_ids = block_ids
        self.cached_blocks = cached_blocks
        self.state = AttemptState.QUEUED
        self.fenced = False
        self.unproven = False  # given up by P, whose writes may land until P, this engine or the generation has ended
        self.submitted = self.deadline = self.next_put = 0.0
        self.times_queued = 0  # by the present broker; each time but the last, a P has taken it and has not claimed it
        self.granted_at = self.lease_until = self.next_cancel = self.cancel_retry_s = 0.0
        self.peers_lost_at: float | None = None
        self.peer = ""
        self.is_elsewhere = False
        self.claim = -1
        self.ranks = 1
        self.generation = 0  # in which it was granted
        self.seems_lost = False  # P seems dead
        self.cancelled_at = 0.0
        self.writing_at: float | None = None
        self.arrived: set[int] = set()
        self.timings = m.Timings()
        self.moved_tokens = 0  # once it is DONE

    @property
    def is_uncomputed(self) -> bool:
        """Whether no P has computed the prompt, as far as is known, and one may."""
        return not self.state.ended and self.writing_at is None and not self.arrived

    @property
    def doubted_at(self) -> float:
        """From when on it is in doubt whether the fence will come down by P's word; infinite: not as it stands."""
        if not (self.fenced and self.is_elsewhere):
            return NEVER
        if self.unproven or self.seems_lost:
            return LONG_AGO
        return self.cancelled_at + DOUBT_S if self.state.ended else NEVER

    def job(self, now: float, address: str, cached_tokens: int, avoid: tuple[str, ...]) -> m.Job:
        """What a P has to do. `address` is that of this engine, of whose prefix hit these are the tokens."""
        return m.Job(self.attempt, address, self.token_ids, cached_tokens, max(0.0, self.deadline - now), avoid=avoid,
                     priority=self.priority, scope=self.scope)

    def grant(self, now: float, lease_s: float) -> m.Grant:
        """What its P is sent, which counts as sent now."""
        if self.media:
            self.media_sent_at = now
            self.media_sends += 1
        return m.Grant(self.attempt, self.claim, self.block_ids, self.cached_blocks, lease_s, self.media,
                       self.next_token)

    def measured(self, theirs: m.Timings) -> m.Timings:
        """P's part of the timings, and ours."""
        return msgspec.structs.replace(theirs, queue_s=self.timings.queue_s, measured=True)

    def set_next_cancel(self, now: float, limits: DecodeLimits) -> None:
        """P is asked to stop now. If it is unproven, P has said all that it ever will, and is not asked again."""
        if self.unproven:
            self.next_cancel = NEVER
            return
        self.cancel_retry_s = min(limits.cancel_retry_max_s, 2 * self.cancel_retry_s or limits.claim_retry_s / 4)
        self.next_cancel = now + self.cancel_retry_s

    def due(self, broker_lost_at: float | None, ttl_s: float) -> float:
        """When there is next something to do about it. `broker_lost_at`: since when there is no broker."""
        if self.state is AttemptState.QUEUED:
            lost = [self.waited_from(at) + ttl_s for at in (broker_lost_at, self.peers_lost_at) if at is not None]
            return min(self.deadline, self.next_put, *lost)
        return min(self.deadline, self.lease_until) if self.state is AttemptState.GRANTED else self.next_cancel

    def waited_from(self, lost_at: float) -> float:
        """Since when it has waited for what was lost then."""
        return max(lost_at, self.submitted)

    def debug_state(self) -> dict[str, Any]:
        """For `DecodeProtocol.debug_state`."""
        return {"state": self.state, "peer": self.peer if self.fenced else "", "claim": self.claim,
                "arrived": sorted(self.arrived), "measured": self.timings.measured, "lease_until": self.lease_until,
                "next_cancel": self.next_cancel}

    def bring_forward(self, until: float, lease: bool) -> None:
        """For `DecodeProtocol.bring_forward`."""
        if lease:
            self.lease_until = min(self.lease_until, until)
        else:
            self.deadline = min(self.deadline, until)
