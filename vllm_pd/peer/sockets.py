# SPDX-License-Identifier: Apache-2.0
"""The control sockets of an engine. Used by one thread only.

One ROUTER, to which prefill engines and operators connect; another one for this engine's own front end; one DEALER,
with its monitor, to each decode engine that gives us jobs; and the `BrokerBackend`. Peers are answered where they last
spoke.
"""
import collections
import os
import time
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

import zmq

from vllm_pd.broker.backend import BrokerBackend
from vllm_pd.broker.zmq_backend import ZmqBackend
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.extras import require_extra
from vllm_pd.peer.control import MessageSource
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.peering import PeeringLimits
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.gate import Gate
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.nats_address import NatsAddress
from vllm_pd.rpc.owners import NameOwners
from vllm_pd.rpc.poller import SocketPoller, receive_batch
from vllm_pd.rpc.sockets import SendResult
from vllm_pd.rpc.watched import SOCKETS, WatchedConnection

if TYPE_CHECKING:
    from vllm_pd.settings.engine import PDConfig

MAX_ROUTES = 4096
MAX_OPERATORS = 256
MAX_FRONTS = 256  # processes of one server
BATCH_MESSAGES = 128
MAX_SOCKETS = 64 + SOCKETS * PeeringLimits().max_peers  # of libzmq, whose default is 1023


_EXPECTED = {MessageSource.DECODE: m.TO_PREFILL, MessageSource.PREFILL: m.TO_DECODE, MessageSource.FRONT: m.FROM_FRONT}


