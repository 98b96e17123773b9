# SPDX-License-Identifier: Apache-2.0
"""The few kinds of ZMQ sockets used here, all bounded and none of them ever blocking.

Servers are ROUTERs that report an unreachable peer. Clients are DEALERs; the one to the broker queues only on a
connection that stands, so that a send to a broker that is away fails at once, and gives one up that is silent. With
keys a server speaks only to clients with the same ones, and a client only to such a server; the context then needs a
`Gate`.
"""
import contextlib
import os
import threading
from enum import Enum
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq

from vllm_pd.rpc import gate
from vllm_pd.rpc.codec import MAX_FRAME_BYTES
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.locality import needs_ipv6

# Each way, of one connection. Far fewer would bound the bytes, too. But while a connection is full of what is not read,
# libzmq answers no heartbeats on it, so a process that is busy for SILENT_MS would lose it, and what came by it.
HIGH_WATER_MESSAGES = 1000
SHARED_BYTES = 1 << 16  # of a frame from which on equal ones share their memory
RECONNECT_MS = 50
RECONNECT_MAX_MS = 500
HANDSHAKE_MS = 2000
# Firewalls and NAT forget a connection that is idle for minutes. The probes keep it in their tables. They end one that
# is not answered no sooner than Linux ends one with unacknowledged data (tcp_retries2), and TCP_MAXRT is not set: where
# a firewall refuses new connections in the place of a peer on this machine, the open one shows that the peer lives
# (`peer.liveness.rules`).
KEEPALIVE_S = 30
KEEPALIVE_PROBES = 30
# To the broker, and to an engine on another machine: an open connection proves nothing there, and after a cut TCP's own
# retries may come half a minute apart.
HEARTBEAT_MS = 1000
SILENT_MS = 5000  # libzmq's threads answer, so a busy process is not silent
# To anybody. While nothing answers, the kernel tries again after growing pauses, soon half a minute long.
CONNECT_MS = 2000


class SendResult(Enum):
    """What became of a send."""
    SENT = "sent"
    FULL = "full"  # no room, or a DEALER without a connection
    UNREACHABLE = "unreachable"


class Bounds(NamedTuple):
    """Of one connection, each way: messages that wait, and the bytes of a frame. An end that gets more closes it."""
    messages: int = HIGH_WATER_MESSAGES
    frame_bytes: int = MAX_FRAME_BYTES


_BOUNDS = Bounds()


def started_context(max_sockets: int | None = None) -> zmq.Context:
    """A context whose threads run already. They start with its first socket, and where they lack descriptors then,
    libzmq ends the process; a later socket only raises zmq.ZMQError."""
    context = zmq.Context()
    if max_sockets is not None:
        context.set(zmq.MAX_SOCKETS, max_sockets)
    context.socket(zmq.DEALER).close()
    return context


