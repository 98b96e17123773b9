# SPDX-License-Identifier: Apache-2.0
"""The thread that runs the transfers of one rank, whatever its engine computes meanwhile.

A transport without a thread of its own makes progress only when it is polled: only then are ends seen, and only then do
the notices of writes leave. The step loop can't poll, because a forward pass may take seconds. So the step loop only
queues requests. The thread runs them, polls until no transfer is open, and then sleeps.

Only one thread at a time may use a transport, so a lock protects it. The thread holds the lock during each call. The
step loop, which may `poll` for notices between two steps, skips that while the lock is taken.
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

# The pause between two polls while a transfer is open: see `longest_pause_s`.
POLL_MIN_S = 0.0002
POLL_MAX_S = 0.001
POLL_GROWTH = 1.2
LATE_SHARE = 0.02
# The longest one; also that while none is open, but a connection is being set up or the socket to the engine is full.
IDLE_POLL_S = 0.02
ERROR_PAUSE_S = 1.0  # after an unexpected error
CLOSE_S = 5.0  # how long `close` waits for the thread


class Transfers(Protocol):
    """What a `TransferThread` drives: a `TransferWorker`, or one of the objects that have its interface."""

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run the requests in order."""

    def synchronize(self) -> None:
        """Wait until the device has computed the blocks that requests send."""

    def take_progress(self) -> TransferProgress:
        """Poll. Returns all progress since the last call."""

    def live_handles(self) -> int:
        """How many transfers have not been released."""

    def close(self) -> bool:
        """Release everything. Returns whether it is certain that no more bytes will land."""

    @property
    def moving(self) -> bool:
        """Whether a transfer is open."""

    @property
    def youngest_s(self) -> float:
        """How long the youngest open transfer has been open. 0 if it moves only while it is polled, or waits."""

    @property
    def busy(self) -> bool:
        """Whether `take_progress` must be called again, even without another request."""


class ThreadOwner(Protocol):
    """The user of a `TransferThread`. All methods are called in the thread, except `deliver`, which is called in the
    thread that polled."""

    def deliver(self, progress: TransferProgress) -> bool:
        """Take the progress of a poll, which may be empty. False: some of it could not be passed on, so poll again
        soon."""

    def filenos(self) -> list[int]:
        """File descriptors whose input wakes the thread."""

    def receive(self) -> bool:
        """One of the file descriptors has input. False: end the thread."""

    def released(self, ended: bool) -> None:
        """The thread ends and has closed the transfers. `ended`: it is certain that no more bytes will land."""


def no_context() -> None:
    """The default `enter`: the CPU has no context that a thread must enter."""


def longest_pause_s(youngest_s: float) -> float:
    """The longest pause before the next poll while the youngest open transfer is so old. The end of a short transfer is
    seen within 2 ms, that of a long one LATE_SHARE of its time late at most, and within IDLE_POLL_S. So a transfer to
    a stopped peer costs almost no CPU."""
    return min(max(POLL_MAX_S, LATE_SHARE * youngest_s), IDLE_POLL_S)


