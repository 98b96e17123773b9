# SPDX-License-Identifier: Apache-2.0
"""The transfers of a rank that is not in its engine's process.

In V0, requests arrive with a step, in the worker's main thread. In V1 they arrive over a socket from EngineCore, at any
time. In both, the rank's transfer thread reports to the engine over that socket (`vllm_pd.transfer.ranks.gather` is at
the other end).

How the two ends meet: in V0 the engine listens and its ranks connect (`RankThread`). In V1 EngineCore's part is made
after the ranks, so each rank listens (`RankServer`), and EngineCore connects when it knows the addresses
(`connect_ranks`). The rank makes its transport then, because only then it knows the engine's incarnation.

When the engine's process is gone, this process ends at once, whatever its main thread waits for. A peer reuses the
blocks that we may write to only when all processes of the engine are gone.
"""
from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from vllm_pd.errors import ControlError
from vllm_pd.rpc.codec import UNREADABLE
from vllm_pd.transfer.choice import NIXL, TransportChoice
from vllm_pd.transfer.heap import freeze_heap
from vllm_pd.transfer.ranks.gather import RankListener, connect, encode_progress
from vllm_pd.transfer.ranks.packets import PacketSocket
from vllm_pd.transfer.ranks.remote import ENGINE, FirstNode, RankAddress, RankPort, connect_to
from vllm_pd.transfer.requests import Look, TransferProgress, TransferRequest
from vllm_pd.transfer.thread import Transfers, TransferThread, no_context

logger = logging.getLogger("vllm.pd")

ATTACH_S = 120.0  # how long the ranks of V1 may take to make their transports
SERVE_S = 7200.0  # how long EngineCore may take to connect, while it runs: it warms the model up before
LISTEN_S = 1.0  # how long `RankServer.close` may take to be noticed
CLOSE_S = 5.0  # how long `RankServer.close` waits for a transport that is being made
MAX_ERROR_CHARS = 2000


class AttachRank(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """EngineCore's first message to a rank. `receives`: whether peers write into this engine, or read from
    it."""
    incarnation: str
    receives: bool
    transport: TransportChoice = NIXL


class RankReady(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rank's answer: the metadata of its transport, or why there is none."""
    metadata: bytes = b""
    error: str = ""


class RankThread:
    """The `transfer` of the worker of such a rank. `connection` goes to the engine. This object owns `transfer` and
    `connection`. For `enter` see TransferThread. `ends_with_engine` is False if the rank is in the engine's process
    after all (V1 with one rank on a GPU)."""

    def __init__(self, transfer: Transfers, connection: PacketSocket, enter: Callable[[], None] = no_context,
                 ends_with_engine: bool = True) -> None:
        self._connection = connection
        self._ends_with_engine = ends_with_engine
        self._unread = 0
        self._unsent: collections.deque[bytes] = collections.deque()
        self._thread = TransferThread(transfer, self, enter)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many messages of the engine could not be read."""
        return self._connection.dropped + self._unread

    def execute(self, requests: list[TransferRequest]) -> None:
        """Queue requests. They run in order."""
        self._thread.execute(requests)

    def close(self) -> bool:
        """End the thread, which releases everything. Returns whether it is certain that no more bytes will land."""
        return self._thread.close()

    # For the thread: see ThreadOwner.

    def deliver(self, progress: TransferProgress) -> bool:
        """Send the progress to the engine. False if some of it could not be sent yet."""
        self._unsent.extend(encode_progress(progress))
        while self._connection.flush() and self._unsent:
            self._connection.send(self._unsent.popleft())
        return not self._unsent and self._connection.flush()

    def filenos(self) -> list[int]:
        """Of the connection to the engine."""
        return self._connection.filenos()

    def receive(self) -> bool:
        """Receive requests of the engine. Returns False after its farewell. Ends this process if the engine is gone."""
        try:
            messages = self._connection.receive()
        except OSError as error:
            logger.error("the connection to the engine of this rank has ended (%s): the rank ends too", error)
            if self._ends_with_engine:
                os._exit(1)
            return False
        for message in messages:
            try:
                requests = msgspec.msgpack.decode(message, type=list[TransferRequest])
            except UNREADABLE as error:
                self._unread += 1
                logger.error("a message of the engine can't be read: %s", error)
                continue
            for look in requests:
                if isinstance(look, Look):
                    self._thread.poll_until(time.monotonic() + look.lasts_s, look.pause_s)
            others = [request for request in requests if not isinstance(request, Look)]
            if others:
                self._thread.execute(others)
        return not self._connection.farewell

    def released(self, ended: bool) -> None:
        """Say farewell and close the connection, and the held files if no more bytes can land."""
        self._connection.release(ended)


def world_store() -> tuple[str, int] | None:
    """Where the store is at which the ranks of this process's world have met; None if they have not met over TCP."""
    from torch import distributed
    if not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, distributed.TCPStore) else None


class RankServer:
    """A rank of V1 until its engine connects, and its `RankThread` afterwards.

    `make` makes the transfers and returns them with the metadata of their transport; it is called in a thread that has
    called `enter`. `pids` are the processes that may be the engine's; one of them may be this process. `port` is for a
    rank on another node than its engine, where no process is known by its id; this object owns it. There, `meeting` is
    asked where the store of the first node's rank 0 is: if that ends before the engine has connected, this process
    ends. `address` is where the engine connects.
    """

    def __init__(self, make: Callable[[AttachRank], tuple[Transfers, bytes]], pids: Collection[int],
                 enter: Callable[[], None] = no_context, port: RankPort | None = None,
                 meeting: Callable[[], tuple[str, int] | None] = world_store) -> None:
        self._make = make
        self._pids = pids
        self._enter = enter
        self._is_elsewhere = port is not None
        self._meeting = meeting
        self._listener = port or RankListener()
        self._rank: RankThread | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="vllm-pd-attach", daemon=True)
        self.address = self._listener.address
        self._thread.start()

    @property
    def rank(self) -> RankThread | None:
        """The rank's thread; None before the engine has connected."""
        return self._rank

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._closing = True
        self._thread.join(CLOSE_S)
        if self._rank is not None:
            self._rank.close()

    def _main(self) -> None:
        """The thread: waits for the engine, has the transfers made, and answers whether that was possible. Then it
        ends, as the `RankThread` has its own. Where `close` was called meanwhile, it closes what it has made."""
        with contextlib.closing(self._listener):
            first = self._watch_first_node() if self._is_elsewhere else None
            connection = self._accept(first)
        if connection is None:
            self._end_elsewhere("no engine has connected")
            return
        try:
            self._attach(connection)
        except Exception as error:
            logger.exception("the engine can't attach to this rank")
            with contextlib.suppress(OSError):  # the engine is gone
                connection.send(msgspec.msgpack.encode(RankReady(error=str(error)[:MAX_ERROR_CHARS])))
            connection.release(ended=True)
            self._end_elsewhere("the engine can't attach to it")
        else:
            if self._closing:
                self._rank.close()

    def _end_elsewhere(self, why: str) -> None:
        """End this process if it is on another node than its engine, where nobody else would, unless it is closing."""
        if self._is_elsewhere and not self._closing:
            logger.error("this rank ends: %s", why)
            os._exit(1)

    def _watch_first_node(self) -> FirstNode | None:
        """None if there is no way to see it: then only SERVE_S ends the wait."""
        try:
            where = self._meeting()
            return None if where is None else FirstNode(*where)
        except Exception as error:  # what torch knows of it is not for others
            logger.warning("this rank can't see whether the first node runs (%s): it would wait for its engine for "
                           "%g s", error, SERVE_S)
            return None

    def _accept(self, first: FirstNode | None) -> PacketSocket | None:
        """The engine's connection; None if there is none before `close`, or before the first node's end. Closes
        `first`."""
        deadline_s = time.monotonic() + SERVE_S
        with contextlib.closing(first) if first is not None else contextlib.nullcontext():
            while not self._closing and time.monotonic() < deadline_s:
                connection = self._listener.accept_one(self._pids, LISTEN_S)
                if connection is not None:
                    return connection
                if first is not None and first.has_ended():
                    break
            return None

    def _attach(self, connection: PacketSocket) -> None:
        order = msgspec.msgpack.decode(_await_message(connection, time.monotonic() + ATTACH_S), type=AttachRank)
        self._enter()
        transfer, metadata = self._make(order)
        freeze_heap()
        connection.send(msgspec.msgpack.encode(RankReady(metadata)))
        self._rank = RankThread(transfer, connection, self._enter, connection.pid != os.getpid())


