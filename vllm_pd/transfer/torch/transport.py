# SPDX-License-Identifier: Apache-2.0
"""The torch transport: point to point over gloo of `torch.distributed`, for caches in the memory of the host.

1. Two ranks that exchange KV have a connection of their own: a control socket and a process group of the two, made when
   the sender adds the peer. The rendezvous goes over the control socket. A restarted engine has another name, address
   and token, so its connections are new ones. An error ends a connection, and the next write makes another.
2. It is two-sided. The sender names the grant, the receiver's blocks and the notice over the control socket. The
   receiver answers whether it has granted these blocks, and posts its receives. Addresses come from its own caches.
3. Data go through two staging buffers on each side. So a write needs a copy there and a copy here.
4. A write has ended when the receiver says that all is in its blocks; its notice is seen after that.
5. A write that is cancelled ends with the stage under way, and its connection with it. No wait is endless
   (`LinkLimits`).
6. The end of a write that failed proves nothing: a stopped receiver may hold a part of it. What counts is the
   receiver's own word, `close_grant`: it drops the rest, so it needs nobody's help to have its blocks back.
7. Reads are not possible: the peer would have to take part.
8. Sender and receiver prove to each other that they know the token in the receiver's metadata. gloo has no
   authentication, and nothing is encrypted.
9. NCCL is not used for caches of a GPU: its watchdog ends the process when a peer stops or dies in the middle.
"""
from __future__ import annotations

import os
import time
from collections import deque
from typing import NamedTuple

import msgspec
import torch

from vllm_pd.errors import TransferError
from vllm_pd.rpc.addresses import url_of
from vllm_pd.rpc.codec import UNREADABLE
from vllm_pd.transfer.layout import CacheDescription, Memory
from vllm_pd.transfer.plan import pair_blocks, plan
from vllm_pd.transfer.requests import Finished, Notice
from vllm_pd.transfer.torch.blocks import BlockCopier
from vllm_pd.transfer.torch.link import (
    DEFAULT_LIMITS,
    JOIN_BYTES,
    MAX_UNPROVED_BYTES,
    Begin,
    LinkContext,
    LinkLimits,
)
from vllm_pd.transfer.torch.receiver import WriteReceiver
from vllm_pd.transfer.torch.sender import OutgoingWrite, PeerSender, TorchAddress
from vllm_pd.transfer.transport import PeerMetadata, TransportProgress


class _TorchPeer(NamedTuple):
    """A peer that was added."""
    metadata: bytes
    cache: CacheDescription
    block_bytes: int  # of one block over all lanes
    sender: PeerSender


class _OpenWrite(NamedTuple):
    """A write that has not ended."""
    peer: str
    write: OutgoingWrite
    bytes: int


