# SPDX-License-Identifier: Apache-2.0
"""The order between a peer's writes into this device's memory and the kernels that read them here.

Only the CPU connects the two: it sees a notice, or the end of a read, and then launches kernels that read the blocks.
For memory of the host that is enough. For a CUDA device NVIDIA's documents say:

- A kernel sees what arrived at the device over PCIe before the CPU launched the kernel. But a completion at the network
  adapter does not prove that the data has arrived at the device that owns the memory. The attribute
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING says whether it has: with OWNER or ALL_DEVICES yes, with NONE
  perhaps not.
- cuFlushGPUDirectRDMAWrites blocks until it has, if bit HOST of the FLUSH_WRITES_OPTIONS attribute is set.
- Any other call that synchronises with the device works too.

UCX and NIXL promise only that a notice leaves after the remote side has acknowledged the data. So if the attribute is
less than OWNER, or can't be read, the memory is flushed before the step that uses it.
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
    """The device that holds a rank's KV cache. Only for the thread that runs the steps."""

    needs_flush: bool  # whether `flush` is needed before kernels read what a peer has written

    def synchronize(self) -> None:
        """Wait until the device has finished all work that was given to it."""

    def is_idle(self) -> bool:
        """Whether the device has finished all work that was given to it."""

    def flush(self) -> None:
        """Make everything that peers have written visible to the kernels that are launched from now on."""

    def record(self) -> DeviceEvent:
        """An event that is done when the device has finished all work that the stream of the steps was given."""


class DeviceEvent(Protocol):
    """A point in the work of a device. May be used in any thread."""

    def query(self) -> bool:
        """Whether the device has got there."""


class RequestExecutor(Protocol):
    """Runs the transfer requests of a rank."""

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run the requests that came with a step, in order."""


class HostDevice:
    """The CPU. It sees the data of every notice, and runs no work in the background."""

    needs_flush = False

    def synchronize(self) -> None:
        """Return at once: the CPU queues no work."""

    def is_idle(self) -> bool:
        """True: the calling thread is the one that computes."""
        return True

    def flush(self) -> None:
        """Do nothing."""

    def record(self) -> DeviceEvent:
        """An event that is done."""
        return _DoneEvent()


class _DoneEvent:
    def query(self) -> bool:
        return True


class CudaDevice:
    """The current CUDA device of this process. `cuda` is `torch.cuda`. `driver` is the CUDA driver's library; tests
    pass a fake one."""

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
            logger.warning("can't read the ordering of remote writes from the CUDA driver (%s): the device is "
                           "synchronised before each step that uses such writes", error)
        logger.info("remote writes to this device: %s", "the device orders them" if not self.needs_flush else
                    "flushed before use" if self._flush else "the device is synchronised before use")

    def synchronize(self) -> None:
        """Wait for all streams."""
        self._cuda.synchronize()

    def is_idle(self) -> bool:
        """Whether the stream that runs the steps is empty."""
        return self._cuda.current_stream().query()

    def flush(self) -> None:
        """See `Device`. After a flush has failed, synchronise instead from then on."""
        if not self.needs_flush:
            return
        if self._flush is not None:
            result = self._flush()
            if result == 0:
                return
            logger.error("cuFlushGPUDirectRDMAWrites failed with %d: the device is synchronised instead", result)
            self._flush = None
        self._cuda.synchronize()

    def record(self) -> DeviceEvent:
        """See `Device`."""
        event = self._cuda.Event()
        event.record()
        return event

    def _attribute(self, driver: ctypes.CDLL, attribute: int) -> int:
        """The value of a device attribute. Raises OSError if the driver does not know it."""
        device, value = ctypes.c_int(), ctypes.c_int()
        for result in (driver.cuDeviceGet(ctypes.byref(device), self._cuda.current_device()),
                       driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)):
            if result != 0:
                raise OSError(f"error {result} for device attribute {attribute}")
        return value.value


class OrderedTransfer:
    """A worker calls this before a step. It runs `Flush` requests on `device`, in the thread that launches the kernels,
    and passes all other requests to `transfer`. The caller keeps the ownership of both."""

    def __init__(self, transfer: RequestExecutor, device: Device) -> None:
        self.transfer = transfer
        self.device = device

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run the requests that came with a step, flushes first."""
        if any(isinstance(request, Flush) for request in requests):
            self.device.flush()
        rest = [request for request in requests if not isinstance(request, Flush)]
        if rest:
            self.transfer.execute(rest)
