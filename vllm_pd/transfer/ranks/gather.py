# SPDX-License-Identifier: Apache-2.0
"""The engine's connections to the transfers of its ranks, and the combined progress of all ranks.

Each rank that is a process of its own has a socket to the engine (`vllm_pd.transfer.ranks.process` is at the other
end). A rank sends the end of a write as soon as it sees it, whether the engine steps, sleeps or computes, and the
engine receives it at its next poll. V0 and V1 differ in how requests reach a rank:

- V0 (`GatheredTransfer`): rank 0 is in the engine's process, the others get their requests with a step.
- V1 (`RankTransfers`): every rank is a process of its own and gets its requests over the socket, at any time.

A write has ended when it has ended on every rank, and it has succeeded only if it did so on every rank. A rank whose
process is gone reports nothing more, so its writes never end here. The executor then ends the engine, and the peers see
that all its processes are gone.

The engine also sends an open file that the rank must hold until its transfers are closed. Who ends in order sends a
farewell. If the connection ends without one, the process at the other end is gone. Messages are msgpack. The kernel
says which process is at the other end.
"""
from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

import msgspec

from vllm_pd.errors import ControlError
from vllm_pd.rpc.codec import UNREADABLE
from vllm_pd.transfer.ranks.packets import PacketSocket
from vllm_pd.transfer.requests import (
    Finished,
    GenerationMade,
    Look,
    Notice,
    PeerRefusal,
    Read,
    TransferProgress,
    TransferRequest,
    Write,
)
from vllm_pd.transfer.transport import RanksMetadata
from vllm_pd.transfer.worker import TransferWorker

logger = logging.getLogger("vllm.pd")

ENTRIES_PER_MESSAGE = 256
MAX_NOTICE_BYTES = 16 << 10  # twice what an attempt with the longest ids needs
CLOSE_S = 2.0  # how long the ranks may take to release everything
JOIN_S = 30.0  # how long the ranks of V0 may take to connect


class RankProgress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The message of a rank to its engine: at most ENTRIES_PER_MESSAGE of each."""
    finished: list[Finished] = []
    refused: list[PeerRefusal] = []
    notices: list[Notice] = []
    made: list[GenerationMade] = []


class RankListener:
    """A socket to which the other end connects while the engine starts. It accepts only known process ids."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(b"\0vllm-pd-" + uuid.uuid4().hex.encode())  # abstract: leaves no file behind
        self._socket.listen(128)
        self.address: bytes = self._socket.getsockname()

    def accept(self, pids: Collection[int], timeout_s: float = JOIN_S) -> dict[int, PacketSocket]:
        """The connections of these processes, by process id; the caller owns them. Raises ControlError if one of them
        does not connect in time."""
        joined: dict[int, PacketSocket] = {}
        deadline_s = time.monotonic() + timeout_s
        while len(joined) < len(pids):
            connection = self.accept_one(set(pids) - joined.keys(), deadline_s - time.monotonic())
            if connection is None:
                missing = sorted(set(pids) - joined.keys())
                raise ControlError(f"worker processes {missing} did not connect within {timeout_s:g} s")
            joined[connection.pid] = connection
        return joined

    def accept_one(self, pids: Collection[int], timeout_s: float) -> PacketSocket | None:
        """The next connection of one of these processes, which the caller owns; None if none comes in time. Other
        processes are turned away."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                connection = PacketSocket(self._socket.accept()[0])
            except TimeoutError:
                return None
            if connection.pid in pids:
                return connection
            logger.warning("closed the connection of process %d, which is not one of this engine", connection.pid)
            connection.close()

    def close(self) -> None:
        """Close the socket. The accepted connections stay open."""
        self._socket.close()


class _GatheredEnd:
    """The end of one write, combined from the ranks that have reported it."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.bytes = 0
        self.seconds = 0.0
        self.errors: list[str] = []
        self.may_land = False

    def add(self, rank: int, end: Finished) -> None:
        """Add the end on that rank. A second one of the same rank changes nothing."""
        if rank not in self.ranks:
            self.ranks.add(rank)
            self.bytes += end.bytes
            self.seconds = max(self.seconds, end.seconds)
            self.may_land |= end.may_land
            if not end.ok:
                self.errors.append(f"rank {rank}: {end.error}")

    def combined(self, key: str) -> Finished:
        """The end of the whole write."""
        return Finished(key=key, ok=not self.errors, bytes=0 if self.errors else self.bytes, seconds=self.seconds,
                        error="; ".join(self.errors), may_land=self.may_land)


