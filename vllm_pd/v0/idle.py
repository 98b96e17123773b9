# SPDX-License-Identifier: Apache-2.0
"""Sleeping while nothing can be scheduled, and being woken for a peer as for a client.

The control thread and the transfer thread wake the step loop where it waits anyway: MQLLMEngine in the poll of its
socket, AsyncLLMEngine in the event of its request tracker, and a bare `LLM` in a short wait before a step.
"""
from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from vllm.engine.async_llm_engine import AsyncLLMEngine


class LoopWakeup:
    """One per engine. `wake` may be called from any thread and never blocks; the rest belongs to the step loop."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._lock = threading.RLock()  # once the pipe is closed, other files may have its numbers
        self._async_engine: weakref.ref[AsyncLLMEngine] | None = None
        self._is_worth_a_step: Callable[[], bool] = bool
        self._poller = zmq.Poller()
        self._poller.register(self._read_fd, zmq.POLLIN)
        self._socket: zmq.Socket | None = None
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None  # for it, in the async loop

    def serve(self, async_engine: AsyncLLMEngine, is_worth_a_step: Callable[[], bool]) -> None:
        """From now on `wake` also sets the event that this engine's background loop waits for, if `is_worth_a_step`
        says so: it is asked in that loop."""
        self._async_engine = weakref.ref(async_engine)
        self._is_worth_a_step = is_worth_a_step

    def wake(self) -> None:
        """Wake the step loop, now or when it next goes to sleep."""
        with self._lock, contextlib.suppress(OSError):  # the pipe is full of wake-ups already, or closed
            os.write(self._write_fd, b"!")
        loop = self._async_loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(self._on_wake)

    def wake_at(self, when: float | None) -> None:
        """Also wake the step loop at that time of the monotonic clock; None: at none. The last call counts."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = when
        loop = self._async_loop() if when is not None else None
        if loop is not None:
            self._timer = loop.call_later(max(0.0, when - time.monotonic()), self._on_wake)

    def wait(self, timeout_s: float, socket: zmq.Socket | None = None) -> bool:
        """Sleep until `wake`, input on the socket, or the end of the time. True where the socket has input."""
        if socket is not self._socket:
            self._watch(socket)
        if self._due is not None:
            timeout_s = min(timeout_s, self._due - time.monotonic())
        ready = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        if self._read_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read_fd, 4096)
        return socket in ready

    def close(self) -> None:
        """Idempotent; a later `wake` does nothing."""
        self._async_engine = None
        with self._lock:
            if self._read_fd >= 0:
                read_fd, self._read_fd = self._read_fd, -1
                write_fd, self._write_fd = self._write_fd, -1
                os.close(read_fd)
                os.close(write_fd)

    def _watch(self, socket: zmq.Socket | None) -> None:
        if self._socket is not None:
            self._poller.unregister(self._socket)
        if socket is not None:
            self._poller.register(socket, zmq.POLLIN)
        self._socket = socket

    def _async_loop(self) -> asyncio.AbstractEventLoop | None:
        engine = self._async_engine() if self._async_engine is not None else None
        task = engine._background_loop_unshielded if engine is not None else None
        return None if task is None else task.get_loop()

    def _on_wake(self) -> None:
        engine = self._async_engine() if self._async_engine is not None else None
        if engine is not None and self._is_worth_a_step():
            engine._request_tracker.new_requests_event.set()
