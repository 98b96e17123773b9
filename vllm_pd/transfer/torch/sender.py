# SPDX-License-Identifier: Apache-2.0
"""The sending end of the torch transport: one thread for each peer, which sends one write after the other."""
from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import torch

from vllm_pd.errors import TransferError
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

logger = logging.getLogger("vllm.pd")


class TorchAddress(msgspec.Struct, frozen=True, array_like=True):
    """`PeerMetadata.agent` of a receiver: where it listens, and what a sender must know. No port: it receives nothing.
    """
    host: str
    port: int
    token: bytes


class OutgoingWrite:
    """A write that was posted. `error` is why it was given up, "" if it was not."""

    def __init__(self, key: str, begin: Begin, local_block_ids: list[int]) -> None:
        self.key = key
        self.begin = begin
        self.local_block_ids = local_block_ids
        self.started_s = time.monotonic()
        self.error = ""


class PeerSender:
    """Sends writes to one peer. `ended` is called in the thread, with each write and its error ("" if it is in the
    peer's blocks). `metadata` is ours. This object owns its thread and connection."""

    def __init__(self, address: TorchAddress, metadata: bytes, heads: range | None, copier: BlockCopier,
                 context: LinkContext, ended: Callable[[OutgoingWrite, str], None]) -> None:
        self._address, self._metadata, self._copier, self._context = address, metadata, copier, context
        self._heads = None if heads is None else (heads.start, heads.stop)
        self._ended = ended
        self._buffers: list[torch.Tensor] = []
        self._queue: deque[OutgoingWrite] = deque()
        self._changed = threading.Condition()
        self._closing = ""
        self._control: ControlConnection | None = None
        self._group: PairGroup | None = None
        self._thread = threading.Thread(target=self._main, name="vllm-pd-send", daemon=True)
        self._thread.start()

    def post(self, write: OutgoingWrite) -> None:
        """Queue a write."""
        with self._changed:
            self._queue.append(write)
            self._changed.notify()

    def close(self, reason: str) -> None:
        """Begin no other write, and end the thread after the one that is under way. The others end with this reason."""
        with self._changed:
            self._closing = reason
            self._changed.notify()

    def abort(self) -> None:
        """Break the connection off, so that the thread ends as soon as it can. After `close`."""
        control = self._control
        if control is not None:
            control.abort()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread. Returns whether it has ended."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _main(self) -> None:
        """The thread: connects, so that the first write need not wait for it, and sends the writes in their order.
        After `close`, those that are left end with its reason, and the thread ends."""
        try:
            self._connect()
        except (OSError, TransferError) as error:
            logger.debug("no connection yet, the first write tries again: %s", error)
        except Exception:  # the thread must go on, so that every write ends
            logger.exception("unexpected error in a new connection of the torch transport")
        while True:
            with self._changed:
                while not (self._queue or self._closing):
                    self._changed.wait()
                write = self._queue.popleft() if self._queue else None
            if write is None:
                break
            self._ended(write, self._attempt(write))
        self._disconnect()

    def _attempt(self, write: OutgoingWrite) -> str:
        """Send a write. Returns its error."""
        if write.error or self._closing:
            return write.error or self._closing
        try:
            return self._send(write)
        except (OSError, TransferError) as error:
            self._disconnect()
            return str(error)
        except Exception as error:  # the thread must go on, and every write must end
            logger.exception("unexpected error while sending write %s", write.key)
            self._disconnect()
            return repr(error)

    def _send(self, write: OutgoingWrite) -> str:
        """Send a write in stages. Each is gathered into one of the two buffers while the one before it leaves the
        other. Returns the peer's error, "" where all is in its blocks. Raises OSError or TransferError, after which the
        connection can't be used."""
        control, group = self._connect()
        stall_s = self._context.limits.stall_s
        control.send(write.begin)
        reply = _await(control, BeginReply, stall_s)
        if reply.error:
            return reply.error
        moving = None
        for number, ids in enumerate(self._copier.stages(write.local_block_ids)):
            part = self._copier.filled(self._buffers[number % 2], ids)
            self._copier.gather(ids, part)
            if moving is not None:
                moving.wait(stall_s)
            if write.error:  # the rest is not sent, and the connection ends: the receiver still awaits it
                raise TransferError(write.error)
            moving = group.send(part)
        if moving is not None:
            moving.wait(stall_s)
        return _await(control, Landed, stall_s).error

    def _connect(self) -> tuple[ControlConnection, PairGroup]:
        """The connection, made anew if there is none that can be used."""
        if self._control is not None and self._group is not None and self._control.is_quiet():
            return self._control, self._group
        self._disconnect()
        address, limits = self._address, self._context.limits
        deadline_s = time.monotonic() + limits.join_s
        self._control = control = ControlConnection(
            socket.create_connection((address.host, address.port), timeout=limits.join_s), limits.stall_s)
        nonce, challenge = os.urandom(32), control.receive(deadline_s, MAX_UNPROVED_BYTES)
        if isinstance(challenge, Joined):
            raise TransferError(f"the peer refuses the connection: {challenge.error}")
        if not isinstance(challenge, Challenge):
            raise TransferError("the peer does not begin with a challenge")
        control.send(Join(self._metadata, self._heads, nonce, prove(address.token, challenge.nonce, b"sender")))
        joined = control.receive(deadline_s, MAX_UNPROVED_BYTES)
        if not isinstance(joined, Joined) or joined.error:
            raise TransferError(f"the peer refuses the connection: {getattr(joined, 'error', joined)}")
        if not is_proof(joined.proof, address.token, nonce, b"receiver"):
            raise TransferError("the peer does not know its own token")
        self._group = make_group(control, 0, self._context, deadline_s)
        _await(control, BeginReply, limits.join_s)
        if not self._buffers:
            self._buffers = [self._copier.buffer(), self._copier.buffer()]
        return control, self._group

    def _disconnect(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._control is not None:
            self._control.close()
        self._group = self._control = None


def _await(control: ControlConnection, kind: type, timeout_s: float) -> BeginReply | Landed:
    """The next frame, of this kind. What is left of the rendezvous is skipped."""
    deadline_s = time.monotonic() + timeout_s
    while isinstance(frame := control.receive(deadline_s), StoreKey):
        pass
    if not isinstance(frame, kind):
        raise TransferError(f"{type(frame).__name__} from the peer instead of {kind.__name__}")
    return frame