class TorchTransport:
    """Transport over torch.distributed. `name` must differ from the names of all other transports, past ones included.
    `caches` are the cache tensors, which this object keeps alive; `description` describes them. Its sockets listen at
    the address `host`. With `receives` peers may write into the caches. Raises TransferError for a cache that is not in
    the host's memory, and OSError if it can't listen."""

    needs_polls = False  # it has threads of its own

    def __init__(self, name: str, caches: list[torch.Tensor], description: CacheDescription, host: str,
                 receives: bool = True, limits: LinkLimits = DEFAULT_LIMITS) -> None:
        if description.memory is not Memory.DRAM:
            raise TransferError(f"the torch transport can't carry a cache in {description.memory.name}")
        # What goes to the receivers: the token is not for them.
        self._introduction = PeerMetadata(name, b"", description).encode()
        if len(self._introduction) > MAX_UNPROVED_BYTES - JOIN_BYTES:
            raise TransferError(f"the torch transport can't describe a cache of {len(description.planes)} planes")
        self._caches, self._cache = caches, description
        self._context = LinkContext(host, limits)
        self._notices: deque[Notice] = deque()
        self._ended: deque[tuple[OutgoingWrite, str]] = deque()
        self._finished: list[Finished] = []
        self._peers: dict[str, _TorchPeer] = {}
        self._leaving: list[PeerSender] = []  # dropped, with a write under way
        self._open: dict[str, _OpenWrite] = {}
        self._closed = False
        self._receiver: WriteReceiver | None = None
        address, listens = TorchAddress(host, 0, b""), ()
        if receives:
            token = os.urandom(32)
            self._receiver = WriteReceiver(host, token, caches, description, self._context, self._notices)
            address, listens = TorchAddress(host, self._receiver.port, token), (url_of(host, self._receiver.port), )
        self._metadata = PeerMetadata(name, msgspec.msgpack.encode(address), description, listens).encode()

    def metadata(self) -> bytes:
        """See Transport."""
        return self._metadata

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        """See Transport."""
        self._check_open()
        known = self._peers.get(name)
        if known is not None:
            if known.metadata != metadata:
                raise TransferError(f"peer {name} is known with other metadata; a new incarnation needs a new name")
            return
        theirs = PeerMetadata.decode(name, metadata)
        lanes = plan(self._cache, theirs.cache, heads)
        try:
            address = msgspec.msgpack.decode(theirs.agent, type=TorchAddress)
        except UNREADABLE as error:
            raise TransferError(f"peer {name} has no torch transport: {error}") from error
        if not address.port:
            raise TransferError(f"peer {name} does not receive")
        copier = BlockCopier(self._caches, [lane.ours for lane in lanes], self._cache.num_blocks)
        sender = PeerSender(address, self._introduction, heads, copier, self._context, self._write_ended)
        self._peers[name] = _TorchPeer(metadata, theirs.cache, copier.block_bytes, sender)

    def drop_peer(self, name: str) -> None:
        """See Transport."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            for opened in self._open.values():
                if opened.peer == name:
                    opened.write.error = opened.write.error or "peer dropped"
            peer.sender.close("peer dropped")
            self._leaving = [sender for sender in self._leaving if not sender.join(0.0)] + [peer.sender]

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int], notice: bytes,
              grant: str = "") -> None:
        """See Transport."""
        self._check_open()
        if key in self._open:
            raise TransferError(f"transfer {key} is already open")
        if peer not in self._peers:
            raise TransferError(f"peer {peer} is not known")
        target = self._peers[peer]
        try:
            local, remote = pair_blocks(local_block_ids, remote_block_ids, self._cache, target.cache)
        except ValueError as error:
            raise TransferError(f"transfer {key}: {error}") from error
        if not target.block_bytes:
            local, remote = [], []
        if not (local or notice):
            self._finished.append(Finished(key=key, ok=True))
            return
        write = OutgoingWrite(key, Begin(grant, remote, notice), local)
        self._open[key] = _OpenWrite(peer, write, len(local) * target.block_bytes)
        target.sender.post(write)

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        """See Transport. Always raises TransferError."""
        raise TransferError(f"transfer {key}: the torch transport can't read from a peer")

    def open_grant(self, name: str, block_ids: list[int]) -> None:
        """See Transport."""
        if self._receiver is not None and not self._closed:
            self._receiver.grants.open(name, block_ids)

    def close_grant(self, name: str) -> bool:
        """See Transport. Always True."""
        if self._receiver is not None:
            self._receiver.grants.close(name)
        return True

    def cancel(self, key: str) -> None:
        """See Transport."""
        opened = self._open.get(key)
        if opened is not None:
            opened.write.error = opened.write.error or "cancelled"

    def is_open(self, key: str) -> bool:
        """See Transport."""
        return key in self._open

    def poll(self) -> TransportProgress:
        """See Transport."""
        finished, self._finished = self._finished, []
        while self._ended:
            write, error = self._ended.popleft()
            opened = self._open.pop(write.key, None)
            if opened is None:  # ended by `close`
                continue
            error = write.error or error
            finished.append(Finished(key=write.key, ok=not error, bytes=0 if error else opened.bytes,
                                     seconds=time.monotonic() - write.started_s, error=error))
        notices: list[Notice] = []
        while self._notices:
            notices.append(self._notices.popleft())
        return TransportProgress(finished=finished, notices=notices)

    def renew(self, name: str) -> bytes:
        """See Transport. Always raises."""
        raise TransferError("the transport torch has one generation: its receiver closes grants by itself")

    def retire(self, key: str) -> None:
        """See Transport. There are no older ones."""
        self._finished.append(Finished(key, ok=True))

    def live_handles(self) -> int:
        """See Transport."""
        return len(self._open)

    def debug_state(self) -> dict[str, int]:
        """For tests alone: how many senders are connected to this transport, and how many of them are unproved."""
        if self._receiver is None:
            return {"connections": 0, "unproved": 0}
        return {"connections": self._receiver.connections(), "unproved": self._receiver.unproved()}

    def close(self, timeout_s: float = 1.0) -> bool:
        """Wait up to `timeout_s` for the writes under way, then release everything. A second call changes nothing.

        Returns False if a write was still under way.
        """
        if self._closed:
            return True
        self._closed = True
        if self._receiver is not None:
            self._receiver.close()
        for name in list(self._peers):
            self.drop_peer(name)
        deadline_s = time.monotonic() + timeout_s
        for end in (lambda sender: None, PeerSender.abort):
            for sender in self._leaving:
                end(sender)
                sender.join(deadline_s - time.monotonic())
            deadline_s = time.monotonic() + timeout_s
        ended = all(sender.join(0.0) for sender in self._leaving)
        self._finished += self.poll().finished + [
            Finished(key=key, ok=False, error="closed") for key in self._open]
        self._open.clear()
        self._leaving.clear()
        return ended

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("the transport is closed")

    def _write_ended(self, write: OutgoingWrite, error: str) -> None:
        """Called in the thread of a sender."""
        self._ended.append((write, error))