class GatheredEnds:
    """The writes that have ended on some of an engine's `ranks` ranks, but not on all."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._endings: dict[str, _GatheredEnd] = {}

    def __len__(self) -> int:
        return len(self._endings)

    def add(self, rank: int, ends: list[Finished]) -> list[Finished]:
        """Add the ends on that rank. Returns the combined ends of the writes that have now ended on all."""
        finished = []
        for end in ends:
            ending = self._endings.setdefault(end.key, _GatheredEnd())
            ending.add(rank, end)
            if len(ending.ranks) == self.ranks:
                finished.append(self._endings.pop(end.key).combined(end.key))
        return finished


class GatheredRenewals:
    """The generations that some of an engine's `ranks` ranks have made, but not all."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._made: dict[str, dict[int, GenerationMade]] = {}  # by name, by rank

    def add(self, rank: int, made: list[GenerationMade]) -> list[GenerationMade]:
        """Add what that rank has made, or could not. Returns the engine's generations of which all ranks have said so:
        with the metadata of all, or with what the first says that has none."""
        gathered = []
        for one in made:
            known = self._made.setdefault(one.name, {})
            known[rank] = one
            if len(known) == self.ranks:
                del self._made[one.name]
                gathered.append(self._combined(one.name, known))
        return gathered

    @staticmethod
    def _combined(name: str, known: dict[int, GenerationMade]) -> GenerationMade:
        for rank, one in sorted(known.items()):
            if one.error:
                return GenerationMade(name, error=f"rank {rank}: {one.error}")
        return GenerationMade(name, RanksMetadata([known[rank].metadata for rank in sorted(known)]).encode())


def _no_loss(what: str) -> None:
    """Nobody is on another host."""


class RankConnections:
    """The engine's ends of the connections to its ranks, by rank. This object owns them. `elsewhere` are the names of
    those whose end the executor does not see; `lost` is called with what has happened to one of these, in the thread
    that finds it, and must not block."""

    def __init__(self, connections: dict[int, PacketSocket], elsewhere: Mapping[int, str] = MappingProxyType({}),
                 lost: Callable[[str], None] = _no_loss) -> None:
        self._connections = dict(connections)
        self._elsewhere = elsewhere
        self._lost = lost

    def filenos(self) -> list[int]:
        """Their file descriptors. Another thread may close one of them meanwhile."""
        numbers = [connection.fileno() for connection in list(self._connections.values())]
        return [number for number in numbers if number >= 0]

    def send(self, rank: int, message: bytes) -> bool:
        """Send a message to that rank, unless it is gone. False if some of it could not be sent yet."""
        if rank in self._connections:
            try:
                return self._connections[rank].send(message)
            except (OSError, ControlError) as error:
                self._lose(rank, error)
        return True

    def flush(self) -> bool:
        """Send what could not be sent before. False if some of it can't be sent yet."""
        sent = True
        for rank, connection in list(self._connections.items()):
            try:
                sent &= connection.flush()
            except OSError as error:
                self._lose(rank, error)
        return sent

    def receive(self) -> Iterator[tuple[int, RankProgress]]:
        """What the ranks have sent, by rank. What can't be read is logged and dropped."""
        for rank, connection in list(self._connections.items()):
            dropped = connection.dropped
            try:
                messages = connection.receive()
            except OSError as error:
                self._lose(rank, error)
                continue
            if connection.dropped != dropped:
                logger.error("a message of rank %d can't be read", rank)
            for message in messages:
                try:
                    yield rank, msgspec.msgpack.decode(message, type=RankProgress)
                except UNREADABLE as error:
                    logger.error("a message of rank %d can't be read: %s", rank, error)

    def hold(self, descriptor: int) -> None:
        """Make every rank hold this open file for as long as it can write to a peer's memory. Raises ControlError."""
        for rank, connection in self._connections.items():
            try:
                connection.send_file(descriptor)
            except OSError as error:
                raise ControlError(f"can't send an open file to rank {rank}: {error}") from error

    def send_farewell(self) -> None:
        """Have every rank release everything and close its connection."""
        for connection in self._connections.values():
            try:
                connection.send_farewell()
            except OSError:
                continue  # the rank is gone

    def close(self) -> None:
        """Wait for CLOSE_S until the ranks have closed their connections, and close ours. Idempotent."""
        deadline_s = time.monotonic() + CLOSE_S
        for connection in self._connections.values():
            connection.await_end(deadline_s - time.monotonic())
            connection.close()
        self._connections = {}

    def _lose(self, rank: int, error: Exception) -> None:
        connection = self._connections.pop(rank)
        if connection.farewell:
            logger.info("rank %d has released its transfers", rank)
        else:
            logger.error("rank %d is gone (%s): its open writes never end for this engine", rank, error)
        connection.close()
        if rank in self._elsewhere:
            self._lost(f"{self._elsewhere[rank]} {'has closed' if connection.farewell else 'is gone'} ({error})")


