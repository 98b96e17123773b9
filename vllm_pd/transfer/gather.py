# SPDX-License-Identifier: Apache-2.0
"""The engine's line to the transfers of its other ranks, and what they all report, put together.

Rank 0 lives in the engine's process; the others are processes of their own, which get their requests with a step and
have no way to answer in it. So each has a socket to the engine (`RankThread` is its other end): an end of a write goes
up as soon as the rank sees it, whether the engine steps, sleeps or computes, and is taken when the engine looks.

A write has ended when every rank has said so, and well only if it did for all of them. A rank that is gone says nothing
more, so its writes never end here: the executor ends such an engine, and the peers see that all its processes are gone.

Down the socket go only a farewell and, for a rank to hold until its transfers are closed, an open file. Its end without
a farewell tells the rank that the engine is gone. Frames are msgpack; the kernel tells whose process is at the other
end.
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
from vllm_pd.transfer.requests import Finished, Refusal, TransferProgress, TransferRequest
from vllm_pd.transfer.worker import TransferWorker

logger = logging.getLogger("vllm.pd")

MAX_WORD_BYTES = 1 << 16
ENDS_A_WORD = 32
WORDS_A_LOOK = 64
FAREWELL, HOLD = b"farewell", b"hold"
CLOSE_S = 2.0
JOIN_S = 30.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class RankWord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank tells its engine. At most `ENDS_A_WORD` entries."""
    finished: list[Finished] = []
    refused: list[Refusal] = []


class RankListener:
    """Where the ranks of one engine connect while it starts. Nobody else can: their processes are known by id."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(b"\0vllm-pd-" + uuid.uuid4().hex.encode())  # no file to leave behind
        self._socket.listen(128)
        self.address: bytes = self._socket.getsockname()

    def accept(self, pids: Collection[int], timeout_s: float = JOIN_S) -> dict[int, socket.socket]:
        """The connection of each of these processes. Raises ControlError where one does not come in time."""
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
                logger.warning("process %d is none of our workers; its connection is closed", pid)
                connection.close()
                continue
            connection.setblocking(False)
            joined[pid] = connection
        return joined

    def close(self) -> None:
        self._socket.close()


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end, by the kernel's word."""
    return _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]


