# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine and the processes of its ranks, over a connected Unix socket of type SOCK_SEQPACKET.

A packet is one byte of kind and at most PACKET_BYTES. A message is one or more packets, so its size does not depend on
the socket's buffer. Two kinds are no messages: a farewell, after which the connection may end, and an open file that
the receiver must hold. Nothing blocks: what the socket does not take is queued. What can't be read is counted and
dropped; it never ends the connection.
"""
from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import socket
import struct

from vllm_pd.errors import ControlError

PACKET_BYTES = 1 << 15  # several of them fit the default buffer of a socket
MAX_MESSAGE_BYTES = 32 << 20
MAX_UNSENT_BYTES = 64 << 20
PACKETS_PER_RECEIVE = 1024  # at most, so that one connection does not starve the others
MORE, LAST, FAREWELL, HOLD = b"+", b".", b"f", b"h"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class PacketSocket:
    """One end of a connection, which it owns. `connection` is the socket.

    `pid` is the process at the other end, as the kernel knows it; for the end that has connected, the process that
    listened. `held` are the open files that the other end has sent; the caller closes them. `farewell` is whether the
    other end has said farewell. `dropped` counts packets and messages that could not be read.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self.pid = _peer_pid(connection)
        self._unsent: collections.deque[bytes] = collections.deque()
        self._unsent_bytes = 0
        self._parts: list[bytes] | None = []  # of the message that is arriving; None while it is dropped
        self.held: list[int] = []
        self.farewell = False
        self.dropped = 0

    def fileno(self) -> int:
        """The connection's."""
        return self._connection.fileno()

    def filenos(self) -> list[int]:
        """What to poll for reading."""
        return [self.fileno()]

    def send(self, message: bytes) -> bool:
        """Send a message, now or in `flush`. False if some of it could not be sent yet. Raises ControlError if too much
        is unsent already, and OSError if the connection is broken."""
        if self._unsent_bytes + len(message) > MAX_UNSENT_BYTES:
            raise ControlError(f"the other end has not read {self._unsent_bytes} bytes")
        view = memoryview(message)
        for start in range(0, max(1, len(message)), PACKET_BYTES):
            kind = MORE if start + PACKET_BYTES < len(message) else LAST
            self._unsent.append(kind + view[start:start + PACKET_BYTES])
        self._unsent_bytes += len(message)
        return self.flush()

    def flush(self) -> bool:
        """Send what is queued. False if some of it could not be sent yet. Raises OSError if the connection is broken.
        """
        while self._unsent:
            try:
                self._connection.send(self._unsent[0])
            except BlockingIOError:
                return False
            self._unsent_bytes -= len(self._unsent.popleft()) - 1
        return True

    def send_file(self, descriptor: int) -> None:
        """Have the other end hold this open file. Raises OSError."""
        socket.send_fds(self._connection, [HOLD], [descriptor])

    def send_farewell(self) -> None:
        """This end is about to close in order. Raises OSError."""
        self._connection.send(FAREWELL)

    def receive(self) -> list[bytes]:
        """The messages that have arrived completely. Raises OSError if the connection has ended, or an open file was
        lost because this process can't have more of them."""
        messages: list[bytes] = []
        for _ in range(PACKETS_PER_RECEIVE):
            try:
                packet, descriptors, flags, _ = socket.recv_fds(self._connection, 1 + PACKET_BYTES, 1)
            except BlockingIOError:
                break
            except OSError:
                if messages:
                    break  # the next call raises it again
                raise
            if not packet:
                if messages:
                    break
                raise ConnectionError("the other end has closed the connection")
            if packet[:1] == HOLD and not descriptors and flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "no file descriptor is left for an open file that came: raise `ulimit -n`")
            self.held += descriptors
            self._add(packet, bool(flags & socket.MSG_TRUNC), messages)
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Wait for input or the end of the connection, for at most `timeout_s`. Returns whether there is any."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def await_end(self, timeout_s: float) -> None:
        """Wait until the other end has closed the connection, or for `timeout_s`. Input is dropped."""
        self._connection.settimeout(max(0.001, timeout_s))
        try:
            while self._connection.recv(1 + PACKET_BYTES):
                pass
        except OSError:
            return

    def release(self, ended: bool) -> None:
        """Say farewell and close the connection, and the held files if no more bytes can land (`ended`)."""
        while ended and self.held:  # if not ended, only the end of this process may close them
            os.close(self.held.pop())
        with contextlib.suppress(OSError):  # the other end is gone
            self.send_farewell()
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def _add(self, packet: bytes, truncated: bool, messages: list[bytes]) -> None:
        """Take in a packet, and add the message that ends with it to `messages`. `truncated`: it was longer than a
        packet may be. Of a message that is too long (`_parts` is None) the rest is dropped, up to its last packet."""
        kind, content = packet[:1], packet[1:]
        if kind == FAREWELL:
            self.farewell = True
        elif kind not in (MORE, LAST, HOLD) or truncated:
            self.dropped += 1
        elif kind != HOLD:
            if self._parts is not None:
                self._parts.append(content)
                if len(self._parts) * PACKET_BYTES > MAX_MESSAGE_BYTES:
                    self._parts = None
                    self.dropped += 1
            if kind == LAST:
                if self._parts is not None:
                    messages.append(b"".join(self._parts))
                self._parts = []


def _peer_pid(connection: socket.socket) -> int:
    return _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
