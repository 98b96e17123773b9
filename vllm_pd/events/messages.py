# SPDX-License-Identifier: Apache-2.0
"""The messages on the wire: vLLM's KV events, unchanged, and our own messages on the side socket.

The events are those of vLLM V1 (`vllm.distributed.kv_events`), defined here again so that a reader needs no vLLM: as
arrays, with the fields of 0.9.2 to 0.23. Later releases write maps; `vllm_pd.events.formats` reads both. Our V0 engines
write the same fields and omit trailing ones with their defaults. An engine's block hashes are valid only within one
life of that engine.

On the side socket a frame is two bytes of magic, one of version, and one message. A subscriber sends `Subscribe` every
`SUBSCRIBE_S`. It then gets an `EngineReport` at each change of the load and at least every `REPORT_S`. `SnapshotPart`s
answer a `SnapshotRequest`. Every message of an engine names its *epoch*, one life of its publisher, and the number of
the next batch of events: so a subscriber notices a lost batch even where no other batch follows.
"""
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from vllm_pd.protocol.messages import Count, Name
from vllm_pd.rpc.codec import BadFrame, FrameFault, Framing

PROTOCOL = 1
REPORT_MIN_S = 0.1  # the least time between two reports
REPORT_S = 0.5  # the longest time between two reports
SUBSCRIBE_S = 1.0  # how often a subscriber sends `Subscribe`
SUBSCRIPTION_S = 5.0  # how long a `Subscribe` is valid
PART_BLOCKS = 1024  # at most, in one `SnapshotPart`

Hash = int | bytes
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"):
    """Consecutive blocks of one prompt that can be prefix hits from now on. `parent_block_hash` is the hash of the
    block before the first one, None where the first one begins a prompt. `token_ids` are those of all blocks,
    `block_size` for each.

    `extra_keys` is what else the hashes depend on; such blocks are hits only for requests with the same extras. vLLM
    gives one list, or None, for each block; our V0 engines give integers that hold for all blocks. `group_idx` is the
    engine's KV cache group: a hybrid model has several, each with its own block for the same tokens.
    """
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[TokenId]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    lora_id: int | None = None
    medium: str | None = None  # None: the GPU's memory, the only one that V0 announces
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    locality: ClassVar[None] = None
    lookahead_token_ids: ClassVar[None] = None
    counted: ClassVar[bool] = True  # a block that is stored twice must be removed twice


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockRemoved"):
    """Blocks that can't be prefix hits any more."""
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: ClassVar[None] = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    """No block can be a prefix hit any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The changes of one step of an engine. `ts` is the engine's wall clock, in seconds."""
    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load of an engine. The first six fields count requests: running, waiting, swapped out, parked while a peer
    prefills them, finished prefills whose KV is being sent, and attempts that are over while a peer may still write.
    The next three count the blocks of the last three. `used_blocks` are those that a request holds; blocks that are
    only kept as prefix cache are free. `queued_prefill_tokens` are the prompt tokens still to be computed here, prefix
    hits not deducted."""
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
    """To the engine: send reports for the next `SUBSCRIPTION_S`."""


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the engine: send all blocks. Each part of the answer carries `number`. A new request ends the answer to an
    older one."""
    number: Count


class EngineReport(msgspec.Struct, frozen=True, array_like=True, tag="Pulse"):
    """From the engine to its subscribers: its epoch, the number of its next batch, its block size and load."""
    epoch: Name
    next_seq: Count
    block_size: Count
    load: EngineLoad


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True, tag="Snapshot"):
    """From the engine: a part of its blocks, as they are after the batches before `next_seq`. `first_block` is the
    number of blocks in earlier parts; the last part reaches `total_blocks`."""
    number: Count
    epoch: Name
    next_seq: Count
    first_block: Count
    total_blocks: Count
    runs: list[BlockStored]


Message = Subscribe | SnapshotRequest | EngineReport | SnapshotPart


def life_of(epoch: str) -> str:
    """The engine's life to which this epoch belongs. After an unexpected error an engine begins a new epoch in the same
    life."""
    return epoch.partition("-")[0]


_framing = Framing(b"PE", PROTOCOL, Message, "side protocol")

encode = _framing.encode


def decode(frames: Sequence[bytes]) -> Message:
    """The message in these frames from a side socket, without a routing id. Raises BadFrame for anything else."""
    message = _framing.decode(frames)
    if isinstance(message, SnapshotPart):
        for run in message.runs:
            _check(run)
    return message


def _check(run: BlockStored) -> None:
    if not fits(run):
        raise BadFrame(FrameFault.CONTENT, misfit(run))


def fits(run: BlockStored) -> bool:
    """Whether the run has the right number of tokens for its blocks."""
    return len(run.token_ids) == len(run.block_hashes) * run.block_size


def misfit(run: BlockStored) -> str:
    """The error text for a run that does not fit."""
    return f"{len(run.block_hashes)} blocks of {run.block_size} tokens can't have {len(run.token_ids)} tokens"
