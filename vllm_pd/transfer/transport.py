# SPDX-License-Identifier: Apache-2.0
"""The interface of a transport: it moves KV blocks into a peer's cache and notifies the peer afterwards.

A transport belongs to one worker, and one thread at a time uses it. No method blocks for longer than it takes to hand
the work to the hardware. Life of a write: `write` posts it, and `poll` reports its one `Finished`. After that its
handle is released and its key may be used again. `cancel` and `drop_peer` turn that end into a failure. But the failure
is reported only when no more bytes of the write will land, because the peer then reuses its blocks. An error of the
library does not prove that. The end of such a write says so (`Finished.may_land`), and the transport refuses further
transfers with this peer until it was dropped and added again. The life of a read is the same.

So it is with one-sided writes (NIXL), where only the sender knows. In a two-sided transport (torch) the receiver puts
the bytes into its blocks by itself. There the end of a write that failed proves nothing, and the receiver asks its own
end (`close_grant`) before it reuses blocks.
"""
from __future__ import annotations

import zlib
from typing import Annotated, Protocol

import msgspec

from vllm_pd.errors import TransferError
from vllm_pd.rpc.codec import UNREADABLE
from vllm_pd.transfer.layout import CacheDescription
from vllm_pd.transfer.requests import Finished, Notice

MAX_RANKS = 64  # of one engine, over all pipeline stages


class PeerMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs to know of one rank: its name, how to reach its memory, and the layout of its cache. `listens`:
    at which addresses of TCP, as far as it does. `identity`: where it has what proves its name
    (`transfer.nixl.identity`). Of an older release they are empty and 0."""
    name: str
    agent: bytes  # the library's own metadata
    cache: CacheDescription
    listens: tuple[str, ...] = ()
    identity: int = 0

    def encode(self) -> bytes:
        """A CRC-32 and the message.

        Addresses are computed from it. And if it is damaged, NIXL loads the intact part and then refuses the correct
        metadata under that name. So damage must be found before anything is used.
        """
        body = msgspec.msgpack.encode(self)
        return zlib.crc32(body).to_bytes(4, "big") + body

    @classmethod
    def decode(cls, name: str, metadata: bytes) -> PeerMetadata:
        """The metadata that the peer called `name` has sent. Raises TransferError."""
        peer = cls.decode_any(metadata, name)
        if peer.name != name:
            raise TransferError(f"metadata of peer {name} belongs to {peer.name}")
        return peer

    @classmethod
    def decode_any(cls, metadata: bytes, name: str = "of any name") -> PeerMetadata:
        """The metadata of a peer whose name is not known before. Raises TransferError; `name` is for its message."""
        body = metadata[4:]
        if metadata[:4] != zlib.crc32(body).to_bytes(4, "big"):
            raise TransferError(f"metadata of peer {name} is damaged")
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except UNREADABLE as error:
            raise TransferError(f"metadata of peer {name} can't be read: {error}") from error


class RanksMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What an engine sends to its peers: the `PeerMetadata` of each of its ranks, stage by stage."""
    ranks: Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]

    def encode(self) -> bytes:
        """The message in msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, name: str, metadata: bytes) -> RanksMetadata:
        """The metadata that the engine called `name` has sent. Raises TransferError."""
        try:
            return msgspec.msgpack.decode(metadata, type=cls)
        except UNREADABLE as error:
            raise TransferError(f"metadata of peer {name} can't be read: {error}") from error


def kv_addresses(metadata: bytes) -> list[str]:
    """Where an engine, or a rank, with this metadata listens for KV by TCP. Empty where it does not say."""
    try:
        ranks = RanksMetadata.decode("of any name", metadata).ranks
    except TransferError:
        ranks = [metadata]
    try:
        return [address for rank in ranks for address in PeerMetadata.decode_any(rank).listens]
    except TransferError:
        return []


def rank_name(engine: str, rank: int) -> str:
    """The transport name of one rank of an engine."""
    return f"{engine}/{rank}"


class TransportProgress(msgspec.Struct):
    """What has happened at a transport since the last poll. `unseen`: a notice was sent without data. Nobody can see
    whether it has left, so poll on for a while."""
    finished: list[Finished]
    notices: list[Notice]
    unseen: bool = False


class Transport(Protocol):
    """One rank's end of the KV transfer. Block ids count from 0 in the rank's own cache. `needs_polls`: whether data
    moves only while `poll` runs, so that a rare `poll` is a slow transfer."""

    needs_polls: bool

    def metadata(self) -> bytes:
        """The metadata that a peer needs to write into our cache."""

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        """Prepare transfers with the peer called `name`. A second call with the same metadata changes nothing.

        `heads` limits writes to those KV heads of the model; with an empty range they carry only their notice. Raises
        TransferError or PeerMismatch; then the transport is unchanged.
        """

    def drop_peer(self, name: str) -> None:
        """Forget a peer. Its open transfers end with `ok` false, when they end. An unknown name is no error."""

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int], notice: bytes,
              grant: str = "") -> None:
        """Post a write of our blocks into the peer's, pairwise. `notice` reaches the peer after the data. An empty one
        is not sent. A two-sided peer takes it only under a `grant` that it has open.

        Without blocks only the notice is sent. Raises TransferError if the peer is not known, the key is in use or a
        block id is out of range. Then nothing is written.
        """

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        """Post a read of the peer's blocks into ours, pairwise. It ends, and raises, as a write does. The peer takes no
        part in it and must keep the blocks unchanged."""

    def open_grant(self, name: str, block_ids: list[int]) -> None:
        """Let peers write these blocks under this name. A one-sided transport lets them anyway."""

    def close_grant(self, name: str) -> bool:
        """Receive nothing more under this name, from now on for ever. Returns whether no more bytes land in its blocks.
        A one-sided transport returns False: only its peers know. Does not block for longer than a copy of one stage."""

    def cancel(self, key: str) -> None:
        """Request an early end of a write or a read. An unknown key is no error: that transfer has already ended."""

    def is_open(self, key: str) -> bool:
        """Whether a write or a read with this key is posted and has not ended."""

    def poll(self) -> TransportProgress:
        """Make progress. Returns the ends and notices since the last poll. No peer can make it raise."""

    def renew(self, name: str) -> bytes:
        """Begin a new generation over the same memory, under this name, for all that is posted from now on. Returns its
        metadata. Raises TransferError; then nothing has changed. A two-sided transport has one generation, and always
        raises: its receiver needs no other."""

    def retire(self, key: str) -> None:
        """Destroy the older generations. `poll` reports the end, with this key; before it the ends of what was open in
        them."""

    def live_handles(self) -> int:
        """How many transfers have not been released."""

    def close(self) -> bool:
        """End and release everything. The transport can't be used afterwards. Returns whether it is certain that no
        more bytes will land."""
