# SPDX-License-Identifier: Apache-2.0
"""The receiving end of the torch transport: grants, a listening socket, and one thread for each connection.

A thread receives a write in stages into its own two buffers, and copies each stage into the blocks that the sender has
named, if they belong to a grant that is open at that moment. The copy holds the grant's lock. So when `Grants.close`
has returned, no byte lands in those blocks any more, whatever is still on its way. The rest of such a write is received
and dropped, so that the connection can be used again.
"""
from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import torch

from vllm_pd.errors import PDError, TransferError
from vllm_pd.transfer.layout import CacheDescription
from vllm_pd.transfer.plan import plan
from vllm_pd.transfer.requests import Notice
from vllm_pd.transfer.torch.blocks import BlockCopier
from vllm_pd.transfer.torch.group import PairGroup, make_group
from vllm_pd.transfer.torch.link import (
    MAX_UNPROVED_BYTES,
    Begin,
    BeginReply,
    Challenge,
    ControlConnection,
    Join,
    Joined,
    Landed,
    LinkContext,
    StoreKey,
    is_proof,
    prove,
)
from vllm_pd.transfer.transport import PeerMetadata

logger = logging.getLogger("vllm.pd")

KEPT_CLOSED = 4096  # grants that are known to be closed
MAX_CONNECTIONS = 256
CLOSE_S = 1.0
MAX_NOTICE_BYTES = 64 << 10
MAX_NOTICES = 4096  # that the engine has not taken


class _Grant:
    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = frozenset(block_ids)
        self.lock = threading.Lock()
        self.open = True

    def apply(self, copy: Callable[[], None]) -> bool:
        """Run the copy if the grant is open. Returns whether it was."""
        with self.lock:
            if self.open:
                copy()
            return self.open


class Grants:
    """Which blocks peers may write, by the name of the grant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[str, _Grant] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def open(self, name: str, block_ids: list[int]) -> None:
        """Peers may write these blocks. Nothing happens if the name was closed before."""
        with self._changed:
            if name not in self._closed:
                self._open[name] = _Grant(block_ids)
            self._changed.notify_all()

    def close(self, name: str) -> None:
        """Peers may not write them any more, and when this returns nobody does."""
        with self._changed:
            grant = self._open.pop(name, None)
            self._closed[name] = None
            if len(self._closed) > KEPT_CLOSED:
                self._closed.popitem(last=False)
            self._changed.notify_all()
        if grant is not None:
            with grant.lock:
                grant.open = False

    def close_all(self) -> None:
        """Close every grant."""
        for name in list(self._open):
            self.close(name)

    def find(self, name: str, block_ids: list[int], timeout_s: float) -> _Grant:
        """The open grant of this name, which must contain these blocks. Waits for it. Raises TransferError."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while name not in self._open and name not in self._closed:
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    break
            grant = self._open.get(name)
        if grant is None:
            raise TransferError(f"grant {name!r} is closed or unknown")
        if not grant.block_ids.issuperset(block_ids) or len(set(block_ids)) != len(block_ids):
            raise TransferError(f"grant {name!r} does not contain these blocks")
        return grant

    def __len__(self) -> int:
        return len(self._open)


