# SPDX-License-Identifier: Apache-2.0
"""An engine's line to its broker, whichever broker that is. Used by the control thread only.

All lines keep one contract, in the messages of `vllm_pd.core.messages`: a heartbeat is answered with news or with none,
a put with its fate, and offers come while there is room. Nothing here ever blocks or raises for the other side's doing.
"""
import abc
import collections
from collections.abc import Set
from typing import TYPE_CHECKING

import zmq

from vllm_pd.core import messages as m
from vllm_pd.errors import ConfigError
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.nats_address import NatsAddress
from vllm_pd.rpc.sockets import SendResult

if TYPE_CHECKING:
    from vllm_pd.config import PDConfig


class Uplink(abc.ABC):
    """`counters` counts what was dropped. `other_protocol` is set to the version of a speaker that has another one."""

    def __init__(self) -> None:
        self.counters: m.Counters = collections.Counter()
        self.other_protocol: int | None = None

    @property
    @abc.abstractmethod
    def pollable(self) -> "zmq.Socket | int":
        """What becomes readable when there may be something to receive."""

    @abc.abstractmethod
    def send(self, message: m.Message) -> SendResult:
        """Hand a message over. Anything but SENT: the broker is away, and will not get it."""

    @abc.abstractmethod
    def receive(self) -> tuple[str, m.Message] | None:
        """The next message and its sender, None where there is none. Bad ones are counted and skipped."""

    def holding(self, attempts: Set[m.Attempt]) -> None:
        """The jobs, of those that `receive` gave, that this engine holds now; all others have ended."""
        return None

    @abc.abstractmethod
    def close(self, linger_ms: int) -> None:
        """Last words get so long to leave."""


class ZmqUplink(Uplink):
    """A DEALER to `vllm-pd broker`. Raises ConfigError where `address` can't be used."""

    def __init__(self, context: zmq.Context, incarnation: str, address: str, keys: Keys | None = None):
        super().__init__()
        self._incarnation = incarnation
        try:
            self._socket = sockets.client(context, address, only_connected=True, keys=keys)
        except zmq.ZMQError as error:
            raise ConfigError("broker", address, f"{error}; say where the broker listens, like tcp://127.0.0.1:5700"
                              ) from error

    @property
    def pollable(self) -> zmq.Socket:
        return self._socket

    def send(self, message: m.Message) -> SendResult:
        try:
            return sockets.send(self._socket, codec.encode(self._incarnation, message))
        except codec.BadFrame:
            self.counters["frame_too_large"] += 1
            return SendResult.UNREACHABLE

    def receive(self) -> tuple[str, m.Message] | None:
        while True:
            frames = None if self._socket.closed else sockets.receive(self._socket)
            if frames is None:
                return None
            try:
                sender, message = codec.decode(frames)
            except codec.BadFrame as fault:
                self.counters["frame_" + fault.fault.value] += 1
                self.other_protocol = fault.theirs or self.other_protocol
                continue
            if isinstance(message, m.FROM_BROKER):
                return sender, message
            self.counters["frame_unexpected"] += 1

    def close(self, linger_ms: int) -> None:
        self._socket.close(linger=linger_ms)


def open_uplink(context: zmq.Context, incarnation: str, config: "PDConfig", keys: Keys | None) -> Uplink:
    """The line to the configured broker. Raises ConfigError where it can't be one; it need not be there."""
    if not NatsAddress.is_url(config.broker):
        return ZmqUplink(context, incarnation, config.broker, keys)
    try:
        from vllm_pd.control.nats_uplink import NatsUplink
    except ImportError as error:
        raise ConfigError("broker", config.broker, f"{error}; pip install 'nats-py[nkeys]'") from error
    address = NatsAddress.of(config.broker, config.nats_prefix, config.nats_credentials, config.nats_ca)
    return NatsUplink(incarnation, address, config.ttl_s)
