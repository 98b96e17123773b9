# SPDX-License-Identifier: Apache-2.0
"""The order between what peers write into this device's memory and the kernels that are launched here.

Nothing but the CPU connects the two: it sees a notice (or the end of a read), then launches kernels that read the
blocks. On the host's memory that is an order. For a CUDA device NVIDIA's documents say:

- A kernel sees what was written to the device over PCIe before the CPU launched it. A completion at the network
  adapter does not say that the data has got there: whether it has, for the device that owns the memory, is what
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING tells. NONE: it may not have. OWNER or ALL_DEVICES: it has.
- cuFlushGPUDirectRDMAWrites blocks until it has, where bit HOST of the FLUSH_WRITES_OPTIONS attribute is set.
- Any other call that synchronises with the device is the general way.

UCX and NIXL promise that a notice leaves after the remote side has acknowledged the data, no more: they launch no
kernels. So where the attribute is not at least OWNER, or can't be read, memory is flushed before the step that uses it.
"""
from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from vllm_pd.transfer.requests import Flush, TransferRequest

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.pd")

# Of cuda.h: CUdevice_attribute, CUflushGPUDirectRDMAWritesOptions, ...Target, CUGPUDirectRDMAWritesOrdering.
FLUSH_WRITES_OPTIONS = 117
WRITES_ORDERING = 118
OPTION_HOST = 1
TARGET_CURRENT_CONTEXT = 0
OWNER = 100


class Device(Protocol):
    """The device that holds a rank's KV cache. For the thread that runs the steps."""

    def synchronize(self) -> None:
        """Wait until all that the device was told to do is done."""

    def is_idle(self) -> bool:
        """Whether it is."""

    needs_flush: bool  # before kernels read what a peer has written

    def flush(self) -> None:
        """Kernels that are launched from now on see what had been written when the CPU was told so."""


class Executor(Protocol):
    """A rank's transfers."""

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run the requests that came with a step."""


class HostDevice:
    """The CPU: what it has seen a notice of is there, and nothing runs behind its back."""

    needs_flush = False

    def synchronize(self) -> None:
        """Nothing is queued."""

    def is_idle(self) -> bool:
        """It is, or it would not ask."""
        return True

    def flush(self) -> None:
        """Nothing to do."""


class CudaDevice:
    """The current CUDA device of this process. `cuda` is `torch.cuda`, `driver` the driver's library; for tests."""

    def __init__(self, cuda: torch.cuda, driver: ctypes.CDLL | None = None) -> None:
        self._cuda = cuda
        self._flush: Callable[[], int] | None = None  # None: synchronise instead
        self.needs_flush = True
        try:
            driver = driver or ctypes.CDLL("libcuda.so.1")
            self.needs_flush = self._attribute(driver, WRITES_ORDERING) < OWNER
            if self._attribute(driver, FLUSH_WRITES_OPTIONS) & OPTION_HOST:
                self._flush = lambda: driver.cuFlushGPUDirectRDMAWrites(TARGET_CURRENT_CONTEXT, OWNER)
        except (OSError, AttributeError) as error:
            logger.warning("the CUDA driver can't be asked for the order of remote writes (%s): the device is "
                           "synchronised before each step that uses some", error)
        logger.info("remote writes to this device %s", "are ordered by itself" if not self.needs_flush else
                    "are flushed before use" if self._flush else "are waited for by a synchronisation before use")

    def synchronize(self) -> None:
        """Wait for all streams."""
        self._cuda.synchronize()

    def is_idle(self) -> bool:
        """Whether the stream that runs the steps is empty."""
        return self._cuda.current_stream().query()

    def flush(self) -> None:
        """See `Device`. A flush that fails is replaced by a synchronisation, from then on."""
        if not self.needs_flush:
            return
        if self._flush is not None:
            result = self._flush()
            if result == 0:
                return
            logger.error("cuFlushGPUDirectRDMAWrites failed with %d: the device is synchronised instead", result)
            self._flush = None
        self._cuda.synchronize()

    def _attribute(self, driver: ctypes.CDLL, attribute: int) -> int:
        """Raises OSError where the driver does not know it."""
        device, value = ctypes.c_int(), ctypes.c_int()
        for result in (driver.cuDeviceGet(ctypes.byref(device), self._cuda.current_device()),
                       driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)):
            if result != 0:
                raise OSError(f"error {result} for device attribute {attribute}")
        return value.value


class OrderedTransfer:
    """What a worker calls before a step: flushes where the step needs it, in the thread that launches the kernels, and
    passes the other requests on to `transfer`. Both parts belong to the caller."""

    def __init__(self, transfer: Executor, device: Device) -> None:
        self.transfer = transfer
        self.device = device

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run the requests that came with a step."""
        if any(isinstance(request, Flush) for request in requests):
            self.device.flush()
        rest = [request for request in requests if not isinstance(request, Flush)]
        if rest:
            self.transfer.execute(rest)
