# SPDX-License-Identifier: Apache-2.0
"""`CudaCache`: a KV cache on a GPU as the store's copies use it. The order between them is `DeviceCopies`'s."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_pd.errors import ConfigError

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # kernels copy elements, so as long ones as can be


class CudaCache:
    """Implements `DeviceCache`. Owns two streams, a buffer on the device and one in pinned memory, `buffer_bytes` each
    at most, and a block of pinned memory."""

    def __init__(self, parts: Sequence[torch.Tensor], buffer_bytes: int) -> None:
        """`parts`: bytes [block, byte] of each layer, as from `byte_rows`. Raises ConfigError where no block fits."""
        size = sum(part.shape[1] for part in parts)
        self.rows = buffer_bytes // size
        if not self.rows:
            raise ConfigError("pinned_gib", round(buffer_bytes / 2**30, 6),
                              f"a block has {size} bytes, and not one fits: give more")
        self._device = parts[0].device
        with torch.inference_mode():
            self._parts = [_in_words(part) for part in parts]
            self._gathered = [torch.empty(self.rows, part.shape[1], dtype=part.dtype, device=part.device)
                              for part in self._parts]
            self._pinned = [_pinned(self.rows, part) for part in self._parts]
            self._load = [_pinned(1, part) for part in self._parts]
            self._pinned_ids = torch.empty(self.rows, dtype=torch.int64).pin_memory()
            self._device_ids = torch.empty(self.rows, dtype=torch.int64, device=self._device)
        self._ids = self._pinned_ids.numpy()  # of the blocks in each row: it is theirs as long as the row is
        self._rows = [part.view(torch.uint8).numpy() for part in self._pinned]
        self._loaded = [part.view(torch.uint8).numpy()[0] for part in self._load]
        self._out, self._in = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)

    def use(self) -> None:
        """See `DeviceCache`."""
        torch.cuda.set_device(self._device)

    @torch.inference_mode()
    def gather(self, block_ids: Sequence[int], first_row: int) -> torch.cuda.Event:
        """See `DeviceCache`."""
        rows = slice(first_row, first_row + len(block_ids))
        self._ids[rows] = block_ids
        self._device_ids[rows].copy_(self._pinned_ids[rows], non_blocking=True)
        for part, gathered in zip(self._parts, self._gathered, strict=True):
            torch.index_select(part, 0, self._device_ids[rows], out=gathered[rows])
        return torch.cuda.current_stream(self._device).record_event()

    @torch.inference_mode()
    def copy_out(self, first_row: int, count: int, after: torch.cuda.Event) -> torch.cuda.Event:
        """See `DeviceCache`."""
        self._out.wait_event(after)
        with torch.cuda.stream(self._out):
            for rows, pinned in zip(self._gathered, self._pinned, strict=True):
                pinned[first_row:first_row + count].copy_(rows[first_row:first_row + count], non_blocking=True)
        return self._out.record_event(torch.cuda.Event(blocking=True))

    @torch.inference_mode()
    def copy_in(self, block_id: int, after: torch.cuda.Event | None) -> torch.cuda.Event:
        """See `DeviceCache`."""
        if after is not None:
            self._in.wait_event(after)
        with torch.cuda.stream(self._in):
            for part, pinned in zip(self._parts, self._load, strict=True):
                part[block_id].copy_(pinned[0], non_blocking=True)
        return self._in.record_event(torch.cuda.Event(blocking=True))

    def wait(self, event: torch.cuda.Event) -> None:
        """See `DeviceCache`."""
        event.synchronize()

    def row(self, row: int) -> Sequence[np.ndarray]:
        """See `DeviceCache`."""
        return [part[row] for part in self._rows]

    def loaded(self) -> Sequence[np.ndarray]:
        """See `DeviceCache`."""
        return self._loaded


def _pinned(rows: int, part: torch.Tensor) -> torch.Tensor:
    return torch.empty(rows, part.shape[1], dtype=part.dtype).pin_memory()


def _in_words(part: torch.Tensor) -> torch.Tensor:
    """The same bytes in longer elements."""
    for word in WORDS:
        if not (part.stride(0) % word.itemsize or part.shape[1] % word.itemsize
                or part.storage_offset() % word.itemsize or part.data_ptr() % word.itemsize):
            return part.view(word)
    raise AssertionError("a byte is an element")