class _Ending:
    """A write that has ended at some ranks."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.bytes = 0
        self.seconds = 0.0
        self.errors: list[str] = []

    def add(self, rank: int, end: Finished) -> None:
        if rank not in self.ranks:
            self.ranks.add(rank)
            self.bytes += end.bytes
            self.seconds = max(self.seconds, end.seconds)
            if not end.ok:
                self.errors.append(f"rank {rank}: {end.error}")

    def whole(self, key: str) -> Finished:
        return Finished(key=key, ok=not self.errors, bytes=0 if self.errors else self.bytes, seconds=self.seconds,
                        error="; ".join(self.errors))


class GatheredTransfer:
    """What `TransferWorker` is to an engine of one rank, for one of several. `own` is rank 0's; `connections` are the
    other ranks', by rank. Both belong to this object."""

    def __init__(self, own: TransferWorker, connections: dict[int, socket.socket]) -> None:
        self._own = own
        self._connections = connections
        self._ranks = 1 + len(connections)
        self._endings: dict[str, _Ending] = {}

    def execute(self, requests: list[TransferRequest]) -> None:
        """Rank 0's part; the other ranks get the same requests with the step."""
        self._own.execute(requests)

    def filenos(self) -> list[int]:
        """Of the other ranks' sockets: input there is for `take_progress`."""
        return [connection.fileno() for connection in list(self._connections.values())]

    def take_progress(self) -> TransferProgress:
        """What is new of all ranks. Notices come at rank 0 only."""
        progress = self._own.take_progress()
        finished: list[Finished] = []
        refused = list(progress.refused)
        self._add(0, progress.finished, finished)
        for rank in list(self._connections):
            for word in self._words(rank):
                self._add(rank, word.finished, finished)
                refused += word.refused
        return TransferProgress(finished=finished, notices=progress.notices, refused=refused)

    def synchronize(self) -> None:
        """Wait for rank 0's device. The others are as far as the last collective at least."""
        self._own.synchronize()

    @property
    def moving(self) -> bool:
        """As `TransferWorker.moving`, for rank 0. The other ranks have threads of their own."""
        return self._own.moving

    @property
    def busy(self) -> bool:
        """As `TransferWorker.busy`, for rank 0."""
        return self._own.busy

    def live_handles(self) -> int:
        """Writes that have not ended everywhere, as far as this process knows."""
        return max(self._own.live_handles(), len(self._endings))

    def hold(self, descriptor: int) -> None:
        """Let every rank hold this open file for as long as it can write to a peer's memory."""
        for rank, connection in self._connections.items():
            try:
                socket.send_fds(connection, [HOLD], [descriptor])
            except OSError as error:
                raise ControlError(f"rank {rank} can't be told to hold a file: {error}") from error

    def close(self) -> bool:
        """Release everything, here and at the other ranks; those have `CLOSE_S` for it. Idempotent. Never says that no
        byte can land any more: the end of all processes does."""
        for connection in self._connections.values():
            try:
                connection.send(FAREWELL)
            except OSError:
                continue  # it is gone
        self._own.close()
        deadline_s = time.monotonic() + CLOSE_S
        for connection in self._connections.values():
            _await_end(connection, deadline_s)
            connection.close()
        self._connections = {}
        return False

    def _add(self, rank: int, ends: list[Finished], finished: list[Finished]) -> None:
        for end in ends:
            ending = self._endings.setdefault(end.key, _Ending())
            ending.add(rank, end)
            if len(ending.ranks) == self._ranks:
                finished.append(self._endings.pop(end.key).whole(end.key))

    def _words(self, rank: int) -> list[RankWord]:
        words: list[RankWord] = []
        for _ in range(WORDS_A_LOOK):
            try:
                frame = self._connections[rank].recv(MAX_WORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                frame = b""
                logger.error("the line to rank %d broke: %s", rank, error)
            if not frame:
                logger.error("rank %d is gone; what it was writing never ends for us", rank)
                self._connections.pop(rank).close()
                break
            try:
                words.append(msgspec.msgpack.decode(frame, type=RankWord))
            except UNREADABLE as error:
                logger.error("rank %d said what can't be read: %s", rank, error)
        return words


def _await_end(connection: socket.socket, deadline_s: float) -> None:
    """Until the other end is closed, or the time is over; what still comes is of no use."""
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not connection.recv(MAX_WORD_BYTES):
                return
    except OSError:
        return


def connect(address: bytes) -> socket.socket:
    """The rank's end, not blocking."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    connection.setblocking(False)
    return connection


def words(finished: list[Finished], refused: list[Refusal]) -> list[bytes]:
    """Frames that say this, in order; long reasons are cut, so that every frame stays under its bound."""
    frames: list[bytes] = []
    for first in range(0, len(finished), ENDS_A_WORD):
        part = finished[first:first + ENDS_A_WORD]
        frames += _fitting([msgspec.structs.replace(end, error=end.error[:500]) for end in part])
    for refusal in refused:
        entry = RankWord(refused=[msgspec.structs.replace(refusal, reason=refusal.reason[:500])])
        frames.append(msgspec.msgpack.encode(entry))
    return frames


def _fitting(ends: list[Finished]) -> list[bytes]:
    """As few halves as it takes: a character of an id or a reason has up to four bytes."""
    frame = msgspec.msgpack.encode(RankWord(finished=ends))
    if len(frame) < MAX_WORD_BYTES or len(ends) == 1:
        return [frame]
    half = len(ends) // 2
    return _fitting(ends[:half]) + _fitting(ends[half:])

