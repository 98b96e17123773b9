# SPDX-License-Identifier: Apache-2.0
"""Actions of the protocol: what its two halves answer with, events for the engine and messages to put on the wire.

The order in which a half returns them is the order in which they are to be done.
"""
from enum import StrEnum
from typing import get_args

import msgspec

from vllm_pd.protocol.messages import Attempt, Job, Message, Timings
from vllm_pd.protocol.scope import NO_SCOPE, PromptScope


class AttemptEnd(StrEnum):
    """How an attempt ended."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class FallbackReason(StrEnum):
    """Why an attempt ended without the KV."""
    BROKER = "broker"  # the queue can't be reached
    QUEUE = "queue"  # the queue is full
    PEER = "peer"  # there is no prefill engine, or the one that had it died
    FAILED = "failed"  # the prefill engine gave it up
    LEASE = "lease"  # the prefill engine fell silent
    DEADLINE = "deadline"  # it took too long
    FEATURE = "feature"  # the job can't be put on the wire
    CONTROL = "control"  # the control thread has ended
    HOLD = "hold"  # the prefill engine does not hold the prompt, or no more

    @property
    def another_may_help(self) -> bool:
        """Whether the cause lies with the prefill engine that had it, so that another one is worth an attempt."""
        return self in (FallbackReason.PEER, FallbackReason.FAILED, FallbackReason.LEASE, FallbackReason.HOLD)


class Prefilled(msgspec.Struct, frozen=True):
    """D: all blocks of the attempt hold their KV, and no peer will write them again. Where `timings.measured` is not
    set, P's part follows in a `Timed`. `peer` is the P that wrote `tokens` of the prompt; of a hold that was read it is
    empty."""
    attempt: Attempt
    timings: Timings
    peer: str = ""
    tokens: int = 0


class Timed(msgspec.Struct, frozen=True):
    """D: the timings of an attempt whose `Prefilled` came before P's message did. May never come. As `Prefilled`."""
    attempt: Attempt
    timings: Timings
    peer: str = ""
    tokens: int = 0


class Fallback(msgspec.Struct, frozen=True):
    """D: the attempt ended without the KV. The request needs fresh blocks; those of the attempt stay set aside until
    its `Released`. `peer` is the P that had the grant, empty where none had."""
    attempt: Attempt
    reason: FallbackReason
    outcome: AttemptEnd
    detail: str = ""
    peer: str = ""


class Released(msgspec.Struct, frozen=True):
    """D: nobody will write the attempt's blocks any more; they may be reused. Follows every end but DONE."""
    attempt: Attempt


class ReadHold(msgspec.Struct, frozen=True):
    """D: read these blocks of P, which keeps them, into our own, pairwise; call `read_ended` when no byte of the read
    can land any more. `peer` is P's transport name (`names`), `metadata` says how P's memory is reached."""
    attempt: Attempt
    peer: str
    metadata: bytes
    block_ids: list[int]
    remote_block_ids: list[int]


class StopRead(msgspec.Struct, frozen=True):
    """D: the read of this attempt is not wanted any more; `read_ended` is still waited for."""
    attempt: Attempt


class Prefill(msgspec.Struct, frozen=True):
    """P: prefill this prompt. `block_ids` are D's blocks to write, in order; `cached_blocks` whole blocks come before
    them in D's cache, and `cached_block_ids` says where. `peer` is D's transport name (`names`), added by an earlier
    `AddPeer`. `priority` and `scope` are those of D's request, `media` is the encoded data of each of the scope's
    items, of the size that it says; whether it has the digest is yet to be seen. `next_token`: see `Grant`."""
    attempt: Attempt
    token_ids: list[int]
    block_ids: list[int]
    cached_blocks: int
    cached_block_ids: list[int]
    peer: str
    priority: int = 0
    scope: PromptScope = NO_SCOPE
    media: tuple[bytes, ...] = ()
    next_token: int | None = None

    def new_tokens(self, block_size: int) -> int:
        """Tokens of the prompt that D has not cached; as `Job.new_tokens`."""
        return len(self.token_ids) - self.cached_blocks * block_size


class Cancelled(msgspec.Struct, frozen=True):
    """P: stop this job; call `ended` when no handle of it can write any more."""
    attempt: Attempt


class HoldEnd(StrEnum):
    """Why P does not hold a prompt any more."""
    DONE = "done"  # the D that had claimed it says so
    DROPPED = "dropped"  # D says that it does not want it
    EXPIRED = "expired"  # nobody claimed it in time
    LOST = "lost"  # the D that had claimed it is dead
    CLOSED = "closed"  # nobody had claimed it, and this engine needs its blocks or ends


class HoldEnded(msgspec.Struct, frozen=True):
    """P: nobody reads the blocks of this hold, now or later; they may be reused."""
    hold: Attempt
    end: HoldEnd


class AddPeer(msgspec.Struct, frozen=True):
    """P: a decode engine that may be written to from now on, under this transport name. Comes before any `Prefill` of
    it."""
    name: str
    metadata: bytes


class DropPeer(msgspec.Struct, frozen=True):
    """P: nothing of this decode engine, under this transport name, is open any more. D (`was_read`): nor of this P that
    was read from."""
    name: str
    was_read: bool = False


class RenewTransport(msgspec.Struct, frozen=True):
    """Have every rank make a second transfer agent over the same memory, and use it for all that begins from then on;
    call `renewed`, or `not_renewed`. `name` is this engine's transport name with it."""
    name: str


class RetireTransport(msgspec.Struct, frozen=True):
    """Have every rank destroy its transfer agents but the newest; call `retired` when nothing of them lands, here, or
    is read. What goes on in them ends."""


Event = (Prefilled | Timed | Fallback | Released | Prefill | Cancelled | AddPeer | DropPeer | ReadHold | StopRead
         | HoldEnded | RenewTransport | RetireTransport)


class ToBroker(msgspec.Struct, frozen=True):
    """Send to the broker."""
    message: Message


class ToPrefill(msgspec.Struct, frozen=True):
    """Send to a prefill engine, over the connection that it opened."""
    peer: str
    message: Message


class ToDecode(msgspec.Struct, frozen=True):
    """Send to a decode engine, over the connection that `Connect` opened."""
    peer: str
    message: Message


class Connect(msgspec.Struct, frozen=True):
    """Open a connection to a decode engine, unless there is one. `is_elsewhere`: it is known to be on another machine,
    so the connection is to be given up when it is silent."""
    peer: str
    address: str
    is_elsewhere: bool = False


class Disconnect(msgspec.Struct, frozen=True):
    """Close it."""
    peer: str


class PostJob(msgspec.Struct, frozen=True):
    """D: post this job to the metaserver at `url`, for the request that its proxy knows as `request_id`."""
    url: str
    request_id: str
    job: Job


class StopPost(msgspec.Struct, frozen=True):
    """D: the post of this attempt, which has ended, is not wanted any more; after `after_s`, if it is open then."""
    attempt: Attempt
    after_s: float = 0.0


Action = Event | ToBroker | ToPrefill | ToDecode | Connect | Disconnect | PostJob | StopPost
EVENTS = get_args(Event)