class GatheredTransfer:
    """Has the interface of `TransferWorker`, for a V0 engine of several ranks. `own` are the transfers of rank 0.
    `connections` are the sockets to the other ranks, by rank. This object owns both."""

    def __init__(self, own: TransferWorker, connections: dict[int, PacketSocket]) -> None:
        self._own = own
        self._others = RankConnections(connections)
        self._ends = GatheredEnds(1 + len(connections))
        self._renewals = GatheredRenewals(1 + len(connections))

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run rank 0's part. The other ranks get the same requests with the step."""
        self._own.execute(requests)

    def filenos(self) -> list[int]:
        """The other ranks' sockets. `take_progress` reads their input."""
        return self._others.filenos()

    def take_progress(self) -> TransferProgress:
        """The progress of all ranks since the last call. Only rank 0 gets notices."""
        progress = self._own.take_progress()
        finished = self._ends.add(0, progress.finished)
        refused = list(progress.refused)
        made = self._renewals.add(0, progress.made)
        for rank, message in self._others.receive():
            finished += self._ends.add(rank, message.finished)
            refused += message.refused
            made += self._renewals.add(rank, message.made)
        return TransferProgress(finished, progress.notices, refused, made)

    def synchronize(self) -> None:
        """Wait for rank 0's device. The other ranks have got at least as far as the last collective."""
        self._own.synchronize()

    @property
    def moving(self) -> bool:
        """`TransferWorker.moving` of rank 0. The other ranks have threads of their own."""
        return self._own.moving

    @property
    def youngest_s(self) -> float:
        """`TransferWorker.youngest_s` of rank 0."""
        return self._own.youngest_s

    @property
    def busy(self) -> bool:
        """`TransferWorker.busy` of rank 0."""
        return self._own.busy

    def live_handles(self) -> int:
        """How many writes have not ended on every rank, as far as this process knows."""
        return max(self._own.live_handles(), len(self._ends))

    def hold(self, descriptor: int) -> None:
        """Make every other rank hold this open file for as long as it can write to a peer's memory. Raises
        ControlError."""
        self._others.hold(descriptor)

    def close(self) -> bool:
        """Release everything, here and on the other ranks, which have CLOSE_S for it. Idempotent. Returns False: only
        the end of all processes proves that no more bytes will land."""
        self._others.send_farewell()
        self._own.close()
        self._others.close()
        return False


