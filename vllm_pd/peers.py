# SPDX-License-Identifier: Apache-2.0
"""Asking a broker who is there, from outside."""

import time
import uuid
from dataclasses import dataclass

import zmq

from vllm_pd.core import messages
from vllm_pd.core.messages import PROTOCOL, Member, Peers, Refused
from vllm_pd.errors import ControlError, PeerMismatch
from vllm_pd.rpc import codec, sockets


@dataclass(frozen=True)
class Census:
    """Who is registered at a broker, and how many jobs wait there."""
    members: tuple[Member, ...]
    queue_length: int


def take_census(broker: str, timeout_s: float = 5.0) -> Census:
    """Raises ControlError where nobody answers in time, PeerMismatch where the broker speaks another protocol."""
    context = zmq.Context()
    name = f"visitor-{uuid.uuid4().hex}"
    socket = sockets.client(context, broker, only_connected=True)
    try:
        deadline = time.monotonic() + timeout_s
        _send(socket, codec.encode(name, messages.Census()), broker, deadline)
        census = _await_peers(socket, broker, deadline)
        return census
    finally:
        socket.close()
        context.term()


def _send(socket: zmq.Socket, frame: bytes, broker: str, deadline: float) -> None:
    left_ms = max(0, int(1000 * (deadline - time.monotonic())))
    if not socket.poll(left_ms, zmq.POLLOUT) or sockets.send(socket, frame) is not sockets.SendResult.SENT:
        raise ControlError(f"nobody listens at {broker}")


def _await_peers(socket: zmq.Socket, broker: str, deadline: float) -> Census:
    while socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
        try:
            _, message = codec.decode(socket.recv_multipart())
        except codec.BadFrame as fault:
            raise ControlError(f"what listens at {broker} is no broker: {fault}") from fault
        if isinstance(message, Refused):
            raise PeerMismatch(message.key, str(PROTOCOL), message.ours)
        if isinstance(message, Peers):
            return Census(tuple(message.members), message.queue_length)
    raise ControlError(f"what listens at {broker} does not answer")
