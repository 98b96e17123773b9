# SPDX-License-Identifier: Apache-2.0
"""How a thread waits for its sockets, for a wake-up by other threads, and for the requests of a gate."""
from collections.abc import Iterator

import zmq

from vllm_pd.rpc import sockets
from vllm_pd.rpc.gate import Gate


class SocketPoller:
    """Used by one thread, but for `waker`. Owns the gate, if there is one, and answers it while it waits."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.waker = sockets.Waker()
        self._gate = gate
        self._poller = zmq.Poller()
        self._inner = (self.waker.fileno(), None if gate is None else gate.socket)
        for pollable in self._inner:
            if pollable is not None:
                self.watch(pollable)

    def watch(self, pollable: "zmq.Socket | int") -> None:
        """Let `wait` also return when this socket or descriptor is readable."""
        self._poller.register(pollable, zmq.POLLIN)

    def forget(self, socket: zmq.Socket) -> None:
        """Watch it no longer. To be called before it is closed."""
        self._poller.unregister(socket)

    def wait(self, timeout_s: float | None) -> list["zmq.Socket | int"]:
        """Wait until something is readable or `waker` is set, at most so long (None: for ever). Returns what is
        readable, without the waker and the gate. Rounded up to milliseconds, so as not to return too early."""
        ready = self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999)))
        self.waker.clear()
        if self._gate is not None:
            self._gate.answer()
        return [pollable for pollable, _ in ready if pollable not in self._inner]

    def close(self) -> None:
        """Close the gate and the waker; `waker.set` does nothing after it. The sockets are closed already."""
        if self._gate is not None:
            self._gate.close()
        self.waker.close()


def receive_batch(socket: zmq.Socket, most: int) -> Iterator[list[bytes]]:
    """The frames of each message that waits at a socket, of at most `most` messages. Ends early if it is closed."""
    for _ in range(most):
        frames = None if socket.closed else sockets.receive(socket)
        if frames is None:
            return
        yield frames
