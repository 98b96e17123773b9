# SPDX-License-Identifier: Apache-2.0
"""The two messages of a group over several hosts, and their frames: magic, version, msgpack.

Both carry a state and never an event. So it does not matter how often, how late and in which order they arrive.
"""
from typing import Annotated

import msgspec
import zmq

from vllm_pd.dp.calls import CallRegisters, Number
from vllm_pd.dp.core import Count, RankState
from vllm_pd.rpc.codec import Framing

Keys = tuple[bytes, bytes]  # CURVE: public, secret

VERSION = 3
_MAX_BYTES = 4096

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]


class RankReport(msgspec.Struct, frozen=True, array_like=True, tag="Say", forbid_unknown_fields=True):
    """From a rank to the coordinator. `answer`: please answer. `closed`: the rank's process ends."""
    rank: Rank
    state: RankState
    answer: bool = False
    closed: bool = False


class CoordinatorUpdate(msgspec.Struct, frozen=True, array_like=True, tag="Tell", forbid_unknown_fields=True):
    """From the coordinator to a rank. `left` and `ready` are what the coordinator knows of that rank. `answer`: please
    answer, if only to show that you are alive. A `fault` is final. `closed`: the coordinator ends."""
    step: Count
    over: bool
    left: bool
    registers: CallRegisters = CallRegisters()
    ready: Number = 0
    answer: bool = False
    fault: Text = ""
    closed: bool = False


def _bounded_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = context.socket(kind)
    for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 1000), (zmq.RCVHWM, 1000), (zmq.MAXMSGSIZE, _MAX_BYTES)):
        socket.setsockopt(option, value)
    return socket


def _set_heartbeat(socket: zmq.Socket, timeout_s: float) -> None:
    """Let ZMQ's own thread find out that the other end is silent. So a lost machine or a stopped process shows as a
    lost connection, even in a quiet group. Costs one small frame each way every half of `timeout_s`."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(timeout_s * 500)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(timeout_s * 1000)))


def router(context: zmq.Context, host: str, keys: Keys, timeout_s: float) -> zmq.Socket:
    """The coordinator's socket, bound to a free port of `host`. A rank that connects again replaces its old connection.
    A client must know the public key, and only the ranks know it. Raises zmq.ZMQError."""
    socket = _bounded_socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    _set_heartbeat(socket, timeout_s)
    socket.curve_server = True
    socket.curve_secretkey = keys[1]
    try:
        socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def dealer(context: zmq.Context, server_key: bytes, timeout_s: float, identity: bytes = b"",
           ipv6: bool = False) -> zmq.Socket:
    """A rank's socket, not connected yet."""
    socket = _bounded_socket(context, zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.setsockopt(zmq.IPV6, int(ipv6))
    _set_heartbeat(socket, timeout_s)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.curve_serverkey = server_key
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    return socket


def rank_identity(rank: int) -> bytes:
    """The routing id to which the coordinator sends a rank's updates."""
    return b"rank-%d" % rank


_framing = Framing(b"DP", VERSION, RankReport | CoordinatorUpdate, "version", _MAX_BYTES)
encode, decode = _framing.encode, _framing.decode
