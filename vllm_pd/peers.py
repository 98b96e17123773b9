# SPDX-License-Identifier: Apache-2.0
"""Asking a broker who is there, from outside.

The broker tells its list to whoever registers. So we register as a decode engine that resembles no other (nobody will
do work for it), take the list, and leave; that lasts a few milliseconds.
"""

import os
import time
import uuid
from dataclasses import dataclass

import zmq

from vllm_pd.core.messages import PROTOCOL, Fingerprint, Leave, Member, Peers, Refused, Register, Role
from vllm_pd.errors import ControlError, PeerMismatch
from vllm_pd.rpc import codec, sockets

VISITOR = "vllm-pd doctor"


@dataclass(frozen=True)
class Census:
    """Who is registered at a broker, ourselves left out, and how many jobs wait there."""
    members: tuple[Member, ...]
    queue_length: int


def take_census(broker: str, timeout_s: float = 5.0) -> Census:
    """Raises ControlError where nobody answers in time, PeerMismatch where the broker speaks another protocol."""
    context = zmq.Context()
    name = f"visitor-{uuid.uuid4().hex}"
    fingerprint = Fingerprint(PROTOCOL, VISITOR, "", "", 0, 0, 0, 0, "")
    member = Member(name, Role.DECODE, "", fingerprint, pid=os.getpid())
    socket = sockets.client(context, broker, only_connected=True)
    try:
        deadline = time.monotonic() + timeout_s
        _send(socket, codec.encode(name, Register(member)), broker, deadline)
        census = _await_peers(socket, name, broker, deadline)
        sockets.send(socket, codec.encode(name, Leave()))
        socket.close(linger=500)
        return census
    finally:
        socket.close()
        context.term()


def _send(socket: zmq.Socket, frame: bytes, broker: str, deadline: float) -> None:
    left_ms = max(0, int(1000 * (deadline - time.monotonic())))
    if not socket.poll(left_ms, zmq.POLLOUT) or sockets.send(socket, frame) is not sockets.SendResult.SENT:
        raise ControlError(f"nobody listens at {broker}")


def _await_peers(socket: zmq.Socket, name: str, broker: str, deadline: float) -> Census:
    while socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
        try:
            _, message = codec.decode(socket.recv_multipart())
        except codec.BadFrame as fault:
            raise ControlError(f"what listens at {broker} is no broker: {fault}") from fault
        if isinstance(message, Refused):
            raise PeerMismatch(message.key, str(PROTOCOL), message.ours)
        if isinstance(message, Peers):
            return Census(tuple(m for m in message.members if m.incarnation != name), message.queue_length)
    raise ControlError(f"what listens at {broker} does not answer")
