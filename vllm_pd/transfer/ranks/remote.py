# SPDX-License-Identifier: Apache-2.0
"""The connections to a rank that is on another node than its engine: TCP, authenticated at both ends.

There is no kernel that knows both processes, so nobody can say who connects, and no open file can be passed. Instead:

- Each rank makes a random secret, which vLLM's executor carries to EngineCore with all else that the rank reports
  (`RankAddress`). Who connects proves that it knows the secret, and then so does the rank, before anything is decoded.
  The proof is a HMAC over random numbers of both ends, so one that was overheard is worth nothing later. What follows
  is neither encrypted nor signed, as is the KV.
- Two connections are needed: the engine's, and that of its guardian (`vllm_pd.peer.liveness.guardian`), which proves to
  the engine's peers that the rank has ended. The rank has a lifeline of its own for that.
- The rank's process ends with either connection, and after its engine's farewell: nobody on its node would end it. A
  cut of CUT_S ends a connection at both ends. Before the engine has connected, the rank ends with the first node's
  rank 0 (`FirstNode`).

Others are turned away. They have HALF_OPEN_S, and where more than MAX_HALF_OPEN of them wait, the oldest ends.
"""
from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from vllm_pd.errors import ControlError
from vllm_pd.rpc.addresses import url_of
from vllm_pd.transfer.ranks.packets import FAREWELL, PACKET_BYTES, PACKETS_PER_RECEIVE, PacketSocket

logger = logging.getLogger("vllm.pd")

CUT_S = 20  # after so long without an answer of the other host's kernel a connection has ended
CONNECT_S = 10.0  # for the connection and the proofs
HALF_OPEN_S = 5.0
MAX_HALF_OPEN = 64
ENGINE, GUARDIAN = b"e", b"g"  # who connects
MAGIC = b"vllm-pd rank 1\n"
NONCE_BYTES = PROOF_BYTES = 32
_SIZE = struct.Struct("!I")  # before each packet: how many bytes it has
_HELLO_BYTES = len(MAGIC) + NONCE_BYTES
_CLAIM_BYTES = 1 + NONCE_BYTES + PROOF_BYTES
_KEEPALIVE_S = 5  # of silence, after which the other kernel is asked
_FULL_PAUSE_S = 0.1  # where no file descriptor is left for a connection
_AGAIN_S = 0.5  # between two attempts to connect
_LOG_S = 60.0  # between two lines about strangers


class Greeter(Protocol):
    """The rank's lifeline: `vllm_pd.peer.liveness.lifeline.Lifeline`."""

    def fileno(self) -> int:
        """What to poll for reading."""

    def accept_waiting(self) -> None:
        """Greet who waits. Never blocks."""

    def close(self) -> None:
        """Nothing of this rank can write any more."""


@dataclass(frozen=True)
class RankAddress:
    """Where a rank on another node is, and what proves to it that we may connect. Plain values: the executor pickles
    it, and the guardian gets it in msgpack."""
    url: str  # of its `RankPort`
    lifeline: str  # the URL of its lifeline
    name: str  # by which that greets
    secret: bytes = field(repr=False)

    def connect(self, purpose: bytes, timeout_s: float = CONNECT_S) -> TcpPackets:
        """Connect as ENGINE or GUARDIAN; the caller owns the connection. Raises OSError, also where the rank does not
        prove that it is the one that has made the secret."""
        parts = urlsplit(self.url)
        deadline_s = time.monotonic() + timeout_s
        connection = socket.create_connection((parts.hostname, parts.port), timeout_s)
        try:
            hello = _receive(connection, _HELLO_BYTES, deadline_s)
            if not hello.startswith(MAGIC):
                raise ConnectionError("another program answers there")
            theirs, ours = hello[len(MAGIC):], secrets.token_bytes(NONCE_BYTES)
            connection.sendall(purpose + ours + _proof(self.secret, b"c", purpose, theirs, ours))
            if not hmac.compare_digest(_receive(connection, PROOF_BYTES, deadline_s),
                                       _proof(self.secret, b"s", purpose, theirs, ours)):
                raise ConnectionError("another program answers there")
            return TcpPackets(connection)
        except OSError:
            connection.close()
            raise