def connect_ranks(ranks: Mapping[int, tuple[int, bytes | RankAddress]], order: AttachRank,
                  timeout_s: float = ATTACH_S) -> tuple[dict[int, PacketSocket], list[bytes]]:
    """Connect an engine to its ranks and have them make their transports. `ranks`: process id and `RankServer.address`,
    by rank; the process id is 0 for a rank on another node.

    Returns the connections by rank, which the caller owns, and the metadata of the ranks' transports in order. Raises
    ControlError if a rank does not answer in time, or can't make its transport.
    """
    connections: dict[int, PacketSocket] = {}
    deadline_s = time.monotonic() + timeout_s
    try:
        for rank, (pid, address) in sorted(ranks.items()):
            try:
                connections[rank] = (connect(address) if isinstance(address, bytes)
                                     else connect_to(rank, address, ENGINE))
                if connections[rank].pid != pid:
                    raise ControlError(f"rank {rank} is process {pid}, but {connections[rank].pid} has its socket")
                connections[rank].send(msgspec.msgpack.encode(order))
            except OSError as error:
                raise ControlError(f"can't connect to rank {rank}, process {pid}: {error}") from error
        return connections, [_await_ready(rank, connections[rank], deadline_s) for rank in sorted(connections)]
    except Exception:
        for connection in connections.values():
            connection.close()
        raise


def _await_ready(rank: int, connection: PacketSocket, deadline_s: float) -> bytes:
    try:
        ready = msgspec.msgpack.decode(_await_message(connection, deadline_s), type=RankReady)
    except UNREADABLE as error:
        raise ControlError(f"the answer of rank {rank} can't be read: {error}") from error
    except ControlError as error:
        raise ControlError(f"rank {rank}: {error}") from error
    if ready.error:
        raise ControlError(f"rank {rank} can't make its transport: {ready.error}")
    return ready.metadata


def _await_message(connection: PacketSocket, deadline_s: float) -> bytes:
    """The first message. Raises ControlError if none comes in time, or the connection ends."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        if connection.wait(left_s):
            try:
                messages = connection.receive()
            except OSError as error:
                raise ControlError(f"the connection ended: {error}") from error
            if messages:
                return messages[0]
    raise ControlError("no answer in time")
