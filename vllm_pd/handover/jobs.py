# SPDX-License-Identifier: Apache-2.0
"""What the prefill engine's half of a binding knows of a prompt, of a peer's job and of its transfers."""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from vllm_pd.protocol.actions import Prefill
from vllm_pd.protocol.messages import Attempt
from vllm_pd.protocol.rows import BlockRows
from vllm_pd.protocol.writes import AttemptWrites, BlockWrite

STATE_BLOCKS = 2  # of a request in a group with states, beside one for each step in flight: the last, a checkpoint


class JobStage(Enum):
    """What this engine does for a job, which the protocol has as RUNNING or STOPPING (`protocol.jobs.JobState`)."""
    QUEUED = "queued"
    COMPUTING = "computing"
    READING = "reading"
    CHECKING = "checking"  # it is computed; whether by the files that its scope names is yet to be seen
    COMPUTED = "computed"
    SENDING = "sending"


NOT_COMPUTED = (JobStage.QUEUED, JobStage.COMPUTING, JobStage.READING)


@dataclass(kw_only=True)
class PromptInTurn:
    """A prompt that is computed in its turn: a job of a peer, or a client's that is to be kept. `new_tokens`: those of
    its `tokens` that are to be computed, as far as was known when it came. `request` is the engine's own."""
    request_id: str
    started_at: float
    priority: int
    tokens: int
    new_tokens: int
    cached_tokens: int = 0  # when it began: those that were cached here, or worth reading from the peer
    request: Any = None


@dataclass(kw_only=True)
class PeerJob(PromptInTurn):
    """One job of a peer, from its `Prefill` to the end of its last write."""
    prefill: Prefill
    writes: AttemptWrites
    state: JobStage = JobStage.QUEUED
    prefill_s: float = 0.0
    waited_s: float = 0.0  # how long the last write waited for the one before, once the prompt was computed
    cancelled: bool = False
    lost_because: str = ""  # why its request has ended early, while it reads
    read_tokens: int = 0  # how many of the peer's tokens were asked for
    parked_blocks: int = 0  # how many blocks its request has while it reads

    @classmethod
    def of(cls, prefill: Prefill, block_size: int, now: float) -> PeerJob:
        """The job that this event begins."""
        return cls(request_id=f"pd-{prefill.attempt}", started_at=now, priority=prefill.priority,
                   tokens=len(prefill.token_ids), new_tokens=prefill.new_tokens(block_size), prefill=prefill,
                   writes=AttemptWrites(prefill.block_ids))

    @property
    def held_blocks(self) -> int:
        """How many blocks it keeps for what moves."""
        return self.parked_blocks if self.state is JobStage.READING else self.writes.unsent_blocks


class OpenTransfer(NamedTuple):
    """A transfer under way. `write` is None for a read."""
    job: PeerJob
    write: BlockWrite | None


@dataclass(frozen=True)
class PrefillCapacity:
    """The sizes of a prefill engine. `token_bytes` is the KV of one token, over all layers and ranks, `batch_tokens`
    the tokens of one batch, `total_blocks` its KV blocks, `rows` how its layers are grouped, `steps` how many steps
    may be in flight, `draft_blocks` how many blocks a request has for the states of drafts."""
    rows: BlockRows
    vocab_size: int
    ranks: int
    token_bytes: int
    caching: bool
    batch_tokens: int
    total_blocks: int
    steps: int = 1
    draft_blocks: int = 0

    def blocks_of(self, tokens: int) -> int:
        """How many blocks a prompt of so many tokens takes at most while it is computed. A group with a window has
        those of the window and of what the steps in flight compute, one with states those of the last ones and of
        drafts."""
        return self.draft_blocks + sum(self._blocks_of_group(tokens, window, self.rows.size(group))
                                       for group, window in enumerate(self.rows.windows or (0, )))

    def check_room(self, tokens: int, claimed_blocks: int, lasting: int) -> None:
        """Raises ValueError for a prompt of so many tokens that can't have its blocks: `lasting` are set aside until
        transfers or peers have ended, of which it can use `claimed_blocks`."""
        needed, kept_free = self.blocks_of(tokens), 1 + self.total_blocks // 100  # by V0; V1 has one that is nobody's
        if lasting and needed - claimed_blocks > self.total_blocks - lasting - kept_free:
            raise ValueError(f"it needs {needed} blocks, and of {self.total_blocks} {lasting} are set aside until "
                             "transfers or peers have ended")

    def _blocks_of_group(self, tokens: int, window: int, size: int) -> int:
        if window and self.rows.state_tokens:
            return min(-(-tokens // size), STATE_BLOCKS + self.steps)
        return -(-(min(tokens, window + self.steps * self.batch_tokens + size) if window else tokens) // size)


def read_key(attempt: Attempt) -> str:
    """The key of the read for this attempt."""
    return f"read {attempt}"


def write_key(attempt: Attempt, write: BlockWrite) -> str:
    """The key of one of its writes."""
    return str(attempt) if write.is_last else f"chunk {write.number} of {attempt}"
