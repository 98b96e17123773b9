# SPDX-License-Identifier: Apache-2.0
"""What `vllm_pd.handover.decode` knows of its prompts and their attempts, and of its engine."""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_pd.protocol.messages import Attempt
from vllm_pd.protocol.rows import BlockRows


@dataclass
class RemoteRequest:
    """A request that was decided about. Times are those of the monotonic clock, `resumed_at` that of the wall clock."""
    stays: bool = False  # it is not asked about again
    began_at: float | None = None  # its first attempt
    parked_at: float = 0.0  # the last time
    resumed_at: float | None = None  # scheduled again with its KV
    attempts: int = 0
    failed_peers: tuple[str, ...] = ()
    arrived: bool = False  # a peer has computed it once
    hold_settled: bool = False  # the hold that it names is claimed, or not wanted
    hold: Attempt | None = None  # to be claimed when it is parked
    metaserver: str | None = None  # where the job of its present attempt is posted

    def time_left_s(self, now: float, deadline_s: float) -> float:
        """Of the time that all its attempts together may take."""
        return deadline_s - (now - self.began_at if self.began_at is not None else 0.0)


class AttemptStage(Enum):
    """What became of an attempt here."""
    PARKED = "parked"  # its request is parked, and waits for a peer
    FAILED = "failed"  # it has ended without the KV; its request is parked until its turn
    LEFT = "left"  # its request was aborted or waits again


@dataclass
class RemoteAttempt:
    """An attempt with `blocks` set aside for it, beyond its prefix hit, until they may be reused. A peer is to compute
    so many `tokens`."""
    request: RemoteRequest
    blocks: int
    tokens: int
    stage: AttemptStage = AttemptStage.PARKED
    released: bool = False  # no peer will write the blocks any more, but its request has them still

    @property
    def is_given_up(self) -> bool:
        """Whether its request will not get the KV by it, and has not been given back to the scheduler."""
        return self.stage is AttemptStage.FAILED or self.released


@dataclass(frozen=True)
class DecodeCapacity:
    """The sizes of a decode engine: those of its groups of blocks, blocks in all, seats, and the tokens of a batch."""
    rows: BlockRows
    total_blocks: int
    total_requests: int
    batch_tokens: int

    @property
    def block_size(self) -> int:
        """The tokens of a block."""
        return self.rows.block_size
