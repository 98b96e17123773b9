# SPDX-License-Identifier: Apache-2.0
"""A DEALER to one peer that also knows whether a connection to that peer is open.

ZMQ connects again by itself, and another process may have the peer's address by then. So a new connection counts once
the peer has spoken on it. The end of a process ends its connections, which libzmq reports within milliseconds; a peer
that is only stopped keeps them.
"""
import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_pd.rpc import sockets
from vllm_pd.rpc.keys import Keys

SOCKETS = 3  # of libzmq, for each: the DEALER, and two for its monitor


class WatchedConnection:
    """Owns `socket`, and `monitor`, from which `read_monitor` has to be called when it is readable. Used by one thread.
    Raises zmq.ZMQError where the address is bad, or no socket is left."""

    def __init__(self, context: zmq.Context, address: str, keys: Keys | None = None):
        self._is_open = False  # the handshake of a connection is done
        self._is_proven = False  # and the peer has spoken on it
        self.socket, self.monitor = sockets.monitored_client(
            context, address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED, keys)

    def heard(self) -> None:
        """A message of the peer has come."""
        if not self._is_proven:
            self.read_monitor()
            self._is_proven = self._is_open

    def is_proven(self) -> bool:
        """Whether a connection on which the peer has spoken is open."""
        self.read_monitor()
        return self._is_proven

    def read_monitor(self) -> None:
        """Take what libzmq has reported. If it is not read for long, libzmq's thread waits."""
        while (frames := sockets.receive(self.monitor)) is not None:
            self._is_open = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._is_proven = False

    def close(self, linger_ms: int = 0) -> None:
        """Messages that wait may leave for so long."""
        sockets.close_monitored(self.socket, self.monitor, linger_ms)
