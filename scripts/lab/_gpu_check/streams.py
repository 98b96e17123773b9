# SPDX-License-Identifier: Apache-2.0
"""Work that a device does while the CPU goes on: steps of an engine in order, and kernels beside them.

`CudaSteps` has a stream of the GPU. `HostSteps` stands for it where there is none: a thread that works off a queue, so
that what the checks find without waiting can be found on the CPU as well.
"""
from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from vllm_pd.transfer.device import CudaDevice, Device

STEP_S = 0.02  # how long a step computes before it writes its blocks
JOIN_S = 10.0
MATRIX = {"cuda": 2048, "cpu": 128}
AHEAD = 8  # products that the busy stream is given at a time


class StepQueue(Protocol):
    """The steps of an engine: given in order, done in order, while the caller goes on."""

    device: Device

    def launch(self, work: Callable[[], object]) -> None:
        """Give the device a step: STEP_S of computing, then `work`, which launches kernels that write."""

    def output(self) -> Callable[[], None]:
        """Have the last step's sampled tokens copied to the host. What is returned waits for that copy: an engine that
        has processed the step's output has waited so."""

    def close(self) -> None:
        """Wait for all steps."""


class CudaSteps:
    """A stream of the current GPU, which the calling thread uses from now on."""

    def __init__(self) -> None:
        self.device = CudaDevice(torch.cuda)
        torch.cuda.set_stream(torch.cuda.Stream())
        self._copies = torch.cuda.Stream()
        self._factor = torch.eye(MATRIX["cuda"], device="cuda")
        self._products = self._products_in(STEP_S)
        self._sampled = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._on_host = torch.zeros(1, dtype=torch.int64, pin_memory=True)

    def launch(self, work: Callable[[], object]) -> None:
        """See StepQueue."""
        for _ in range(self._products):
            torch.mm(self._factor, self._factor)
        work()
        self._sampled += 1

    def output(self) -> Callable[[], None]:
        """See StepQueue. As in V1 with async scheduling: on a stream of its own, behind the step's."""
        computed = torch.cuda.Event()
        computed.record()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            self._on_host.copy_(self._sampled, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return copied.synchronize

    def close(self) -> None:
        """See StepQueue."""
        torch.cuda.synchronize()

    def _products_in(self, seconds: float) -> int:
        """How many products this GPU makes in that time."""
        torch.mm(self._factor, self._factor)
        torch.cuda.synchronize()
        began_s, count = time.monotonic(), 20
        for _ in range(count):
            torch.mm(self._factor, self._factor)
        torch.cuda.synchronize()
        return max(1, int(seconds * count / (time.monotonic() - began_s)))


class HostSteps:
    """A thread that does the steps. It is its own `device`."""

    needs_flush = False

    def __init__(self) -> None:
        self.device: Device = self
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="steps", daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], object]) -> None:
        """See StepQueue."""
        self._queue.put(lambda: (time.sleep(STEP_S), work()))

    def output(self) -> Callable[[], None]:
        """See StepQueue."""
        return self.synchronize

    def close(self) -> None:
        """See StepQueue."""
        self._queue.put(None)
        self._thread.join(JOIN_S)

    def synchronize(self) -> None:
        """See Device."""
        self.record().wait()

    def is_idle(self) -> bool:
        """See Device."""
        return self.record().query()

    def flush(self) -> None:
        """See Device. Memory of the host needs none."""

    def record(self) -> _HostEvent:
        """See Device."""
        event = _HostEvent()
        self._queue.put(event.reach)
        return event

    def _main(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


class _HostEvent:
    """A point in the work of a `HostSteps`."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        self._reached.wait(JOIN_S)


class BusyKernels:
    """Kernels without end on a stream of their own: matrix products, and one that adds 1 to each element of `block`, as
    a step's kernels write to blocks beside those that are transferred."""

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block
        self._on_gpu = block.is_cuda
        self._closing = threading.Event()
        self._turns = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._main, name="busy", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """How often the block was increased. Raises what the kernels raised."""
        self._closing.set()
        self._thread.join(JOIN_S)
        if self._error is not None:
            raise self._error
        return self._turns

    def _main(self) -> None:
        try:
            if self._on_gpu:
                torch.cuda.set_device(self._block.device)
                with torch.cuda.stream(torch.cuda.Stream()):
                    self._run()
            else:
                self._run()
        except Exception as error:
            self._error = error

    def _run(self) -> None:
        matrix = torch.eye(MATRIX[self._block.device.type], device=self._block.device)
        while not self._closing.is_set():
            for _ in range(AHEAD):
                matrix = matrix @ matrix
            self._block += 1
            self._turns += 1
            if self._on_gpu:
                torch.cuda.current_stream().synchronize()
            else:
                time.sleep(0)  # the transfers may need this core
