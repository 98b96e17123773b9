# SPDX-License-Identifier: Apache-2.0
"""The engine's connections to the transfers of its other ranks, and the combined progress of all ranks.

Rank 0 is in the engine's process. The other ranks are processes of their own. They get their requests with a step and
can't answer in it. So each has a socket to the engine (`RankThread` is at the other end). A rank sends the end of a
write as soon as it sees it, whether the engine steps, sleeps or computes, and the engine receives it at its next poll.

A write has ended when it has ended on every rank, and it has succeeded only if it did so on every rank. A rank whose
process is gone reports nothing more, so its writes never end here. The executor then ends the engine, and the peers see
that all its processes are gone.

The engine sends only two things to a rank: a farewell, and an open file that the rank must hold until its transfers are
closed. If the connection ends without a farewell, the engine is gone. Frames are msgpack. The kernel tells which
process is at the other end.
"""
from __future__ import annotations

import logging
import socket
import struct
import time
import uuid
from collections.abc import Collection

import msgspec

from vllm_pd.errors import ControlError
from vllm_pd.rpc.codec import UNREADABLE
from vllm_pd.transfer.requests import Finished, PeerRefusal, TransferProgress, TransferRequest
from vllm_pd.transfer.worker import TransferWorker

logger = logging.getLogger("vllm.pd")

MAX_MESSAGE_BYTES = 1 << 16
ENDS_PER_MESSAGE = 32
MESSAGES_PER_POLL = 64  # at most, from one rank
FAREWELL, HOLD = b"farewell", b"hold"
CLOSE_S = 2.0  # how long the other ranks may take to release everything
JOIN_S = 30.0  # how long the other ranks may take to connect
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class RankProgress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The message of a rank to its engine: ends of transfers and refused peers, at most ENDS_PER_MESSAGE of them."""
    finished: list[Finished] = []
    refused: list[PeerRefusal] = []


class RankListener:
    """The socket to which the ranks of one engine connect while it starts. It accepts only known process ids."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(b"\0vllm-pd-" + uuid.uuid4().hex.encode())  # abstract: leaves no file behind
        self._socket.listen(128)
        self.address: bytes = self._socket.getsockname()

    def accept(self, pids: Collection[int], timeout_s: float = JOIN_S) -> dict[int, socket.socket]:
        """The connections of these processes, by process id; the caller owns them. Raises ControlError if one of them
        does not connect in time."""
        joined: dict[int, socket.socket] = {}
        deadline_s = time.monotonic() + timeout_s
        while len(joined) < len(pids):
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                missing = sorted(set(pids) - joined.keys())
                raise ControlError(f"worker processes {missing} did not connect within {timeout_s:g} s") from None
            pid = peer_pid(connection)
            if pid not in pids or pid in joined:
                logger.warning("closed the connection of process %d, which is not one of our workers", pid)
                connection.close()
                continue
            connection.setblocking(False)
            joined[pid] = connection
        return joined

    def close(self) -> None:
        """Close the socket. The accepted connections stay open."""
        self._socket.close()


def peer_pid(connection: socket.socket) -> int:
    """The id of the process at the other end, as the kernel knows it."""
    return _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]