class WriteReceiver:
    """Receives the writes of all peers into these caches. `token` is what they must know. `notices` gets each notice
    after its data. This object owns its socket and threads."""

    def __init__(self, host: str, token: bytes, caches: list[torch.Tensor], cache: CacheDescription,
                 context: LinkContext, notices: deque[Notice]) -> None:
        self.grants = Grants()
        self._token, self._caches, self._cache, self._context, self._notices = token, caches, cache, context, notices
        self._closing = False
        self._lock = threading.Lock()
        self._connections: set[ControlConnection] = set()
        self._unproved: dict[ControlConnection, None] = {}  # of those: they have not proved that they know the token
        self._has_refused = False  # whether a sender was refused because there were too many
        self._threads: list[threading.Thread] = []  # of connections; a few of them may have ended
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                            backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="vllm-pd-accept", daemon=True)
        self._thread.start()

    def connections(self) -> int:
        """How many peers are connected."""
        with self._lock:
            return len(self._connections)

    def unproved(self) -> int:
        """How many of them have not proved that they know the token."""
        with self._lock:
            return len(self._unproved)

    def abort_connections(self) -> None:
        """End all connections. A peer makes another one for its next write."""
        with self._lock:
            for control in self._connections:
                control.abort()

    def close(self) -> None:
        """Close all grants and connections. Waits up to CLOSE_S for the threads: one that ends while the interpreter
        does may abort the process."""
        self._closing = True
        self.grants.close_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.abort_connections()
        deadline_s = time.monotonic() + CLOSE_S
        for thread in (self._thread, *self._threads):
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _accept(self) -> None:
        """The thread of the listening socket, until `close`. No error ends it: where it can't accept, it logs that once
        and tries again; an error in a new connection closes that connection."""
        has_failed = False
        while not self._closing:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if not self._closing:
                    if not has_failed:
                        logger.error("the torch transport can't accept a connection, and tries again: %s", error)
                    has_failed = True
                    time.sleep(0.1)
                continue
            has_failed = False
            try:
                self._begin(sock)
            except Exception:
                logger.exception("the torch transport can't serve a connection: it is closed")
                sock.close()

    def _begin(self, sock: socket.socket) -> None:
        """Serve a connection in a thread of its own. Where there are too many, the oldest one that has proved nothing
        gives way: a peer needs one round trip for that, so strangers can't keep it out by holding connections."""
        with self._lock:
            if not self._closing and len(self._connections) >= MAX_CONNECTIONS and self._unproved:
                oldest = next(iter(self._unproved))
                oldest.abort()
                self._forget(oldest)
            if self._closing:
                sock.close()
                return
            control = ControlConnection(sock, self._context.limits.stall_s)
            if len(self._connections) >= MAX_CONNECTIONS:
                self._refuse(control)
                return
            thread = threading.Thread(target=self._serve, args=(control, ), name="vllm-pd-receive", daemon=True)
            thread.start()
            self._connections.add(control)
            self._unproved[control] = None
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def _refuse(self, control: ControlConnection) -> None:
        """Tell a sender that there are too many, and close its connection."""
        error = f"{MAX_CONNECTIONS} senders are connected to this rank, and it takes no more"
        if not self._has_refused:
            logger.error("the torch transport: %s", error)
        self._has_refused = True
        with contextlib.suppress(OSError):  # it has gone already
            control.send(Joined(error=error))
        control.close()

    def _serve(self, control: ControlConnection) -> None:
        """The thread of a connection. Ends with it."""
        group: PairGroup | None = None
        try:
            peer, copier, group = self._join(control)
            buffers = [copier.buffer(), copier.buffer()]
            while True:
                frame = control.receive(None)
                if isinstance(frame, Begin):
                    self._receive(frame, peer, copier, buffers, control, group)
                elif not isinstance(frame, StoreKey):
                    raise TransferError(f"unexpected {type(frame).__name__}")
        except (OSError, TransferError) as error:
            logger.debug("a connection of the torch transport has ended: %s", error)
        except Exception:
            logger.exception("unexpected error in a connection of the torch transport: it is closed")
        finally:
            if group is not None:
                group.close()
            control.close()
            with self._lock:
                self._forget(control)

    def _forget(self, control: ControlConnection) -> None:
        self._connections.discard(control)
        self._unproved.pop(control, None)

    def _join(self, control: ControlConnection) -> tuple[str, BlockCopier, PairGroup]:
        """Meet a sender. Returns its name, what copies its data, and the group."""
        deadline_s = time.monotonic() + self._context.limits.join_s
        nonce = os.urandom(32)
        control.send(Challenge(nonce))
        join = control.receive(deadline_s, MAX_UNPROVED_BYTES)
        if not isinstance(join, Join) or not is_proof(join.proof, self._token, nonce, b"sender"):
            raise TransferError("a sender does not know our token")
        with self._lock:
            self._unproved.pop(control, None)
        try:
            peer = PeerMetadata.decode_any(join.metadata)
            copier = self._copier(peer.cache, join.heads)
        except PDError as error:
            control.send(Joined(error=str(error)))
            raise TransferError(str(error)) from error
        control.send(Joined(prove(self._token, join.nonce, b"receiver")))
        group = make_group(control, 1, self._context, deadline_s)
        control.send(BeginReply())
        return peer.name, copier, group

    def _copier(self, theirs: CacheDescription, heads: tuple[int, int] | None) -> BlockCopier:
        """What copies the data of a peer with this cache. The addresses come from our own description."""
        lanes = plan(theirs, self._cache, None if heads is None else range(*heads))
        if theirs.head_bytes != self._cache.head_bytes:
            raise TransferError(f"a head has {theirs.head_bytes} bytes a block there and {self._cache.head_bytes} here")
        return BlockCopier(self._caches, [lane.theirs for lane in lanes], self._cache.num_blocks)

    def _receive(self, begin: Begin, peer: str, copier: BlockCopier, buffers: list[torch.Tensor],
                 control: ControlConnection, group: PairGroup) -> None:
        """Receive one write. Raises if the connection can't be used any more."""
        stages, stall_s = list(copier.stages(begin.block_ids)), self._context.limits.stall_s
        try:
            if len(self._notices) >= MAX_NOTICES:
                raise TransferError(f"{MAX_NOTICES} notices have not been taken")
            if len(begin.notice) > MAX_NOTICE_BYTES:
                raise TransferError(f"a notice of {len(begin.notice)} bytes is too long")
            grant = (self.grants.find(begin.grant, begin.block_ids, self._context.limits.grant_s)
                     if stages else None)
        except TransferError as error:
            control.send(BeginReply(str(error)))
            return
        moving = group.receive(copier.filled(buffers[0], stages[0])) if stages else None
        control.send(BeginReply())
        landed = True
        for number, ids in enumerate(stages):
            moving.wait(stall_s)
            if number + 1 < len(stages):
                moving = group.receive(copier.filled(buffers[(number + 1) % 2], stages[number + 1]))
            part = copier.filled(buffers[number % 2], ids)
            landed = landed and grant.apply(lambda ids=ids, part=part: copier.scatter(ids, part))
        if landed and begin.notice:
            self._notices.append(Notice(peer, begin.notice))
        control.send(Landed("" if landed else f"grant {begin.grant!r} was closed"))
