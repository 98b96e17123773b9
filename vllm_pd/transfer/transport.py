# SPDX-License-Identifier: Apache-2.0
"""What a transport does: move KV blocks into a peer's cache and tell the peer when they are there.

A transport belongs to one worker and is used by one thread at a time. Nothing blocks for longer than handing the work
to the hardware takes. Life of a write: `write` posts it; `poll` reports its one `Finished`; from then on the key is
free again and the handle released. `cancel` and `drop_peer` turn that end into a failure, but it is reported only when
no byte of the write can land any more: the peer reuses its blocks on that word. A read lives just so.
"""
from __future__ import annotations

import zlib
from typing import Annotated, Protocol

import msgspec

from vllm_pd.errors import TransferError
from vllm_pd.rpc.codec import UNREADABLE
from vllm_pd.transfer.layout import CacheDescription
from vllm_pd.transfer.requests import Finished, Notice

MAX_RANKS = 64  # tensor-parallel ranks of one engine


class PeerMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What travels to a peer: who we are, how to reach our memory, and what lies where in it."""
    name: str
    agent: bytes  # the library's own metadata
    cache: CacheDescription

    def encode(self) -> bytes:
        """The message, behind a checksum.

        Addresses are made from it, and NIXL loads the intact head of damaged metadata and then refuses the right one
        under that name, so damage must be seen before anything is used.
        """
        body = msgspec.msgpack.encode(self)
        return zlib.crc32(body).to_bytes(4, "big") + body

    @classmethod
    def decode(cls, name: str, metadata: bytes) -> PeerMetadata:
        """Read what the peer called `name` sent. Raises TransferError."""
        body = metadata[4:]
        if metadata[:4] != zlib.crc32(body).to_bytes(4, "big"):
            raise TransferError(f"metadata of peer {name} is damaged")
        try:
            peer = msgspec.msgpack.decode(body, type=cls)
        except UNREADABLE as error:
            raise TransferError(f"metadata of peer {name} can't be read: {error}") from error
        if peer.name != name:
            raise TransferError(f"metadata of peer {name} belongs to {peer.name}")
        return peer


class RanksMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What an engine gives its peers: the metadata of each of its tensor-parallel ranks, in order."""
    ranks: Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, name: str, metadata: bytes) -> RanksMetadata:
        """Read what the engine called `name` sent. Raises TransferError."""
        try:
            return msgspec.msgpack.decode(metadata, type=cls)
        except UNREADABLE as error:
            raise TransferError(f"metadata of peer {name} can't be read: {error}") from error


def rank_name(engine: str, rank: int) -> str:
    """The transport name of one rank of an engine."""
    return f"{engine}/{rank}"


class Progress(msgspec.Struct):
    """What happened at a transport since it was last polled."""
    finished: list[Finished]
    notices: list[Notice]


class Transport(Protocol):
    """One rank's end of the KV transfer."""

    def metadata(self) -> bytes:
        """What a peer must be given to write into our cache."""

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        """Get ready to write to the peer called `name`. Again with the same metadata: nothing happens.

        With `heads` writes carry only those KV heads; where it is empty they carry nothing but their notice.
        Raises TransferError or PeerMismatch; the transport is then as before.
        """

    def drop_peer(self, name: str) -> None:
        """Forget a peer. Its open writes end as not ok, when they end. An unknown name is no error."""

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int],
              notice: bytes) -> None:
        """Post a write of our blocks into the peer's, pairwise. `notice` reaches the peer after the data; an empty one
        is not sent.

        Without blocks only the notice is sent. Raises TransferError, with nothing written, when the peer is not known,
        the key is in use or a block id is out of range.
        """

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        """Post a read of the peer's blocks into ours, pairwise. Ends, and fails to start, as a write does. The peer
        takes no part in it and must keep the blocks as they are."""

    def cancel(self, key: str) -> None:
        """Ask for an early end of a write or a read. An unknown key is no error: it has ended already."""

    def is_open(self, key: str) -> bool:
        """Whether a write or a read under this key is posted and has not ended."""

    def poll(self) -> Progress:
        """Make progress and take what has finished and arrived. Never raises for a peer."""

    def live_handles(self) -> int:
        """Transfers that are not released yet."""

    def close(self) -> bool:
        """End everything and release it. The transport is of no use afterwards. Whether no byte can land any more."""
