# SPDX-License-Identifier: Apache-2.0
"""A NIXL agent whose next transfers go wrong. Put into an engine's process by a test, never by anything else.

It stands where the real one stood, so the transport, the worker and the engine above it are those that run in earnest.
"""

import signal
import threading
from enum import Enum
from typing import Any


class Fault(Enum):
    """What becomes of the next transfer that is posted."""
    ERROR = "error"  # it is never posted and ends in ERR
    ERROR_AFTER_DATA = "error after data"  # all its bytes land, and it ends in ERR
    STALL = "stall"  # it stays open, unposted, until `go_on`; then it is posted for real
    STALL_AFTER_DATA = "stall after data"  # its bytes land, it stays open, and its notice never comes
    STAND_STILL = "stand still"  # the whole process is stopped right before the post, which then happens


class FaultyAgent:
    """Has all of the agent that it stands for, `real`, and these faults. `faults` are used up one by one."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.faults: list[Fault] = []
        self.failed: set[int] = set()
        self.stalled: set[int] = set()
        self.silent: set[int] = set()
        self.going_on: set[int] = set()
        self.posted: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def make_write(self, local, local_indices, remote, remote_indices, notice: bytes) -> int:
        """A notice that shall get lost is one that says nothing."""
        if self.faults and self.faults[0] is Fault.STALL_AFTER_DATA:
            notice = b""
        return self.real.make_write(local, local_indices, remote, remote_indices, notice)

    def post(self, handle: int):
        fault = self.faults.pop(0) if self.faults else None
        self.posted.append(handle)
        if fault is Fault.ERROR:
            self.failed.add(handle)
        elif fault is Fault.ERROR_AFTER_DATA:
            self._finish(handle)
            self.failed.add(handle)
        elif fault is Fault.STALL:
            self.stalled.add(handle)
        elif fault is Fault.STALL_AFTER_DATA:
            self._finish(handle)
            self.silent.add(handle)
        else:
            if fault is Fault.STAND_STILL:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread does not get any further
            return self.real.post(handle)
        return self._state(handle)

    def check(self, handle: int):
        if handle in self.going_on:
            self.going_on.discard(handle)
            return self.real.post(handle)
        return self._state(handle)

    def release(self, handle: int) -> None:
        for those in (self.failed, self.stalled, self.silent, self.going_on):
            those.discard(handle)
        self.real.release(handle)

    def go_on(self) -> None:
        """Have posted what stalls, by the thread that owns the agent."""
        self.going_on, self.stalled, self.silent = self.stalled, set(), set()

    def _finish(self, handle: int) -> None:
        from vllm_pd.transfer.nixl.agent import TransferState
        state = self.real.post(handle)
        while state is TransferState.OPEN:
            state = self.real.check(handle)

    def _state(self, handle: int):
        from vllm_pd.transfer.nixl.agent import TransferState
        if handle in self.failed:
            return TransferState.FAILED
        if handle in self.stalled or handle in self.silent:
            return TransferState.OPEN
        return self.real.check(handle)


def install(disagg: Any) -> FaultyAgent:
    """Between the transport of this engine and its agent."""
    transport = disagg.transfer.own.transport.transport.newest  # the worker's, the rank's, NIXL's
    transport._agent = FaultyAgent(transport._agent)
    return transport._agent
