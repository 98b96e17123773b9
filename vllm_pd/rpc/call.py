# SPDX-License-Identifier: Apache-2.0
"""A command's short connection to one broker or engine: it sends a message and receives the answers."""
import time
import uuid
from collections.abc import Iterator

import zmq

from vllm_pd.errors import ControlError, OtherProtocol
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.sockets import SendResult


class Call:
    """Also a context manager. `kind` is what should listen at `address`, for error messages. With `only_connected`
    nothing is sent before a connection is open. `context` is the caller's; without it the call has one of its own.
    Raises ControlError for a bad address."""

    def __init__(self, kind: str, address: str, keys: Keys | None, *, only_connected: bool,
                 context: zmq.Context | None = None):
        self._kind = kind
        self._address = address
        self._name = f"caller-{uuid.uuid4().hex}"
        self._own_context = zmq.Context() if context is None else None
        try:
            self._socket = sockets.client(context or self._own_context, address, only_connected=only_connected,
                                          keys=keys)
        except zmq.ZMQError as error:
            self._end_context()
            raise ControlError(f"{address} is no address that can be reached: {error}") from error

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def say(self, message: m.Message, deadline: float) -> bool:
        """Send a message. Returns whether it left before the deadline, a time of the monotonic clock."""
        return (bool(self._socket.poll(_left_ms(deadline), zmq.POLLOUT))
                and sockets.send(self._socket, codec.encode(self._name, message)) is SendResult.SENT)

    def answers(self, deadline: float) -> Iterator[tuple[str, m.Message]]:
        """(sender, message) of each message that comes before the deadline. Raises OtherProtocol for one of another
        protocol version, ControlError for any other bad one."""
        while self._socket.poll(_left_ms(deadline)):
            try:
                yield codec.decode(self._socket.recv_multipart())
            except codec.BadFrame as fault:
                if fault.theirs is not None:
                    raise OtherProtocol(self._kind, self._address, m.PROTOCOL, fault.theirs) from fault
                raise ControlError(f"what listens at {self._address} is no {self._kind}: {fault}") from fault

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
        self._end_context()

    def _end_context(self) -> None:
        if self._own_context is not None:
            self._own_context.term()


def _left_ms(deadline: float) -> int:
    return max(0, int(1000 * (deadline - time.monotonic())))
