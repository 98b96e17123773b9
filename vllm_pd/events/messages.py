# SPDX-License-Identifier: Apache-2.0
"""What travels: upstream's KV events, as they are, and our own messages on the side socket.

The events are vLLM's V1 ones (`vllm.distributed.kv_events`), written down here again so that a reader of them needs no
vLLM: as arrays, with the fields that they had from 0.9.2 to 0.23. Later releases write maps (`vllm_pd.events.formats`
reads both). What our V0 engines write has the same fields, and leaves those out that say nothing. An engine's block
hashes mean something within one life of that engine only.

On the side socket a frame is two bytes of magic, one of version, and one message. A subscriber sends `Subscribe` every
`SUBSCRIBE_S`. It then gets an `EngineReport` at each change of the load and at least every `REPORT_S`. `SnapshotPart`s
answer a `SnapshotRequest`. Every message of an engine names its *epoch*, one life of its publisher, and the number of
the next batch of events: so a subscriber notices a lost batch even where no other batch follows.
"""
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from vllm_pd.core.messages import Count, Name
from vllm_pd.rpc.codec import BadFrame, FrameFault, Framing

PROTOCOL = 1
REPORT_MIN_S = 0.1  # no two pulses come closer together
REPORT_S = 0.5  # nor further apart
SUBSCRIBE_S = 1.0  # how often a subscriber says that it is there
SUBSCRIPTION_S = 5.0  # for how long it is believed
PART_BLOCKS = 1024  # of a snapshot in one message, at most
MAX_BATCH_EVENTS = 1_000_000

Hash = int | bytes
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"):
    """Consecutive blocks of one prompt that have become prefix hits. `parent_block_hash` is that of the block before
    the first, None where the first begins a prompt. `token_ids` are those of all the blocks, `block_size` each.

    `extra_keys` is whatever else has gone into the hashes; such blocks are hits for requests with the same extras only.
    vLLM gives one list, or None, for each block; our V0 engines give integers that hold for all the blocks. `group_idx`
    is the engine's KV cache group: a hybrid model has several, each with a block of its own for the same tokens.
    """
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[TokenId]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    lora_id: int | None = None
    medium: str | None = None  # None: the device's memory, the only one that V0 announces
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    locality: ClassVar[None] = None
    lookahead_token_ids: ClassVar[None] = None
    counted: ClassVar[bool] = True  # a block that is stored twice is there twice, and is removed twice


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockRemoved"):
    """Blocks that are no prefix hits any more."""
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: ClassVar[None] = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    """No block is a prefix hit."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step of an engine has changed. `ts` is the engine's wall clock, in seconds."""
    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """How busy an engine is. The first six count requests: being computed, not begun, swapped out, parked while a peer
    prefills them, finished and held until they were sent, and given up while a peer may still write. `used_blocks` are
    those that somebody holds: what is only kept as prefix cache is free. `queued_prefill_tokens` are the prompt tokens
    that are still to be computed here, before prefix hits."""
    running: Count = 0
    waiting: Count = 0
    swapped: Count = 0
    remote_prefilling: Count = 0
    sending: Count = 0
    quarantined: Count = 0
    parked_blocks: Count = 0
    sending_blocks: Count = 0
    quarantined_blocks: Count = 0
    used_blocks: Count = 0
    total_blocks: Count = 0
    queued_prefill_tokens: Count = 0


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the engine: pulses, please, for `SUBSCRIPTION_S`."""


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the engine: all blocks, please. `number` comes back in each part of the answer; a new request ends an old
    one's answer."""
    number: Count


class EngineReport(msgspec.Struct, frozen=True, array_like=True, tag="Pulse"):
    """From the engine, unasked."""
    epoch: Name
    next_seq: Count
    block_size: Count
    load: EngineLoad


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True, tag="Snapshot"):
    """From the engine: one part of its blocks as the batches before `next_seq` have left them. `first_block` says how
    many came in the parts before; the last part is the one that reaches `total_blocks`."""
    number: Count
    epoch: Name
    next_seq: Count
    first_block: Count
    total_blocks: Count
    runs: list[BlockStored]


Message = Subscribe | SnapshotRequest | EngineReport | SnapshotPart


def life_of(epoch: str) -> str:
    """The engine's life that this epoch is of. It begins a new epoch in the same life where it has stumbled."""
    return epoch.partition("-")[0]


_framing = Framing(b"PE", PROTOCOL, Message, "side protocol")

encode = _framing.encode


def decode(frames: Sequence[bytes]) -> Message:
    """What a side socket gave, without its routing id. Raises BadFrame for anything that is no message of ours."""
    message = _framing.decode(frames)
    if isinstance(message, SnapshotPart):
        for run in message.runs:
            _check(run)
    return message


def _check(run: BlockStored) -> None:
    if not fits(run):
        raise BadFrame(FrameFault.CONTENT, misfit(run))


def fits(run: BlockStored) -> bool:
    """Whether it has as many tokens as its blocks."""
    return len(run.token_ids) == len(run.block_hashes) * run.block_size


def misfit(run: BlockStored) -> str:
    """What to say where it does not."""
    return (f"{len(run.block_hashes)} blocks of {run.block_size} tokens can't have {len(run.token_ids)} tokens")
