# SPDX-License-Identifier: Apache-2.0
"""The thread that carries out the transfers of one rank, whatever its engine computes meanwhile.

A transport without a thread of its own moves on only while somebody polls it: ends are seen then, and the notices of
writes leave then. The step loop can't be that somebody, for a forward pass may take seconds. So the step loop only
queues requests; the thread runs them, polls until nothing is open, and sleeps then.

A transport takes one thread at a time. This object owns it, behind one lock: the thread holds it during each call, and
the step loop, which may `look` for notices between two steps, takes it only where it is free.
"""
from __future__ import annotations

import collections
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from vllm_pd.transfer.requests import Read, TransferProgress, TransferRequest, Write

logger = logging.getLogger("vllm.pd")

# Between two polls while a transfer is open: its end is to leave within 2 ms.
LOOK_MIN_S = 0.0002
LOOK_MAX_S = 0.001
LOOK_GROWTH = 1.2
IDLE_LOOK_S = 0.02  # while nothing is open, but a new connection is made, or a socket to the engine is full
ERROR_PAUSE_S = 1.0
CLOSE_S = 5.0


class Transfers(Protocol):
    """What a `TransferThread` drives: a `TransferWorker`, or a `GatheredTransfer` around one."""

    def execute(self, requests: list[TransferRequest]) -> None: ...
    def synchronize(self) -> None: ...
    def take_progress(self) -> TransferProgress: ...
    def live_handles(self) -> int: ...
    def close(self) -> bool: ...

    @property
    def moving(self) -> bool:
        """Whether a transfer is open."""

    @property
    def busy(self) -> bool:
        """Whether `take_progress` has something to do without another request."""


class Owner(Protocol):
    """Whom a `TransferThread` works for. All but `deliver` are called in the thread."""

    def deliver(self, progress: TransferProgress) -> bool:
        """Take what a poll found, which may be nothing. Called by whoever polled. False: not all is passed on yet, poll
        again soon."""

    def filenos(self) -> list[int]:
        """Descriptors whose input wakes the thread."""

    def receive(self) -> bool:
        """One of them has input. Whether to go on."""

    def released(self, ended: bool) -> None:
        """The thread ends and the transfers are closed; `ended`: no byte can land any more."""


def no_context() -> None:
    """The CPU has no context that a thread must enter."""


class TransferThread:
    """Drives `transfers`, which belong to it from now on, for `owner`. `enter` is the first call in the thread."""

    def __init__(self, transfers: Transfers, owner: Owner, enter: Callable[[], None] = no_context) -> None:
        self._transfers = transfers
        self._owner = owner
        self._enter = enter
        self._lock = threading.Lock()
        self._requests: collections.deque[TransferRequest] = collections.deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._released = False
        self._ended = False
        self._thread = threading.Thread(target=self._main, name="vllm-pd-transfer", daemon=True)

    def start(self) -> None:
        """Begin. To be called once."""
        self._thread.start()

    def execute(self, requests: list[TransferRequest]) -> None:
        """Have these run, in order. Called with a step, in the thread that computes: waits for the device where data is
        to move, and never for the transport."""
        if any(isinstance(request, Write | Read) for request in requests):
            self._transfers.synchronize()
        self._requests.extend(requests)
        self._rouse()

    def look(self) -> None:
        """Poll in the caller's thread, unless the transfer thread is polling just now."""
        if self._lock.acquire(blocking=False):
            try:
                progress = self._transfers.take_progress()
            finally:
                self._lock.release()
            self._owner.deliver(progress)

    def live_handles(self) -> int:
        """Transfers that are not released yet, with those that have not begun."""
        return self._transfers.live_handles() + sum(isinstance(r, Write | Read) for r in list(self._requests))

    def close(self) -> bool:
        """End the thread; it releases everything. Whether no byte can land any more: False where it hangs as well.
        Idempotent."""
        self._closing = True
        self._rouse()
        if self._thread.ident is None:
            self._release()
        elif not self.join(CLOSE_S):
            if threading.current_thread() is not self._thread:
                logger.error("the transfer thread hangs in the transport; it is left behind")
            return False
        if self._wakeup >= 0:
            wakeup, self._wakeup = self._wakeup, -1
            os.close(wakeup)
        return self._ended

    def join(self, timeout_s: float) -> bool:
        """Whether the thread ends within that time. It can't wait for itself: who closes may be the garbage collector,
        in any thread."""
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _rouse(self) -> None:
        if self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    def _main(self) -> None:
        try:
            self._enter()
        except Exception:
            logger.exception("the transfer thread can't use the device: nothing is transferred any more")
            self._closing = True
        pause_s: float | None = None
        while not self._closing:
            try:
                ready = self._wait(pause_s, self._owner.filenos())
                if self._wakeup in ready:
                    os.eventfd_read(self._wakeup)
                    pause_s = None
                if ready - {self._wakeup} and not self._owner.receive():
                    break
                pause_s = self._work(pause_s)
            except Exception:  # whatever caused it, what is open must still come to its end
                logger.exception("unexpected error in the transfer thread, which goes on")
                if self._wait(ERROR_PAUSE_S, []):
                    os.eventfd_read(self._wakeup)
                pause_s = LOOK_MIN_S
        self._release()

    def _work(self, pause_s: float | None) -> float | None:
        """Run what is queued and poll. How long to pause then, after a pause of `pause_s`; None: until there is
        input."""
        while self._requests:
            with self._lock:
                self._transfers.execute([self._requests.popleft()])
        with self._lock:
            progress = self._transfers.take_progress()
        delivered = self._owner.deliver(progress)
        if self._transfers.moving:
            return LOOK_MIN_S if pause_s is None else min(LOOK_GROWTH * pause_s, LOOK_MAX_S)
        return IDLE_LOOK_S if self._transfers.busy or not delivered else None

    def _wait(self, pause_s: float | None, filenos: list[int]) -> set[int]:
        """Those of the descriptors, and of `_wakeup`, that have input, after at most `pause_s`."""
        if pause_s is not None and pause_s < LOOK_MAX_S:
            time.sleep(pause_s)  # a poll rounds it up to whole milliseconds
            pause_s = 0.0
        poll = select.poll()
        for fileno in (self._wakeup, *filenos):
            poll.register(fileno, select.POLLIN)
        return {fileno for fileno, _ in poll.poll(None if pause_s is None else 1000 * pause_s)}

    def _release(self) -> None:
        with self._lock:
            if self._released:
                return
            self._released = True
            self._ended = self._transfers.close()
        self._owner.released(self._ended)