class TcpPackets(PacketSocket):
    """A `PacketSocket` over TCP, where each packet has its size before it. `pid` is 0. One that is too long is dropped,
    and no byte of it is kept."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _end_after_cut(connection)
        self._leaving = memoryview(b"")  # what of the first unsent packet is not sent yet
        self._arriving = bytearray()  # what has come and is no whole packet
        self._skipped = 0  # so many bytes that are to come belong to a packet that was too long

    def flush(self) -> bool:
        """See PacketSocket."""
        while self._unsent:
            if not self._leaving:
                self._leaving = memoryview(_SIZE.pack(len(self._unsent[0])) + self._unsent[0])
            try:
                sent = self._connection.send(self._leaving)
            except BlockingIOError:
                return False
            self._leaving = self._leaving[sent:]
            if not self._leaving:
                self._unsent_bytes -= len(self._unsent.popleft()) - 1
        return True

    def send_file(self, descriptor: int) -> None:
        """Nothing: a rank on another node has a lifeline of its own."""

    def send_farewell(self) -> None:
        """See PacketSocket. It follows what is unsent."""
        self._unsent.append(FAREWELL)
        self.flush()

    def receive(self) -> list[bytes]:
        """See PacketSocket."""
        messages: list[bytes] = []
        for _ in range(PACKETS_PER_RECEIVE):
            try:
                data = self._connection.recv(_SIZE.size + 1 + PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                if messages:
                    break  # the next call finds the end
                raise
            if not data:
                if messages:
                    break
                raise ConnectionError("the other end has closed the connection")
            self._take(data, messages)
        return messages

    def _take(self, data: bytes, messages: list[bytes]) -> None:
        """Take in what has come, and add the messages that end with it."""
        buffer = self._arriving
        buffer += data
        at = 0
        while True:
            if self._skipped:
                step = min(self._skipped, len(buffer) - at)
                self._skipped, at = self._skipped - step, at + step
            if len(buffer) - at < _SIZE.size:
                break
            size, = _SIZE.unpack_from(buffer, at)
            if not 1 <= size <= 1 + PACKET_BYTES:
                self.dropped += 1
                self._skipped, at = size, at + _SIZE.size
                continue
            end = at + _SIZE.size + size
            if len(buffer) < end:
                break
            self._add(bytes(buffer[at + _SIZE.size:end]), False, messages)
            at = end
        del buffer[:at]


class FirstNode:
    """Whether the first node's rank 0 still runs, which ends with its engine: by a connection to the store at which all
    ranks have met when they started. torch serves it in that rank's process at `host` and `port`. Nothing is sent.
    Raises OSError if it can't connect."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = socket.create_connection((host, port), CONNECT_S)
        self._connection.setblocking(False)
        _end_after_cut(self._connection)

    def has_ended(self) -> bool:
        """Whether the connection has ended. Never blocks."""
        try:
            return not self._connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()


class RankEnd(TcpPackets):
    """A rank's end of its engine's connection, with that of the guardian and the rank's lifeline. Owns all three. Their
    files are held by number, too: Python closes its sockets at the end of the interpreter, after which threads of other
    libraries may go on writing."""

    def __init__(self, engine: socket.socket, guardian: TcpPackets, lifeline: Greeter) -> None:
        super().__init__(engine)
        self._guardian = guardian
        self._lifeline = lifeline
        self.held += [os.dup(guardian.fileno()), os.dup(lifeline.fileno())]

    def filenos(self) -> list[int]:
        """What to poll for reading."""
        return [self.fileno(), self._guardian.fileno(), self._lifeline.fileno()]

    def receive(self) -> list[bytes]:
        """See PacketSocket. Also greets those who probe the lifeline. Raises OSError if the guardian is gone: nobody
        could prove that this rank has ended."""
        self._lifeline.accept_waiting()
        try:
            self._guardian.receive()
        except OSError as error:
            raise ConnectionError(f"the guardian of the engine is gone: {error}") from error
        return super().receive()

    def release(self, ended: bool) -> None:
        """See PacketSocket. If bytes may still land, the guardian waits for the end of this process. That comes at once
        where the engine has said farewell."""
        if ended:
            self._end_watch()
        super().release(ended)
        if self.farewell:
            logger.info("the engine of this rank has ended: the rank ends, too")
            os._exit(0 if ended else 1)

    def _end_watch(self) -> None:
        self._lifeline.close()
        with contextlib.suppress(OSError):  # the guardian is gone
            self._guardian.send_farewell()
        self._guardian.close()


class _HalfOpen:
    """A connection that has proven nothing yet."""

    def __init__(self, connection: socket.socket, address: str, now: float) -> None:
        self.connection = connection
        self.address = address
        self.until_s = now + HALF_OPEN_S
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.received = b""


class _Claim(NamedTuple):
    """What somebody who connects says."""
    purpose: bytes
    nonce: bytes
    proof: bytes


