# SPDX-License-Identifier: Apache-2.0
"""A DEALER to one peer that also knows whether a connection to that peer is open.

ZMQ connects again by itself, and another process may have the peer's address by then. So a new connection counts once
the peer has spoken on it. What the peer had sent on an earlier connection may still wait in the DEALER, so on all
connections but the first one a message counts only after the DEALER was found empty. The end of a process ends its
connections, which libzmq reports within milliseconds; a peer that is only stopped keeps them.
"""
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_pd.rpc import sockets
from vllm_pd.rpc.keys import Keys

SOCKETS = 3  # of libzmq, for each: the DEALER, and two for its monitor
MAX_DOUBTS = 2  # how often a connection on which the peer has not spoken is taken for one to it


class WatchedConnection:
    """Owns `socket`, and `monitor`, from which `read_monitor` has to be called when it is readable. Used by one thread.
    `changed` is called, from any method, each time that a connection has been opened, the first and each later one, or
    has ended. `ends_when_silent`: also where the peer is silent for some seconds. Raises zmq.ZMQError where the address
    is bad, or no socket is left."""

    def __init__(self, context: zmq.Context, address: str, keys: Keys | None = None,
                 changed: Callable[[], None] = lambda: None, ends_when_silent: bool = False):
        self.ends_when_silent = ends_when_silent
        self._changed = changed
        self._is_open = False  # the handshake of a connection is done
        self._is_first = True  # no connection was open before
        self._is_empty = False  # what was sent on earlier connections has been received
        self._is_proven = False  # the peer has spoken on this connection
        self._doubts = 0  # since a connection was proven
        self.socket, self.monitor = sockets.monitored_client(
            context, address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED, keys, ends_when_silent)

    def heard(self) -> None:
        """A message of the peer has come."""
        if not self._is_proven:
            self.read_monitor()
            if self._is_open and self._is_empty:
                self._is_proven, self._doubts = True, 0

    def emptied(self) -> None:
        """`socket` had no more messages."""
        self._is_empty = self._is_open

    def is_open(self) -> bool:
        """Whether a connection is open, to whomever, as far as `read_monitor` has seen."""
        return self._is_open

    def is_proven(self) -> bool:
        """Whether a connection on which the peer has spoken is open."""
        self.read_monitor()
        return self._is_proven

    def may_be_open(self) -> bool:
        """Whether a connection to the peer is open, as far as is known. True a few times where the peer has not spoken
        on it yet: the caller asks the peer something each time."""
        if self.is_proven():
            return True
        self._doubts += self._is_open
        return self._is_open and self._doubts <= MAX_DOUBTS

    def read_monitor(self) -> None:
        """Take what libzmq has reported. If it is not read for long, libzmq's thread waits."""
        has_changed = False
        while (frames := sockets.receive(self.monitor)) is not None:
            has_changed = True
            self._is_open = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._is_empty = self._is_open and self._is_first
            self._is_first &= not self._is_open
            self._is_proven = False
        if has_changed:
            self._changed()

    def close(self, linger_ms: int = 0) -> None:
        """Messages that wait may leave for so long."""
        sockets.close_monitored(self.socket, self.monitor, linger_ms)