class ControlSockets:
    """The constructor raises ConfigError where a setting or `front`, an address on this machine, can't be used. No
    method raises because of what a peer sends."""

    def __init__(self, incarnation: str, config: "PDConfig", front: str | None = None):
        self._incarnation = incarnation
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._decode: dict[str, WatchedConnection] = {}
        self._peer_of: dict[zmq.Socket, str] = {}
        self._monitored: dict[zmq.Socket, WatchedConnection] = {}  # by monitor
        self._hello: m.Hello | None = None  # the last one to a decode engine; it is the same for all
        self._hello_reply: m.HelloReply | None = None  # the last one to a prefill engine; it is the same for all
        self._shared = sockets.SharedFrames()
        self._owners = NameOwners(self._stands, time.monotonic)
        self._disconnected: set[str] = set()  # decode engines
        self._routes: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._operators: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        gate: Gate | None = None
        try:
            self._keys = None if config.keys is None else Keys.load(config.keys)
            if self._keys is not None:
                gate = Gate(self._context, self._keys)
            self._router = self._listen("bind", config.bind, self._keys)
            self._front = self._listen("front", front, None) if front else None
            self.backend: BrokerBackend = open_backend(self._context, incarnation, config, self._keys)
        except PDError:
            self._context.destroy(linger=0)
            raise
        self.counters = self.backend.counters
        self.address = sockets.endpoint(self._router)
        self.front_routes: collections.OrderedDict[str, bytes] = collections.OrderedDict()  # by the name of the process
        self._watched: set[int] = set()
        self._poller = SocketPoller(gate)
        self.waker = self._poller.waker
        for pollable in (self._router, self._front, self.backend.pollable):
            if pollable is not None:
                self._poller.watch(pollable)

    def _listen(self, key: str, address: str, keys: Keys | None) -> zmq.Socket:
        try:
            socket = sockets.server(self._context, address, keys)
            if address.startswith("ipc://"):
                os.chmod(address.removeprefix("ipc://"), 0o600)  # whatever the umask
            return socket
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(key, address, f"{error}; name a free address, like tcp://127.0.0.1:0") from error

    @property
    def has_keys(self) -> bool:
        """Whether connections are encrypted, and only those with the cluster's key are let in."""
        return self._keys is not None

    def watch(self, descriptor: int) -> None:
        """Let `poll` also return when this descriptor is readable; the caller reads it."""
        self._watched.add(descriptor)
        self._poller.watch(descriptor)

    @property
    def other_protocol(self) -> int | None:
        """The protocol version of the last sender whose version is not ours. The caller sets it to None once it is
        logged."""
        return self.backend.other_protocol

    @other_protocol.setter
    def other_protocol(self, version: int | None) -> None:
        self.backend.other_protocol = version

    def poll(self, timeout_s: float | None) -> list["zmq.Socket | int"]:
        """Wait for messages or for the waker, at most so long. Returns what is readable, for `receive`."""
        return self._poller.wait(timeout_s)

    def receive(self, ready: list["zmq.Socket | int"]) -> Iterator[tuple[MessageSource, str, m.Message]]:
        """The messages that wait, a bounded batch from each socket. Bad ones are counted and skipped."""
        for socket in ready:
            if socket == self.backend.pollable:
                yield from self._from_broker()
                continue
            if socket in self._watched:
                continue
            if socket in self._monitored:
                self._monitored[socket].read_monitor()
                continue
            received = 0
            for frames in receive_batch(socket, BATCH_MESSAGES):
                received += 1
                message = self._open(socket, frames)
                if message is not None:
                    yield message
            peer = self._peer_of.get(socket)
            if peer is not None and received < BATCH_MESSAGES:
                self._decode[peer].emptied()

    def _from_broker(self) -> Iterator[tuple[MessageSource, str, m.Message]]:
        for _ in range(BATCH_MESSAGES):
            received = self.backend.receive()
            if received is None:
                return
            yield MessageSource.BROKER, *received

    def _open(self, socket: zmq.Socket, frames: list[bytes]) -> tuple[MessageSource, str, m.Message] | None:
        """Whom these frames come from, and what they say; None where they are refused, which is counted."""
        source = MessageSource.PREFILL if socket is self._router else (
            MessageSource.FRONT if socket is self._front else MessageSource.DECODE)
        try:
            sender, message = codec.decode(frames if source is MessageSource.DECODE else frames[1:])
        except codec.BadFrame as fault:
            self.counters["frame_" + fault.fault.value] += 1
            self.other_protocol = fault.theirs or self.other_protocol
            return None
        if source is MessageSource.PREFILL and isinstance(message, m.TO_ENGINE):
            source = MessageSource.OPERATOR
        elif not isinstance(message, _EXPECTED[source]):
            self.counters["frame_unexpected"] += 1
            return None
        if source is MessageSource.DECODE:
            if self._peer_of.get(socket) != sender:
                self.counters["frame_other_sender"] += 1  # another process has that address now
                if isinstance(message, m.HelloReply) and sender in self._decode and self._hello is not None:
                    self.to_decode(sender, self._hello)  # it answers where we spoke last: speak on its own connection
                return None
            self._decode[sender].heard()
        if source is MessageSource.FRONT:
            remember(self.front_routes, sender, frames[0], MAX_FRONTS)
        elif source is MessageSource.OPERATOR:
            remember(self._operators, sender, frames[0], MAX_OPERATORS)
        elif source is MessageSource.PREFILL:
            if self._keys is None and self._owners.is_anothers(sender, self._routes.get(sender), frames[0]):
                self.counters["name_taken"] += 1
                return None
            remember(self._routes, sender, frames[0], MAX_ROUTES)
        return source, sender, message

    def connect(self, peer: str, address: str, is_elsewhere: bool = False) -> None:
        """Open a connection to a decode engine, unless there is one. One `is_elsewhere` that is silent ends, and takes
        the place of one that does not. A bad address is counted, and so is that no descriptor is left: that peer does
        not answer then."""
        if peer in self._decode:
            if not is_elsewhere or self._decode[peer].ends_when_silent:
                return
            self.disconnect(peer)
        try:
            if not address.startswith("tcp://"):
                raise zmq.ZMQError(zmq.EPROTONOSUPPORT)
            connection = WatchedConnection(self._context, address, self._keys, lambda: self._changed(peer),
                                           ends_when_silent=is_elsewhere)
        except zmq.ZMQError:
            self.counters["address_bad"] += 1
            return
        self._decode[peer] = connection
        self._peer_of[connection.socket] = peer
        self._monitored[connection.monitor] = connection
        self._poller.watch(connection.socket)
        self._poller.watch(connection.monitor)

    def disconnect(self, peer: str) -> None:
        """Close it; what has not left by now is lost."""
        connection = self._decode.pop(peer, None)
        if connection is not None:
            self._poller.forget(connection.socket)
            self._poller.forget(connection.monitor)
            del self._peer_of[connection.socket], self._monitored[connection.monitor]
            connection.close()

    def to_broker(self, message: m.Message) -> SendResult:
        """Send to the broker."""
        result = self.backend.send(message)
        if result is not SendResult.SENT:
            self.counters["unsent"] += 1
        return result

    def holding(self, attempts: Set[m.Attempt]) -> None:
        """The offered jobs that this engine still works on."""
        self.backend.holding(attempts)

    def to_decode(self, peer: str, message: m.Message) -> SendResult:
        """Send to a decode engine. A Hello is not queued while no connection is open. It is sent each time that one was
        opened, for D sends only to where P has last spoken."""
        connection = self._decode.get(peer)
        if isinstance(message, m.Hello) and connection is not None:
            self._hello = message
            if not connection.is_open():
                return SendResult.FULL
        return self._send(None if connection is None else connection.socket, None, message)

    def _changed(self, peer: str) -> None:
        """A connection to this decode engine was opened, or has ended."""
        if not self._decode[peer].is_open():
            self._disconnected.add(peer)
        elif self._hello is not None:
            self._send(self._decode[peer].socket, None, self._hello)

    def take_disconnected(self) -> set[str]:
        """The decode engines whose connections have ended since the last call, and were not closed by us."""
        found, self._disconnected = self._disconnected, set()
        return found

    def is_connected(self, peer: str, hello: m.Hello, reply: m.HelloReply) -> bool:
        """Whether a connection between that engine and us is still open: the one that it has opened as a prefill
        engine, or ours to it as a decode engine. `reply`, or `hello`, is sent on it, so that a host that has lost the
        connection, as by a restart, says so, and a D to which ours was made anew answers on it."""
        if self._routes.get(peer) is not None and self.to_prefill(peer, reply) is not SendResult.UNREACHABLE:
            return True
        connection = self._decode.get(peer)
        if connection is None or not connection.may_be_open():
            return False
        self.to_decode(peer, hello)
        return True

    def _stands(self, peer: str) -> bool:
        """Whether the connection of that prefill engine stands. libzmq knows when a message is to go there. False where
        nobody has been answered: what has used the name has not said Hello."""
        reply = self._hello_reply
        return reply is not None and self.to_prefill(peer, reply) is not SendResult.UNREACHABLE

    def to_prefill(self, peer: str, message: m.Message) -> SendResult:
        """Send to a prefill engine that has sent us a message before."""
        if isinstance(message, m.HelloReply):
            self._hello_reply = message
        route = self._routes.get(peer)
        return self._send(None if route is None else self._router, route, message)

    def to_operator(self, name: str, message: m.Message) -> SendResult:
        """Answer an operator."""
        route = self._operators.get(name)
        return self._send(None if route is None else self._router, route, message)

    def to_front(self, name: str, message: m.Message) -> None:
        """Answer a process of the front end. One that is gone is forgotten."""
        route = self.front_routes.get(name)
        if route is not None and self._send(self._front, route, message) is SendResult.UNREACHABLE:
            del self.front_routes[name]

    def to_fronts(self, message: m.Message) -> None:
        """Send to all processes of the front end that have sent us a message before."""
        for name in list(self.front_routes):
            self.to_front(name, message)

    def _send(self, socket: zmq.Socket | None, route: bytes | None, message: m.Message) -> SendResult:
        result = SendResult.UNREACHABLE
        if socket is not None:
            try:
                frame = self._shared.share(codec.encode(self._incarnation, message))
                result = sockets.send(socket, frame) if route is None else sockets.send(socket, route, frame)
            except codec.BadFrame:
                self.counters["frame_too_large"] += 1
        if result is not SendResult.SENT:
            self.counters["unsent"] += 1
        return result

    def count(self) -> int:
        """Open sockets; one and its monitor are one."""
        if self._context.closed:
            return 0
        return (2 if self._front is None else 3) + len(self._decode)

    def close(self, linger_ms: int) -> None:
        """Close all sockets. Messages that wait may leave for so long."""
        self.backend.close(linger_ms)
        for one in self._decode.values():
            one.close(linger_ms)
        for socket in [self._router, *([self._front] if self._front is not None else [])]:
            socket.close(linger=linger_ms)
        self._decode.clear()
        self._peer_of.clear()
        self._monitored.clear()
        self._poller.close()
        self._context.term()


def remember(routes: collections.OrderedDict[str, bytes], name: str, route: bytes, most: int) -> None:
    """Note that this peer was last heard by this route, and forget the one not heard for longest beyond `most`."""
    routes[name] = route
    routes.move_to_end(name)
    if len(routes) > most:
        routes.popitem(last=False)


def open_backend(context: zmq.Context, incarnation: str, config: "PDConfig", keys: Keys | None) -> BrokerBackend:
    """The connection to the configured broker, which need not run yet. Raises ConfigError for a bad address,
    MissingPackage without what NATS needs."""
    if not NatsAddress.is_url(config.broker):
        return ZmqBackend(context, incarnation, config.broker, keys)
    require_extra("nats")
    from vllm_pd.broker.nats_backend import NatsBackend
    address = NatsAddress.of(config.broker, config.nats_prefix, config.nats_credentials, config.nats_ca)
    return NatsBackend(incarnation, address, config.ttl_s)
