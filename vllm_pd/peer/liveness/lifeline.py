# SPDX-License-Identifier: Apache-2.0
"""The lifeline of an engine: a listening socket that proves that its process exists.

The socket stays open as long as any process of the engine can write to a peer's memory. It survives the control thread:
then nobody accepts connections, which proves nothing. A forked child can write as well and shares the socket; a program
started by `exec` does not. `close` is for an engine that ends while its process goes on.

Whoever connects gets a digest of the incarnation. It proves the name to those who know it, and tells it to nobody else.
There is no thread: the caller polls `fileno` together with its other sockets; `accept_waiting` never blocks.
"""
import contextlib
import errno
import hashlib
import os
import socket

from vllm_pd.rpc.addresses import url_of

BACKLOG = 128
MAX_ACCEPTS = 64
MAGIC = b"vllm-pd lifeline\n"
GREETING_BYTES = len(MAGIC) + hashlib.sha256().digest_size

_open: set[socket.socket] = set()  # of all lifelines: Python closes a socket when its last reference is gone


def greeting(incarnation: str) -> bytes:
    """The bytes that this engine's lifeline sends."""
    return MAGIC + hashlib.sha256(MAGIC + incarnation.encode()).digest()


class Lifeline:
    """The listening socket of this engine, at this port of `host`, an address; 0: a free one. Raises OSError where it
    can't listen there."""

    def __init__(self, incarnation: str, host: str, port: int = 0):
        self._greeting = greeting(incarnation)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # For a fixed port: the connections of an engine that has ended do not count. Whoever listens does.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port > 0))
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._spare = _spare()
        _open.add(self._socket)
        self.address = url_of(host, self._socket.getsockname()[1])

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._socket.fileno()

    def accept_waiting(self) -> None:
        """Greet the connections that wait, a bounded number of them. Never blocks."""
        for _ in range(MAX_ACCEPTS):
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # none waits, or it is closed already
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._reject_one()
                return
            try:
                connection.setblocking(False)
                connection.send(self._greeting)
            except OSError:
                pass  # the probe ends without an answer
            finally:
                connection.close()

    def close(self) -> None:
        """Nothing of this engine can write any more, although its process goes on. Idempotent."""
        _open.discard(self._socket)
        self._socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _reject_one(self) -> None:
        """No descriptor is left. A waiting connection would keep the socket readable and its poller busy for ever."""
        if self._spare >= 0:
            os.close(self._spare)
            with contextlib.suppress(OSError):
                self._socket.accept()[0].close()
            self._spare = _spare()


def _spare() -> int:
    """A descriptor to free when no other is left; -1 where none can be had now."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
