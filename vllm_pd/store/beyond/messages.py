# SPDX-License-Identifier: Apache-2.0
"""What two hosts say to each other about blocks. Each question has a number, which is the reader's and comes back with
the answer; an answer with any other number means nothing.

    reader                                server
    FindBlocks(names)                ->
                                     <-   FoundBlocks: so many of the first names are all there
    SendBlocks(names, addresses)     ->
                                          writes over NIXL, into the reader's staging memory
                                     <-   SentBlocks: the checksums of what has been written, none where nothing was

A block has a part for each rank, which all have one length. Parts are counted, and named, block by block, and within a
block in the order of the models.
"""
from __future__ import annotations

from typing import Annotated

import msgspec

from vllm_pd.protocol.values import Count
from vllm_pd.rpc.codec import Framing
from vllm_pd.store.blocks import MODEL_BYTES, NAME_BYTES

PROTOCOL = 1
MAX_NAMES = 1024  # in one question
MAX_MODELS = 64
MAX_PARTS = 4096  # in one SendBlocks
MAX_AGENT_BYTES = 1 << 16
MAX_BYTES = 1 << 18  # of one frame

Model = Annotated[bytes, msgspec.Meta(min_length=MODEL_BYTES, max_length=MODEL_BYTES)]
BlockName = Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
Models = Annotated[tuple[Model, ...], msgspec.Meta(min_length=1, max_length=MAX_MODELS)]
BlockNames = Annotated[tuple[BlockName, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMES)]
Address = Annotated[int, msgspec.Meta(ge=0)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]
AgentName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class FindBlocks(msgspec.Struct, array_like=True, frozen=True, tag="find"):
    """How many of the first `names` are whole at the server: every model's part, of `length` bytes?"""
    number: Count
    length: Count
    models: Models
    names: BlockNames


class FoundBlocks(msgspec.Struct, array_like=True, frozen=True, tag="found"):
    """So many."""
    number: Count
    blocks: Count


class SendBlocks(msgspec.Struct, array_like=True, frozen=True, tag="send"):
    """Write the parts of these blocks to these addresses, one for each part, of the NIXL agent with that name and
    metadata. `identity`: where that agent has the bytes that prove it (`vllm_pd.transfer.nixl.identity`)."""
    number: Count
    length: Count
    models: Models
    names: BlockNames
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]
    agent_name: AgentName
    agent: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_AGENT_BYTES)]
    identity: Address


class SentBlocks(msgspec.Struct, array_like=True, frozen=True, tag="sent"):
    """The parts of the first blocks have landed; the checksum of each, as the server's headers have them."""
    number: Count
    checksums: Annotated[tuple[Checksum, ...], msgspec.Meta(max_length=MAX_PARTS)]


Question = FindBlocks | SendBlocks
Reply = FoundBlocks | SentBlocks
questions: Framing[Question] = Framing(b"PS", PROTOCOL, Question, "store protocol", MAX_BYTES)
replies: Framing[Reply] = Framing(b"PS", PROTOCOL, Reply, "store protocol", MAX_BYTES)
