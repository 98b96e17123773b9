# SPDX-License-Identifier: Apache-2.0
"""A connection between two ranks for the torch transport: a control socket, and a process group of the two
(`vllm_pd.transfer.torch.group`).

Life: the sender connects to the receiver's socket, and both prove that they know the token in the receiver's metadata.
Then each makes a process group of its own of size 2, whose rendezvous goes over that same socket (`_RelayStore`). No
other store is involved, and neither is the default group, so vLLM's groups are untouched. The group carries the blocks,
the socket everything else. Every wait has a deadline, except that of a receiver for the next write. After the first
error the connection can't be used: both parts are closed, and the sender makes a new one.
"""
from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import socket
import struct
import time
from typing import NamedTuple

import msgspec

from vllm_pd.errors import TransferError
from vllm_pd.protocol.messages import MAX_METADATA_BYTES, BlockIds
from vllm_pd.rpc.codec import UNREADABLE

MAX_FRAME_BYTES = MAX_METADATA_BYTES + (1 << 16)
# Of the frames that come before the peer's proof. The longest is a Join: its metadata has up to 9 bytes for each
# plane of the cache, so this is enough for 256 layers in which each of 100 heads has a plane of its own.
MAX_UNPROVED_BYTES = 256 << 10
JOIN_BYTES = 256  # more than what a Join has besides its metadata
_LENGTH = struct.Struct(">I")
# A connection to a host that is gone without a word ends after a minute. The kernel's own times add up to two hours.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class LinkLimits(NamedTuple):
    """How long things may take."""
    join_s: float = 15.0  # until a connection is made; the first of a process loads gloo
    stall_s: float = 10.0  # without progress in the middle of a write
    grant_s: float = 2.0  # until a write's grant is there, which comes over another path


DEFAULT_LIMITS = LinkLimits()


class LinkContext(NamedTuple):
    """What a rank makes its connections with: the address at which its sockets listen, and its deadlines."""
    host: str
    limits: LinkLimits = DEFAULT_LIMITS


class LinkFrame(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of what goes over the control socket."""


class Challenge(LinkFrame):
    """The receiver's first frame."""
    nonce: bytes


class Join(LinkFrame):
    """The sender's answer. `metadata` is its `PeerMetadata`; `heads` are the KV heads that it writes (first, end), None
    for all that both ranks hold. `proof`: see `prove`."""
    metadata: bytes
    heads: tuple[int, int] | None
    nonce: bytes
    proof: bytes


class Joined(LinkFrame):
    """The receiver's answer: its proof, or why the two don't fit. In place of a challenge: why it takes no sender."""
    proof: bytes = b""
    error: str = ""


class StoreKey(LinkFrame):
    """A key of the rendezvous."""
    key: str
    value: bytes


class Begin(LinkFrame):
    """The sender is about to send these blocks of the receiver's, in this order, under this grant."""
    grant: str
    block_ids: BlockIds
    notice: bytes


class BeginReply(LinkFrame):
    """The receiver awaits the blocks, or why it does not. The first one says that its group is made."""
    error: str = ""


class Landed(LinkFrame):
    """The receiver has all bytes of the write in its blocks, or why it has not."""
    error: str = ""


AnyFrame = Challenge | Join | Joined | StoreKey | Begin | BeginReply | Landed
_decoder = msgspec.msgpack.Decoder(AnyFrame)


def prove(token: bytes, nonce: bytes, side: bytes) -> bytes:
    """What only those can answer to `nonce` who know the token."""
    return hmac.digest(token, side + nonce, hashlib.sha256)


def is_proof(proof: bytes, token: bytes, nonce: bytes, side: bytes) -> bool:
    """Whether this is what `prove` gives. How long it takes does not depend on where the two differ."""
    return hmac.compare_digest(proof, prove(token, nonce, side))


class ControlConnection:
    """The control socket of a connection. It owns `sock`. A frame may take `stall_s`. One thread uses it, but for
    `abort`."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._socket = sock
        self._stall_s = stall_s
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, frame: AnyFrame) -> None:
        """Send a frame. Raises OSError or TransferError."""
        body = msgspec.msgpack.encode(frame)
        if len(body) > MAX_FRAME_BYTES:
            raise TransferError(f"a frame of {len(body)} bytes is too long")
        self._socket.settimeout(self._stall_s)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, deadline_s: float | None, max_bytes: int = MAX_FRAME_BYTES) -> AnyFrame:
        """The next frame, of at most `max_bytes`. `deadline_s` None: wait for its beginning as long as the connection
        stands. Raises OSError or TransferError."""
        first = self._read(1, deadline_s)
        deadline_s = time.monotonic() + self._stall_s if deadline_s is None else deadline_s
        length, = _LENGTH.unpack(first + self._read(_LENGTH.size - 1, deadline_s))
        if length > max_bytes:
            raise TransferError(f"a frame of {length} bytes is too long")
        try:
            return _decoder.decode(self._read(length, deadline_s))
        except UNREADABLE as error:
            raise TransferError(f"a frame can't be read: {error}") from error

    def is_quiet(self) -> bool:
        """Whether the connection stands and has no input. A sender's has none between two writes."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """End every wait, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _read(self, count: int, deadline_s: float | None) -> bytes:
        """The next `count` bytes, all of them there by `deadline_s` of the monotonic clock; None: without a limit.
        Raises TransferError at the end of the connection, and OSError, of which TimeoutError is one."""
        read = bytearray()
        while len(read) < count:
            if deadline_s is None:
                self._socket.settimeout(None)
            else:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:  # however slowly bytes may come
                    raise TimeoutError("the message did not come in time")
                self._socket.settimeout(left_s)
            part = self._socket.recv(min(count - len(read), 1 << 20))
            if not part:
                raise TransferError("the peer has closed the connection")
            read += part
        return bytes(read)
