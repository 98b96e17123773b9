# SPDX-License-Identifier: Apache-2.0
"""The process group of the two ends of a connection, and its rendezvous over their control socket."""
from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed

from vllm_pd.errors import TransferError
from vllm_pd.transfer.torch.link import ControlConnection, LinkContext, StoreKey


class _RelayStore(distributed.Store):
    """The rendezvous of two: what one sets, the other gets. torch calls it while a group is made; afterwards it holds
    nothing back and waits for nothing."""

    def __init__(self, control: ControlConnection, deadline_s: float) -> None:
        super().__init__()
        self._control: ControlConnection | None = control
        self._deadline_s = deadline_s
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Keep it and send it to the other one."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._values[key] = value
            self._live().send(StoreKey(key, value))

    def get(self, key: str) -> bytes:
        """The value, as soon as it has come."""
        with self._lock:
            while key not in self._values:
                frame = self._live().receive(self._deadline_s)
                if not isinstance(frame, StoreKey):
                    raise TransferError(f"{type(frame).__name__} during the rendezvous")
                self._values[frame.key] = frame.value
            return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for these keys."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether these keys are here."""
        return all(key in self._values for key in keys)

    def end(self) -> None:
        """The group is made: the socket is for other things from now on."""
        with self._lock:
            self._control = None

    def _live(self) -> ControlConnection:
        if self._control is None:
            raise TransferError("the rendezvous is over")
        return self._control


class PendingMove:
    """A tensor on its way, which is kept alive until then."""

    def __init__(self, work: distributed.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, timeout_s: float) -> None:
        """Wait for its end. Raises TransferError; then the group can't be used any more."""
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error


class PairGroup:
    """A process group of two, of gloo. Tensors arrive in the order in which they were sent. It listens at the address
    `host` with a socket of its own: gloo leaves callbacks of a rendezvous that failed at the socket, so the socket must
    end with the group. Raises TransferError."""

    def __init__(self, store: distributed.Store, rank: int, host: str, timeout_s: float) -> None:
        self._other = 1 - rank
        try:
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
            options._threads, options._timeout = 1, timedelta(seconds=timeout_s)
            self._group: distributed.ProcessGroupGloo | None = distributed.ProcessGroupGloo(store, rank, 2, options)
        except RuntimeError as error:
            raise TransferError(f"gloo at {host}: {error}") from error

    def send(self, tensor: torch.Tensor) -> PendingMove:
        """Send it. It must not change before the end."""
        return PendingMove(self._call("send", tensor), tensor)

    def receive(self, tensor: torch.Tensor) -> PendingMove:
        """Receive into it as many bytes as it has."""
        return PendingMove(self._call("recv", tensor), tensor)

    def close(self) -> None:
        """Give the group up. Idempotent."""
        self._group = None

    def _call(self, name: str, tensor: torch.Tensor) -> distributed.Work:
        if self._group is None:
            raise TransferError("the group is closed")
        try:
            return getattr(self._group, name)([tensor], self._other, 0)
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error


def make_group(control: ControlConnection, rank: int, context: LinkContext, deadline_s: float) -> PairGroup:
    """The group of the two ends of `control`. `rank` is 0 at the sender, 1 at the receiver. Raises TransferError or
    OSError."""
    store = _RelayStore(control, deadline_s)
    group = PairGroup(store, rank, context.host, max(0.1, deadline_s - time.monotonic()))
    store.end()
    return group
