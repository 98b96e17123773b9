# SPDX-License-Identifier: Apache-2.0
"""A connection between two ranks for the torch transport: a control socket, and a process group of the two.

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
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import torch
from torch import distributed

from vllm_pd.core.messages import MAX_METADATA_BYTES, BlockIds
from vllm_pd.errors import TransferError
from vllm_pd.rpc.codec import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FRAME_BYTES = MAX_METADATA_BYTES + (1 << 16)
_LENGTH = struct.Struct(">I")


class LinkLimits(NamedTuple):
    """How long things may take."""
    join_s: float = 5.0  # until a connection is made
    stall_s: float = 10.0  # without progress in the middle of a write
    grant_s: float = 2.0  # until a write's grant is there, which comes over another path


DEFAULT_LIMITS = LinkLimits()


class LinkContext(NamedTuple):
    """What a rank makes its connections with. `device` is gloo's, or a CUDA device of torch; `enter` is the first call
    in a thread."""
    device: object
    is_cuda: bool
    enter: Callable[[], None]
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
    """The receiver's answer: its proof, or why the two don't fit."""
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


class ControlConnection:
    """The control socket of a connection. It owns `sock`. A frame may take `stall_s`. One thread uses it, but for
    `abort`."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._socket = sock
        self._stall_s = stall_s
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, frame: AnyFrame) -> None:
        """Send a frame. Raises OSError or TransferError."""
        body = msgspec.msgpack.encode(frame)
        if len(body) > MAX_FRAME_BYTES:
            raise TransferError(f"a frame of {len(body)} bytes is too long")
        self._socket.settimeout(self._stall_s)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, deadline_s: float | None) -> AnyFrame:
        """The next frame. `deadline_s` None: wait for its beginning as long as the connection stands. Raises OSError
        or TransferError."""
        first = self._read(1, deadline_s)
        deadline_s = time.monotonic() + self._stall_s if deadline_s is None else deadline_s
        length, = _LENGTH.unpack(first + self._read(_LENGTH.size - 1, deadline_s))
        if length > MAX_FRAME_BYTES:
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
        read = bytearray()
        while len(read) < count:
            if deadline_s is None:
                self._socket.settimeout(None)
            else:
                self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            part = self._socket.recv(min(count - len(read), 1 << 20))
            if not part:
                raise TransferError("the peer has closed the connection")
            read += part
        return bytes(read)


class _RelayStore(distributed.Store):
    """The rendezvous of two: what one sets, the other gets. torch calls it while a group is made; afterwards it holds
    nothing back and waits for nothing."""

    def __init__(self, control: ControlConnection, deadline_s: float) -> None:
        super().__init__()
        self._control: ControlConnection | None = control
        self._deadline_s = deadline_s
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Keep it and send it to the other one."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._values[key] = value
            self._live().send(StoreKey(key, value))

    def get(self, key: str) -> bytes:
        """The value, as soon as it has come."""
        with self._lock:
            while key not in self._values:
                frame = self._live().receive(self._deadline_s)
                if not isinstance(frame, StoreKey):
                    raise TransferError(f"{type(frame).__name__} during the rendezvous")
                self._values[frame.key] = frame.value
            return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for these keys."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether these keys are here."""
        return all(key in self._values for key in keys)

    def end(self) -> None:
        """The group is made: the socket is for other things from now on."""
        with self._lock:
            self._control = None

    def _live(self) -> ControlConnection:
        if self._control is None:
            raise TransferError("the rendezvous is over")
        return self._control


class PendingMove(Protocol):
    """A tensor on its way."""

    def wait(self, timeout_s: float) -> None:
        """Wait for its end. Raises TransferError; then the group can't be used any more."""


class PairGroup(Protocol):
    """A process group of two. Tensors arrive in the order in which they were sent."""

    def send(self, tensor: torch.Tensor) -> PendingMove:
        """Send it. It must not change before the end."""

    def receive(self, tensor: torch.Tensor) -> PendingMove:
        """Receive into it as many bytes as it has."""

    def close(self) -> None:
        """Give the group up."""


class _GlooMove:
    def __init__(self, work: distributed.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, timeout_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error


class GlooGroup:
    """A group for memory of the host. `device` is made by `gloo_device`."""

    def __init__(self, store: distributed.Store, rank: int, device: object, timeout_s: float) -> None:
        options = distributed.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 1, timedelta(seconds=timeout_s)
        self._other = 1 - rank
        try:
            self._group: distributed.ProcessGroupGloo | None = distributed.ProcessGroupGloo(store, rank, 2, options)
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error

    def send(self, tensor: torch.Tensor) -> PendingMove:
        """See PairGroup."""
        return _GlooMove(self._call("send", tensor), tensor)

    def receive(self, tensor: torch.Tensor) -> PendingMove:
        """See PairGroup."""
        return _GlooMove(self._call("recv", tensor), tensor)

    def close(self) -> None:
        """See PairGroup. Idempotent."""
        self._group = None

    def _call(self, name: str, tensor: torch.Tensor) -> distributed.Work:
        if self._group is None:
            raise TransferError("the group is closed")
        try:
            return getattr(self._group, name)([tensor], self._other, 0)
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error


class _NcclMove:
    LOOK_S = 0.0002

    def __init__(self, work: distributed.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._work.is_completed():  # its own wait() only orders streams
            if time.monotonic() > deadline_s:
                raise TransferError(f"NCCL: nothing moves for {timeout_s:g} s")
            time.sleep(self.LOOK_S)
        if self._work.exception() is not None:
            raise TransferError(f"NCCL: {self._work.exception()}")


class NcclGroup:
    """A group for memory of a CUDA device. No machine of ours has run it.

    NCCL makes its connection with the first message, so one byte is sent here, while the store still works.
    """

    def __init__(self, store: distributed.Store, rank: int, device: object, timeout_s: float) -> None:
        self._other = 1 - rank
        self._group = distributed.ProcessGroupNCCL(store, rank, 2, timedelta(seconds=timeout_s))
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        (self.receive if rank else self.send)(first).wait(timeout_s)

    def send(self, tensor: torch.Tensor) -> PendingMove:
        """See PairGroup."""
        torch.cuda.current_stream().synchronize()  # NCCL's stream waits for nothing that another thread launched
        return _NcclMove(self._group.send([tensor], self._other, 0), tensor)

    def receive(self, tensor: torch.Tensor) -> PendingMove:
        """See PairGroup."""
        return _NcclMove(self._group.recv([tensor], self._other, 0), tensor)

    def close(self) -> None:
        """See PairGroup."""
        self._group.abort()


def make_group(control: ControlConnection, rank: int, context: LinkContext, deadline_s: float) -> PairGroup:
    """The group of the two ends of `control`: NCCL's for memory of a CUDA device, else gloo's. `rank` is 0 at the
    sender, 1 at the receiver. Raises TransferError or OSError."""
    store = _RelayStore(control, deadline_s)
    left_s = max(0.1, deadline_s - time.monotonic())
    group = (NcclGroup if context.is_cuda else GlooGroup)(store, rank, context.device, left_s)
    store.end()
    return group


def gloo_device(host: str) -> object:
    """A listening socket of gloo at this address, for all groups of a transport. Raises TransferError."""
    try:
        return distributed.ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise TransferError(f"gloo can't listen at {host}: {error}") from error