class RankTransfers:
    """Has the interface of `TransferWorker`, for a V1 engine, none of whose ranks has its transfers in this process.
    `connections` are the sockets to all ranks, by rank. This object owns them, and `guardian`, that to the guardian of
    the ranks on other nodes. For `elsewhere` and `lost` see RankConnections; the guardian's number is that after the
    last rank's."""

    moving, youngest_s = False, 0.0  # the ranks' threads poll

    def __init__(self, connections: dict[int, PacketSocket], guardian: PacketSocket | None = None,
                 elsewhere: Mapping[int, str] = MappingProxyType({}), lost: Callable[[str], None] = _no_loss) -> None:
        others = {} if guardian is None else {len(connections): guardian}
        self._ranks = RankConnections(connections | others, elsewhere, lost)
        self._ends = GatheredEnds(len(connections))
        self._renewals = GatheredRenewals(len(connections))
        self._open: set[str] = set()
        self._all_sent = True
        self._look: Look | None = None  # is sent when all before it is

    def execute(self, requests: list[TransferRequest]) -> None:
        """Send the requests to every rank. `Look` goes to rank 0, which alone gets notices. If it can't be sent now,
        the last one is sent later."""
        sent = [request for request in requests if not isinstance(request, Look)]
        looks = [request for request in requests if isinstance(request, Look)]
        if sent:
            message = msgspec.msgpack.encode(sent)
            self._open.update(request.key for request in sent if isinstance(request, Write | Read))
            for rank in range(self._ends.ranks):
                self._all_sent &= self._ranks.send(rank, message)
        if looks:
            self._look = looks[-1]
            self._send_look()

    def filenos(self) -> list[int]:
        """The ranks' sockets. `take_progress` reads their input."""
        return self._ranks.filenos()

    def take_progress(self) -> TransferProgress:
        """What the ranks have sent since the last call."""
        self._all_sent = self._ranks.flush()
        self._send_look()
        progress = TransferProgress([], [], [], [])
        for rank, message in self._ranks.receive():
            progress.finished += self._ends.add(rank, message.finished)
            progress.refused += message.refused
            progress.notices += message.notices
            progress.made += self._renewals.add(rank, message.made)
        self._open.difference_update(end.key for end in progress.finished)
        return progress

    def _send_look(self) -> None:
        if self._look is not None and self._all_sent:
            look, self._look = self._look, None
            self._all_sent = self._ranks.send(0, msgspec.msgpack.encode([look]))

    def synchronize(self) -> None:
        """Do nothing: each rank waits for its own device (`Write.after_step`)."""

    @property
    def busy(self) -> bool:
        """Whether something could not be sent yet."""
        return not self._all_sent

    def live_handles(self) -> int:
        """How many writes and reads have not ended on every rank."""
        return len(self._open)

    def hold(self, descriptor: int) -> None:
        """Make every rank hold this open file for as long as it can write to a peer's memory. Raises ControlError."""
        self._ranks.hold(descriptor)

    def close(self) -> bool:
        """Have the ranks release everything. They have CLOSE_S for it. Idempotent. Returns False: only the end of all
        processes proves that no more bytes will land."""
        self._ranks.send_farewell()
        self._ranks.close()
        return False


def connect(address: bytes) -> PacketSocket:
    """Connect to a `RankListener.address`; the caller owns the connection. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        return PacketSocket(connection)
    except OSError:
        connection.close()
        raise


def encode_progress(progress: TransferProgress) -> list[bytes]:
    """Messages of `RankProgress` with these entries, in order. Long reasons are cut and oversized notices are dropped,
    so that no message is too long."""
    finished = [msgspec.structs.replace(end, error=end.error[:500]) for end in progress.finished]
    refused = [msgspec.structs.replace(refusal, reason=refusal.reason[:500]) for refusal in progress.refused]
    notices = [notice for notice in progress.notices if len(notice.payload) <= MAX_NOTICE_BYTES]
    made = [msgspec.structs.replace(one, error=one.error[:500]) for one in progress.made]
    most = max(len(finished), len(refused), len(notices), len(made))
    parts = (slice(first, first + ENTRIES_PER_MESSAGE) for first in range(0, most, ENTRIES_PER_MESSAGE))
    return [msgspec.msgpack.encode(RankProgress(finished[part], refused[part], notices[part], made[part]))
            for part in parts]
