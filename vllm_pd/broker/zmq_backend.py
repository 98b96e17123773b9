# SPDX-License-Identifier: Apache-2.0
"""The connection to `vllm-pd broker`. Used by the control thread only."""
import zmq

from vllm_pd.broker.backend import BrokerBackend
from vllm_pd.errors import ConfigError
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.sockets import SendResult


class ZmqBackend(BrokerBackend):
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