class RankPort:
    """The `RankListener` of a rank that is on another node than its engine: it listens at this port of `host`, an
    address; 0: a free one. Raises OSError where it can't. `lifeline` greets by `name`; its URL is `lifeline_url`. It is
    the caller's until `accept_one` has returned a connection."""

    def __init__(self, host: str, port: int, lifeline: Greeter, lifeline_url: str, name: str) -> None:
        self._lifeline = lifeline
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port > 0))
            self._socket.bind((host, port))
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._half_open: list[_HalfOpen] = []
        self._proven: dict[bytes, socket.socket] = {}  # by purpose
        self._quiet_until_s = 0.0
        self.address = RankAddress(url_of(host, self._socket.getsockname()[1]), lifeline_url, name,
                                   secrets.token_bytes(32))

    def accept_one(self, pids: Collection[int], timeout_s: float) -> RankEnd | None:
        """The connection of the engine, once its guardian has connected, too; the caller owns it. None if they don't
        come in time: call again. `pids` mean nothing."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._serve(min(left_s, 0.5))
            if len(self._proven) == 2:
                guardian = TcpPackets(self._proven.pop(GUARDIAN))
                return RankEnd(self._proven.pop(ENGINE), guardian, self._lifeline)
        return None

    def close(self) -> None:
        """Close the socket, and what has not become a connection. Idempotent."""
        for connection in [self._socket, *self._proven.values(), *(one.connection for one in self._half_open)]:
            connection.close()
        self._half_open, self._proven = [], {}

    def _serve(self, timeout_s: float) -> None:
        """Wait for input, and do what it asks for."""
        half_open = {one.connection.fileno(): one for one in self._half_open}
        poll = select.poll()
        for fileno in (self._socket.fileno(), self._lifeline.fileno(), *half_open):
            poll.register(fileno, select.POLLIN)
        for connection in self._proven.values():
            poll.register(connection, select.POLLRDHUP)  # what it sends waits
        ready = {fileno for fileno, _ in poll.poll(1000 * timeout_s)}
        now = time.monotonic()
        self._lifeline.accept_waiting()
        for purpose, connection in list(self._proven.items()):
            if connection.fileno() in ready:
                del self._proven[purpose]
                connection.close()
        for fileno, one in half_open.items():
            if (fileno in ready and not self._hear(one)) or one.until_s <= now:
                self._half_open.remove(one)
                if one.connection not in self._proven.values():
                    one.connection.close()
        if self._socket.fileno() in ready:
            self._accept(now)

    def _accept(self, now: float) -> None:
        try:
            connection, address = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left
            self._say("a connection to this rank can't be accepted: %s", error)
            time.sleep(_FULL_PAUSE_S)
            return
        connection.setblocking(False)
        one = _HalfOpen(connection, address[0], now)
        try:
            connection.send(MAGIC + one.nonce)
        except OSError:
            connection.close()
            return
        if len(self._half_open) == MAX_HALF_OPEN:
            self._half_open.pop(0).connection.close()
        self._half_open.append(one)

    def _hear(self, one: _HalfOpen) -> bool:
        """Take in what has come. Returns whether the connection is still half open; it is in `_proven` if it has said
        what it must. The last one counts."""
        try:
            data = one.connection.recv(_CLAIM_BYTES - len(one.received))
        except BlockingIOError:
            return True
        except OSError:
            return False
        one.received += data
        if len(one.received) < _CLAIM_BYTES:
            return bool(data)
        said = _Claim(one.received[:1], one.received[1:1 + NONCE_BYTES], one.received[1 + NONCE_BYTES:])
        secret = self.address.secret
        if said.purpose not in (ENGINE, GUARDIAN) or not hmac.compare_digest(
                said.proof, _proof(secret, b"c", said.purpose, one.nonce, said.nonce)):
            self._say("closed a connection to this rank of one that does not know its secret (%s)", one.address)
            return False
        try:
            one.connection.send(_proof(secret, b"s", said.purpose, one.nonce, said.nonce))
        except OSError:
            return False
        if said.purpose in self._proven:
            self._proven.pop(said.purpose).close()
        self._proven[said.purpose] = one.connection
        return False

    def _say(self, text: str, what: object) -> None:
        """Log it, unless something was logged a moment ago: strangers may come without number."""
        if (now := time.monotonic()) >= self._quiet_until_s:
            self._quiet_until_s = now + _LOG_S
            logger.warning(text, what)


def _end_after_cut(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other end's kernel has not answered for CUT_S."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * CUT_S)


def _proof(secret: bytes, end: bytes, purpose: bytes, listener: bytes, connecting: bytes) -> bytes:
    """What only one who knows the secret can say. `end`: b"c" for who connects, b"s" for who listens."""
    return hmac.digest(secret, MAGIC + end + purpose + listener + connecting, "sha256")


def _receive(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    """Exactly so many bytes. Raises OSError if they do not come in time."""
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        data = connection.recv(size - len(received))
        if not data:
            raise ConnectionError("the other end has closed the connection")
        received += data
    return received


def connect_to(rank: int, address: RankAddress, purpose: bytes) -> TcpPackets:
    """`address.connect`, as often as there is time for, as strangers may be in the way. Raises ControlError, which
    names the rank and says what to do."""
    deadline_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return address.connect(purpose, max(0.001, deadline_s - time.monotonic()))
        except OSError as error:
            if time.monotonic() + _AGAIN_S >= deadline_s:
                raise ControlError(f"can't connect to rank {rank} at {address.url}: {error}; the bind of its node must "
                                   "be an address that this host reaches, and its port open") from error
        time.sleep(_AGAIN_S)