def _bounded(context: zmq.Context, kind: int, address: str, bounds: Bounds) -> zmq.Socket:
    """A socket of ours: bounds, and how soon a dead connection is seen."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, bounds.messages)
    socket.setsockopt(zmq.RCVHWM, bounds.messages)
    socket.setsockopt(zmq.MAXMSGSIZE, bounds.frame_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    return socket


def server(context: zmq.Context, address: str, keys: Keys | None = None,
           ends_when_silent: bool = False, bounds: Bounds = _BOUNDS) -> zmq.Socket:
    """A bound ROUTER. `ends_when_silent`: a connection whose other end answers nothing for SILENT_MS ends, and with it
    what waits to be read there. Raises zmq.ZMQError where the address can't be had."""
    socket = _bounded(context, zmq.ROUTER, address, bounds)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = keys.secret
        socket.zap_domain = gate.DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate no client is admitted
    if ends_when_silent:
        _end_when_silent(socket)
    try:
        socket.bind(address[:-2] + ":*" if address.endswith(":0") else address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def client(context: zmq.Context, address: str, *, only_connected: bool, keys: Keys | None = None,
           bounds: Bounds = _BOUNDS) -> zmq.Socket:
    """A DEALER that connects, and reconnects, in the background. With `only_connected` a send fails at once while no
    connection stands, and one whose other end is silent for SILENT_MS is replaced; else a bounded number of messages
    waits for it, for as long as TCP does. A name in the address is looked up, which may take seconds; where it has
    addresses of IPv4, only they are used. Raises zmq.ZMQError for a bad address."""
    socket = _dealer(context, address, only_connected, keys, bounds)
    socket.setsockopt(zmq.IPV6, int(needs_ipv6(urlsplit(address).hostname)))
    if only_connected:
        _end_when_silent(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def monitored_client(context: zmq.Context, address: str, events: int,
                     keys: Keys | None = None, ends_when_silent: bool = False) -> tuple[zmq.Socket, zmq.Socket]:
    """As `client`, without `only_connected`, and the socket at which libzmq reports these events of its connections,
    from the first one on. To be closed with `close_monitored`. `ends_when_silent`: a connection whose other end is
    silent for SILENT_MS is replaced."""
    socket = _dealer(context, address, False, keys)
    if ends_when_silent:
        _end_when_silent(socket)
    monitor: zmq.Socket | None = None
    try:
        monitor = socket.get_monitor_socket(events)
        socket.connect(address)
    except zmq.ZMQError:
        close_monitored(socket, monitor)
        raise
    return socket, monitor


def close_monitored(socket: zmq.Socket, monitor: zmq.Socket | None, linger_ms: int = 0) -> None:
    """Close both. The monitor is stopped first: without a reader libzmq's thread would wait in it. Before that it is
    emptied: while that thread waits in it, it can't be stopped, and pyzmq keeps the GIL meanwhile."""
    if monitor is not None:
        while receive(monitor) is not None:
            pass
        socket.disable_monitor()
        monitor.close(linger=0)
    socket.close(linger=linger_ms)


def _end_when_silent(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENT_MS)  # the other end forgets the old connection as soon


def _dealer(context: zmq.Context, address: str, only_connected: bool, keys: Keys | None,
            bounds: Bounds = _BOUNDS) -> zmq.Socket:
    socket = _bounded(context, zmq.DEALER, address, bounds)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.IMMEDIATE, int(only_connected))
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    if keys is not None:
        socket.curve_serverkey = socket.curve_publickey = keys.public
        socket.curve_secretkey = keys.secret
    return socket


def is_local(address: str) -> bool:
    """Whether only this machine can reach a socket that is bound to this address."""
    return address.startswith(("ipc://", "inproc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:"))


def endpoint(socket: zmq.Socket) -> str:
    """The address at which a server is reached."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class SharedFrames:
    """The last large frame. Many answers wait for a client that asks again and again and reads nothing: they are equal,
    and take the memory of one."""

    def __init__(self) -> None:
        self._bytes = b""
        self._frame = zmq.Frame()

    def share(self, frame: bytes) -> "bytes | zmq.Frame":
        """What is to be sent for it."""
        if len(frame) < SHARED_BYTES:
            return frame
        if frame != self._bytes:
            self._bytes, self._frame = frame, zmq.Frame(frame)
        return self._frame


def send(socket: zmq.Socket, *frames: "bytes | zmq.Frame") -> SendResult:
    """Never blocks."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return SendResult.FULL
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return SendResult.UNREACHABLE
        raise
    return SendResult.SENT


def receive(socket: zmq.Socket) -> list[bytes] | None:
    """The frames of the next message, None where there is none."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class Waker:
    """A pipe with which other threads wake a poll. `set` is safe from any thread and never blocks."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock = threading.RLock()  # once the pipe is closed, other files may have its numbers

    def fileno(self) -> int:
        """What to poll."""
        return self._read

    def set(self) -> None:
        """Wake the poll, or the next one."""
        with self._lock, contextlib.suppress(OSError):  # the pipe is full of wake-ups already, or closed
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Forget all wake-ups so far. For the polling thread."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def close(self) -> None:
        """After it `set` does nothing."""
        with self._lock:
            ends = (self._read, self._write)
            self._read = self._write = -1
            for end in ends:
                os.close(end)
