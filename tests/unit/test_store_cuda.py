# SPDX-License-Identifier: Apache-2.0
"""`CudaCache` with torch's CPU tensors and a stand-in for its streams: which bytes go where. What a GPU does with it
is shown by part `store-copies` of scripts/lab/gpu_check.py."""
from __future__ import annotations

import contextlib

import pytest
import torch

from vllm_pd.errors import ConfigError
from vllm_pd.store.cuda import CudaCache
from vllm_pd.store.worker import byte_rows


class AtOnce:
    """A stream whose work is done at once, and its event."""

    def __init__(self, device: object = None, blocking: bool = False) -> None: ...

    def wait_event(self, event: AtOnce) -> None: ...

    def record_event(self, event: AtOnce | None = None) -> AtOnce:
        return self

    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", AtOnce)
    monkeypatch.setattr(torch.cuda, "Event", AtOnce)
    monkeypatch.setattr(torch.cuda, "current_stream", AtOnce)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def layers(axes: str) -> list[torch.Tensor]:
    """Three layers with six blocks, each [2 heads, 2 tokens, 3 elements], made as vLLM makes them."""
    with torch.inference_mode():
        if axes == "blocks first":
            cache = torch.arange(6 * 3 * 12, dtype=torch.int16).view(6, 3, 2, 2, 3)
            return [cache[:, layer] for layer in range(3)]
        return [torch.arange(72, dtype=torch.int16).view(6, 2, 2, 3) + 1000 * layer for layer in range(3)]


@pytest.mark.parametrize("axes", ["blocks first", "layers first"])
def test_b104_a_block_goes_out_and_in(axes: str):
    """B104: in one piece or in one for each layer, the bytes are the same."""
    views = layers(axes)
    parts = byte_rows(views)
    cache = CudaCache(parts, 3 * 72)
    assert cache.rows == 3 and len(parts) == (1 if axes == "blocks first" else 3)
    cache.use = None
    cache.wait(cache.copy_out(1, 2, cache.gather([5, 2], 1)))
    for row, block in ((1, 5), (2, 2)):
        stored = b"".join(bytes(part) for part in cache.row(row))
        assert stored == b"".join(view[block].contiguous().numpy().tobytes() for view in views)
    for part, into in zip(cache.row(1), cache.loaded(), strict=True):
        into[:] = part
    cache.wait(cache.copy_in(0, None))
    assert all(torch.equal(view[0], view[5]) for view in views)


def test_less_memory_than_a_block_is_refused():
    with pytest.raises(ConfigError, match="a block has 72 bytes, and not one fits: give more"):
        CudaCache(byte_rows(layers("layers first")), 71)
