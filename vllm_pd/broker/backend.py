# SPDX-License-Identifier: Apache-2.0
"""An engine's line to its broker, whichever broker that is. Used by the control thread only.

All lines keep one contract, in the messages of `vllm_pd.core.messages`: a heartbeat is answered with news or with none,
a put with its fate, and offers come while there is room. Nothing here ever blocks or raises for the other side's doing.
"""
import abc
import collections
from collections.abc import Set
from typing import TYPE_CHECKING

from vllm_pd.core import messages as m
from vllm_pd.rpc.sockets import SendResult

if TYPE_CHECKING:
    import zmq


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
