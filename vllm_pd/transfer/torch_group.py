# SPDX-License-Identifier: Apache-2.0
"""The process group of the two ends of a connection, and its rendezvous over their control socket."""
from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed

from vllm_pd.errors import TransferError
from vllm_pd.transfer.torch_link import ControlConnection, LinkContext, StoreKey


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


class PendingMove(Protocol):
    """A tensor on its way."""

    def wait(self, timeout_s: float) -> None:
        """Wait for its end. Raises TransferError; then the group can't be used any more."""


class PairGroup(Protocol):
    """A process group of two. Tensors arrive in the order in which they were sent."""

    def send(self, tensor: torch.Tensor) -> PendingMove:
        """Send it. It must not change before the end."""

    def receive(self, tensor: torch.Tensor) -> PendingMove:
        """Receive into it as many bytes as it has."""

    def close(self) -> None:
        """Give the group up."""


class _GlooMove:
    def __init__(self, work: distributed.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, timeout_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error


class GlooGroup:
    """A group for memory of the host. `device` is made by `gloo_device`."""

    def __init__(self, store: distributed.Store, rank: int, device: object, timeout_s: float) -> None:
        options = distributed.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 1, timedelta(seconds=timeout_s)
        self._other = 1 - rank
        try:
            self._group: distributed.ProcessGroupGloo | None = distributed.ProcessGroupGloo(store, rank, 2, options)
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error

    def send(self, tensor: torch.Tensor) -> PendingMove:
        """See PairGroup."""
        return _GlooMove(self._call("send", tensor), tensor)

    def receive(self, tensor: torch.Tensor) -> PendingMove:
        """See PairGroup."""
        return _GlooMove(self._call("recv", tensor), tensor)

    def close(self) -> None:
        """See PairGroup. Idempotent."""
        self._group = None

    def _call(self, name: str, tensor: torch.Tensor) -> distributed.Work:
        if self._group is None:
            raise TransferError("the group is closed")
        try:
            return getattr(self._group, name)([tensor], self._other, 0)
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error


class _NcclMove:
    LOOK_S = 0.0002

    def __init__(self, work: distributed.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._work.is_completed():  # its own wait() only orders streams
            if time.monotonic() > deadline_s:
                raise TransferError(f"NCCL: nothing moves for {timeout_s:g} s")
            time.sleep(self.LOOK_S)
        if self._work.exception() is not None:
            raise TransferError(f"NCCL: {self._work.exception()}")


class NcclGroup:
    """A group for memory of a CUDA device. No machine of ours has run it.

    NCCL makes its connection with the first message, so one byte is sent here, while the store still works.
    """

    def __init__(self, store: distributed.Store, rank: int, device: object, timeout_s: float) -> None:
        self._other = 1 - rank
        self._group = distributed.ProcessGroupNCCL(store, rank, 2, timedelta(seconds=timeout_s))
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        (self.receive if rank else self.send)(first).wait(timeout_s)

    def send(self, tensor: torch.Tensor) -> PendingMove:
        """See PairGroup."""
        torch.cuda.current_stream().synchronize()  # NCCL's stream waits for nothing that another thread launched
        return _NcclMove(self._group.send([tensor], self._other, 0), tensor)

    def receive(self, tensor: torch.Tensor) -> PendingMove:
        """See PairGroup."""
        return _NcclMove(self._group.recv([tensor], self._other, 0), tensor)

    def close(self) -> None:
        """See PairGroup."""
        self._group.abort()


def make_group(control: ControlConnection, rank: int, context: LinkContext, deadline_s: float) -> PairGroup:
    """The group of the two ends of `control`: NCCL's for memory of a CUDA device, else gloo's. `rank` is 0 at the
    sender, 1 at the receiver. Raises TransferError or OSError."""
    store = _RelayStore(control, deadline_s)
    left_s = max(0.1, deadline_s - time.monotonic())
    group = (NcclGroup if context.is_cuda else GlooGroup)(store, rank, context.device, left_s)
    store.end()
    return group


def gloo_device(host: str) -> object:
    """A listening socket of gloo at this address, for all groups of a transport. Raises TransferError."""
    try:
        return distributed.ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise TransferError(f"gloo can't listen at {host}: {error}") from error