class _GatheredEnd:
    """The end of one write, combined from the ranks that have reported it."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.bytes = 0
        self.seconds = 0.0
        self.errors: list[str] = []

    def add(self, rank: int, end: Finished) -> None:
        """Add the end on that rank. A second one of the same rank changes nothing."""
        if rank not in self.ranks:
            self.ranks.add(rank)
            self.bytes += end.bytes
            self.seconds = max(self.seconds, end.seconds)
            if not end.ok:
                self.errors.append(f"rank {rank}: {end.error}")

    def combined(self, key: str) -> Finished:
        """The end of the whole write."""
        return Finished(key=key, ok=not self.errors, bytes=0 if self.errors else self.bytes, seconds=self.seconds,
                        error="; ".join(self.errors))


class GatheredTransfer:
    """Has the interface of `TransferWorker`, for an engine of several ranks. `own` are the transfers of rank 0.
    `connections` are the sockets to the other ranks, by rank. This object owns both."""

    def __init__(self, own: TransferWorker, connections: dict[int, socket.socket]) -> None:
        self._own = own
        self._connections = connections
        self._ranks = 1 + len(connections)
        self._endings: dict[str, _GatheredEnd] = {}

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run rank 0's part. The other ranks get the same requests with the step."""
        self._own.execute(requests)

    def filenos(self) -> list[int]:
        """The other ranks' sockets. `take_progress` reads their input."""
        return [connection.fileno() for connection in list(self._connections.values())]

    def take_progress(self) -> TransferProgress:
        """The progress of all ranks since the last call. Only rank 0 gets notices."""
        progress = self._own.take_progress()
        finished: list[Finished] = []
        refused = list(progress.refused)
        self._add(0, progress.finished, finished)
        for rank in list(self._connections):
            for message in self._receive(rank):
                self._add(rank, message.finished, finished)
                refused += message.refused
        return TransferProgress(finished=finished, notices=progress.notices, refused=refused)

    def synchronize(self) -> None:
        """Wait for rank 0's device. The other ranks have got at least as far as the last collective."""
        self._own.synchronize()

    @property
    def moving(self) -> bool:
        """`TransferWorker.moving` of rank 0. The other ranks have threads of their own."""
        return self._own.moving

    @property
    def busy(self) -> bool:
        """`TransferWorker.busy` of rank 0."""
        return self._own.busy

    def live_handles(self) -> int:
        """How many writes have not ended on every rank, as far as this process knows."""
        return max(self._own.live_handles(), len(self._endings))

    def hold(self, descriptor: int) -> None:
        """Make every other rank hold this open file for as long as it can write to a peer's memory. Raises
        ControlError."""
        for rank, connection in self._connections.items():
            try:
                socket.send_fds(connection, [HOLD], [descriptor])
            except OSError as error:
                raise ControlError(f"can't send an open file to rank {rank}: {error}") from error

    def close(self) -> bool:
        """Release everything, here and on the other ranks, which have CLOSE_S for it. Idempotent. Returns False: only
        the end of all processes proves that no more bytes will land."""
        for connection in self._connections.values():
            try:
                connection.send(FAREWELL)
            except OSError:
                continue  # the rank is gone
        self._own.close()
        deadline_s = time.monotonic() + CLOSE_S
        for connection in self._connections.values():
            _await_end(connection, deadline_s)
            connection.close()
        self._connections = {}
        return False

    def _add(self, rank: int, ends: list[Finished], finished: list[Finished]) -> None:
        for end in ends:
            ending = self._endings.setdefault(end.key, _GatheredEnd())
            ending.add(rank, end)
            if len(ending.ranks) == self._ranks:
                finished.append(self._endings.pop(end.key).combined(end.key))

    def _receive(self, rank: int) -> list[RankProgress]:
        messages: list[RankProgress] = []
        for _ in range(MESSAGES_PER_POLL):
            try:
                frame = self._connections[rank].recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                frame = b""
                logger.error("the connection to rank %d broke: %s", rank, error)
            if not frame:
                logger.error("rank %d is gone: its open writes never end for this engine", rank)
                self._connections.pop(rank).close()
                break
            try:
                messages.append(msgspec.msgpack.decode(frame, type=RankProgress))
            except UNREADABLE as error:
                logger.error("a message of rank %d can't be read: %s", rank, error)
        return messages


def _await_end(connection: socket.socket, deadline_s: float) -> None:
    """Wait until the other end is closed or the deadline has passed. Input is dropped."""
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not connection.recv(MAX_MESSAGE_BYTES):
                return
    except OSError:
        return


def connect(address: bytes) -> socket.socket:
    """Connect a rank to its engine's `RankListener.address`. The socket is non-blocking."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    connection.setblocking(False)
    return connection


def encode_progress(finished: list[Finished], refused: list[PeerRefusal]) -> list[bytes]:
    """Frames of `RankProgress` with these entries, in order. Long reasons are cut, so that no frame exceeds
    MAX_MESSAGE_BYTES."""
    frames: list[bytes] = []
    for first in range(0, len(finished), ENDS_PER_MESSAGE):
        part = finished[first:first + ENDS_PER_MESSAGE]
        frames += _fitting([msgspec.structs.replace(end, error=end.error[:500]) for end in part])
    for refusal in refused:
        entry = RankProgress(refused=[msgspec.structs.replace(refusal, reason=refusal.reason[:500])])
        frames.append(msgspec.msgpack.encode(entry))
    return frames


def _fitting(ends: list[Finished]) -> list[bytes]:
    """Frames with these ends. Splits the list in halves until each frame fits: a character takes up to four bytes."""
    frame = msgspec.msgpack.encode(RankProgress(finished=ends))
    if len(frame) < MAX_MESSAGE_BYTES or len(ends) == 1:
        return [frame]
    half = len(ends) // 2
    return _fitting(ends[:half]) + _fitting(ends[half:])