class TransferThread:
    """Drives `transfers` for `owner`, and owns the transfers. `enter` is the first call in the thread; it enters the
    device's context. `at_once`: `transfers.execute` never blocks and may be called in any thread, so a request need not
    wait for this one to wake up."""

    def __init__(self, transfers: Transfers, owner: ThreadOwner, enter: Callable[[], None] = no_context,
                 at_once: bool = False) -> None:
        self._transfers = transfers
        self._owner = owner
        self._enter = enter
        self._lock = threading.Lock()
        self._requests: collections.deque[TransferRequest] = collections.deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Protects `_wakeup`, whose number another file may have once it is closed. Reentrant, because the garbage
        # collector may call `close` in any thread.
        self._wakeup_lock = threading.RLock()
        self._at_once = at_once
        self._polled_until = 0.0
        self._polled_pause_s = IDLE_POLL_S
        self._closing = False
        self._released = False
        self._ended = False
        self._thread = threading.Thread(target=self._main, name="vllm-pd-transfer", daemon=True)

    def start(self) -> None:
        """Start the thread. To be called once."""
        self._thread.start()

    def execute(self, requests: list[TransferRequest]) -> None:
        """Queue the requests that came with a step. They run in order. Called in the thread that computes. Waits for
        the device if data must move, and never for the transport."""
        if any(isinstance(request, Write | Read) for request in requests):
            self._transfers.synchronize()
        if not (self._at_once and self._run_now(requests)):
            self._requests.extend(requests)
            self._wake()

    def poll_until(self, when: float, pause_s: float) -> None:
        """Poll until that time of the monotonic clock at pauses of at most `pause_s`, even if no transfer is open. The
        last call counts; none in the past does. To be called in the thread, by `ThreadOwner.receive`."""
        if when > time.monotonic():
            self._polled_until, self._polled_pause_s = when, max(pause_s, POLL_MIN_S)

    def poll(self) -> None:
        """Poll in the caller's thread, unless the transfer thread is using the transport now."""
        if self._lock.acquire(blocking=False):
            try:
                progress = self._transfers.take_progress()
            finally:
                self._lock.release()
            self._owner.deliver(progress)

    def live_handles(self) -> int:
        """How many transfers have not been released, including the queued ones."""
        return self._transfers.live_handles() + sum(isinstance(r, Write | Read) for r in list(self._requests))

    def close(self) -> bool:
        """End the thread, which releases everything. Returns whether it is certain that no more bytes will land; False
        if the thread does not end within CLOSE_S. Idempotent."""
        self._closing = True
        self._wake()
        if self._thread.ident is None:
            self._release()
        elif not self.join(CLOSE_S):
            if threading.current_thread() is not self._thread:
                logger.error("the transfer thread hangs in the transport: it is not waited for any longer")
            return False
        with self._wakeup_lock:
            if self._wakeup >= 0:
                wakeup, self._wakeup = self._wakeup, -1
                os.close(wakeup)
        return self._ended

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread. Returns whether it has ended; False if this is the thread itself, because the
        garbage collector may call `close` in any thread."""
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run_now(self, requests: list[TransferRequest]) -> bool:
        """Run the requests in the caller's thread. False if they must be queued: the transfers are being used, or other
        requests are before them."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._requests or self._released:
                return False
            for request in requests:
                self._transfers.execute([request])
        except Exception:
            logger.exception("unexpected error in a transfer request: it is lost, with those that came with it")
        finally:
            self._lock.release()
        if self._transfers.busy:  # something could not be sent yet
            self._wake()
        return True

    def _wake(self) -> None:
        with self._wakeup_lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _main(self) -> None:
        """The thread, until `close` or until `ThreadOwner.receive` returns False: waits for input or the time of the
        next poll, and works. Input resets the pause between polls, which grows. Releases the transfers at its end."""
        try:
            self._enter()
        except Exception:
            logger.exception("the transfer thread can't use the device: nothing is transferred from now on")
            self._closing = True
        pause_s: float | None = None
        while not self._closing:
            try:
                ready = self._wait(pause_s, self._owner.filenos())
                if self._wakeup in ready:
                    os.eventfd_read(self._wakeup)
                if ready:
                    pause_s = None
                if ready - {self._wakeup} and not self._owner.receive():
                    break
                pause_s = self._work(pause_s)
            except Exception:  # open transfers must still reach their ends
                logger.exception("unexpected error in the transfer thread: it goes on")
                if self._wait(ERROR_PAUSE_S, []):
                    os.eventfd_read(self._wakeup)
                pause_s = POLL_MIN_S
        self._release()

    def _work(self, pause_s: float | None) -> float | None:
        """Run the queued requests and poll. `pause_s` was the last pause. Returns the next one; None: until there is
        input."""
        while self._requests:
            with self._lock:
                self._transfers.execute([self._requests.popleft()])
        with self._lock:
            progress = self._transfers.take_progress()
        delivered = self._owner.deliver(progress)
        watched = time.monotonic() < self._polled_until
        if watched or self._transfers.moving:
            most_s = longest_pause_s(self._transfers.youngest_s) if self._transfers.moving else IDLE_POLL_S
            if watched:
                most_s = min(most_s, self._polled_pause_s)
            return POLL_MIN_S if pause_s is None else min(POLL_GROWTH * pause_s, most_s)
        return IDLE_POLL_S if self._transfers.busy or not delivered else None

    def _wait(self, pause_s: float | None, filenos: list[int]) -> set[int]:
        """Wait for input for at most `pause_s`. Returns those of `filenos` and `_wakeup` that have input."""
        if pause_s is not None and pause_s < POLL_MAX_S:
            time.sleep(pause_s)  # select.poll rounds up to whole milliseconds
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
