# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine's connection to its broker. Used by the control thread only.

All backends keep one contract, in the messages of `vllm_pd.protocol.messages`: each heartbeat and each `Put` is
answered, and offers come while the engine has job credits. No method blocks, or raises because of what the broker does.
"""
import abc
import collections
from collections.abc import Set
from typing import TYPE_CHECKING

from vllm_pd.protocol import messages as m
from vllm_pd.rpc.sockets import SendResult

if TYPE_CHECKING:
    import zmq


class BrokerBackend(abc.ABC):
    """`counters` counts what was dropped. `other_protocol` is the version of a sender whose protocol is not ours."""

    def __init__(self) -> None:
        self.counters: m.Counters = collections.Counter()
        self.other_protocol: int | None = None

    @property
    @abc.abstractmethod
    def pollable(self) -> "zmq.Socket | int":
        """What to poll for reading: it is readable when a message may have come."""

    @abc.abstractmethod
    def send(self, message: m.Message) -> SendResult:
        """Send a message. Any result but SENT: the broker can't be reached and will not get it."""

    @abc.abstractmethod
    def receive(self) -> tuple[str, m.Message] | None:
        """The next message with its sender; None where there is none. Bad ones are counted and skipped."""

    def holding(self, attempts: Set[m.Attempt]) -> None:
        """`attempts` are the offered jobs that this engine still works on; all others have ended."""
        return None

    @abc.abstractmethod
    def close(self, linger_ms: int) -> None:
        """Close the connection. Messages that wait may leave for so long."""
