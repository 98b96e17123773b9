# SPDX-License-Identifier: Apache-2.0
"""The worker's end of the store: copies blocks between V1's cache and the store (`vllm_pd.store.copies`).

Blocks are put after the step that filled them and before the next one, so nothing writes them meanwhile; and only if
that step, and all before it, were computed whole.

Loads run in a thread of their own: V1 keeps the blocks of a request that waits for its KV away from everybody else
until it is reported, and gives them no hash before. What has arrived in them is checked there. Where one block is
missing, wrong or overdue, the whole load has failed, and V1 frees the blocks and begins the request anew.
"""
from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_pd.errors import ConfigError
from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.blocks import MODEL_BYTES, BlockKey
from vllm_pd.store.copies import BlockCopies, CacheBlock, DeviceCopies, HostCopies
from vllm_pd.store.loads import BlockLoad, BlockLoader, EndedLoads
from vllm_pd.store.plan import NamedBlock
from vllm_pd.store.steps import WholeSteps
from vllm_pd.store.store import CLOSE_S, BlockStore

if TYPE_CHECKING:
    import torch

    from vllm_pd.protocol.messages import Fingerprint

logger = logging.getLogger("vllm.pd")


def model_of(fingerprint: Fingerprint, rank: int, release: str, weights: str) -> bytes:
    """The `model` of a `BlockKey`: all that decides what the bytes of a block of this rank mean. `release`: of vLLM,
    whole; the fingerprint has only its beginning, and files outlive an engine. `weights`: as from `weights_state`."""
    return hashlib.sha256(msgspec.json.encode([fingerprint, rank, release, weights])).digest()[:MODEL_BYTES]


def byte_rows(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each layer's cache as bytes [block, byte], over the same memory. `views`: [blocks, heads, tokens, content] of
    each layer. Layers that are neighbours in each block are one part. Raises ConfigError where a layer's part of a
    block is in pieces, and for caches that are neither in host memory nor on a CUDA device."""
    import torch
    parts: list[torch.Tensor] = []
    for view in views:
        if view.device.type not in ("cpu", "cuda"):
            raise ConfigError("device", view.device.type, "serve on the CPU or on CUDA: the store is not connected to "
                              "other devices")
        if not view[0].is_contiguous():
            raise ConfigError("kv_cache", f"strides {view.stride()}", "choose an attention backend in whose cache a "
                              "layer's part of a block is one piece")
        rows = view.as_strided((view.shape[0], view[0].numel()), (view.stride(0), 1)).view(torch.uint8)
        if parts and _follows(rows, parts[-1]):
            last = parts.pop()
            rows = last.as_strided((rows.shape[0], last.shape[1] + rows.shape[1]), (last.stride(0), 1))
        parts.append(rows)
    return parts


def _follows(rows: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether each row begins where the same row of the other ends, and both fit between two rows."""
    return (rows.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
            and rows.storage_offset() == before.storage_offset() + before.shape[1]
            and rows.stride(0) == before.stride(0) >= before.shape[1] + rows.shape[1]
            and rows.shape[0] == before.shape[0])


class StoreWorker:
    """One rank's cache and the store. All methods are for the worker's main thread. Owns the store and a thread."""

    def __init__(self, settings: StoreSettings, model: bytes, parts: Sequence[torch.Tensor],
                 layers: Sequence[str]) -> None:
        """`model`: as from `model_of`. `parts`: as from `byte_rows`. `layers`: those that report each step. Raises
        ConfigError."""
        self.slot_bytes = sum(part.shape[1] for part in parts)
        self.on_device = parts[0].device.type != "cpu"
        self.store = BlockStore(settings, self.slot_bytes)
        try:
            self.copies = self._copies(settings, parts)
        except BaseException:
            self.store.close()
            raise
        self._model = model
        self.steps = WholeSteps(() if self.on_device else layers)
        self.is_on = True  # until `stop`; to be read only
        self._taken: Counter[str] = Counter()
        self.loader = BlockLoader(self._load_block)

    def end_step(self, step: int, has_tokens: bool, blocks: Sequence[NamedBlock], raised: bool = False) -> None:
        """Put the blocks that this step has filled, unless it or one before it was not computed whole. `raised`:
        whether an exception leaves it."""
        if not self.steps.end(step, has_tokens, raised):
            self.stop(f"step {step} was not computed whole")
        elif self.is_on:
            self.put(blocks)

    def stop(self, why: str) -> None:
        """From now on nothing is put, and all loads fail, also those that have begun. May be called again."""
        if self.is_on:
            self.is_on = False
            logger.warning("store: %s: this engine uses the store no more", why)
        self.loader.fail_all()

    def put(self, blocks: Sequence[NamedBlock]) -> None:
        """Copy computed blocks into the store. The end of a prompt first: it is then replaced first."""
        self.copies.put([self._named(block) for block in reversed(blocks)])

    def stop_loads(self, request_ids: Collection[str]) -> None:
        """The loads of these requests, which are gone, fail after the block that each is at."""
        self.loader.fail(request_ids)

    def begin_loads(self, loads: Mapping[str, Sequence[NamedBlock]]) -> None:
        """Begin to load the blocks of these requests."""
        for request_id, blocks in loads.items():
            self.loader.begin(request_id, blocks)
        if not self.is_on:
            self.loader.fail_all()

    def take_ended(self) -> EndedLoads:
        """The loads that have ended since the last call."""
        return self.loader.take_ended()

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call: blocks by `BLOCK_EVENTS`, loads by `LOAD_OUTCOMES`."""
        counts = self.store.take_stock() + self.loader.counts
        new, self._taken = counts - self._taken, counts
        return dict(new)

    def close(self) -> None:
        """End the thread after the block that it is at, and give the store back. Idempotent."""
        if self.loader.close(CLOSE_S) and self.copies.close(CLOSE_S):
            self.store.close()
        else:
            logger.warning("store: the disk or the device does not answer: the slots stay mapped until this process "
                           "ends")

    def _copies(self, settings: StoreSettings, parts: Sequence[torch.Tensor]) -> BlockCopies:
        if not self.on_device:
            return HostCopies(self.store, [part.numpy() for part in parts])
        from vllm_pd.store.cuda import CudaCache
        try:
            return DeviceCopies(self.store, CudaCache(parts, settings.pinned_bytes))
        except RuntimeError as error:  # torch.OutOfMemoryError is one; so is what CUDA says of pinned memory
            raise ConfigError("pinned_gib", settings.pinned_gib, "neither the host nor the GPU has so much memory left "
                              f"({str(error).splitlines()[0]}): write less, or a smaller --gpu-memory-utilization"
                              ) from error

    def _load_block(self, block: NamedBlock, load: BlockLoad) -> bool:
        return self.copies.load(self._named(block), load)

    def _named(self, block: NamedBlock) -> CacheBlock:
        return CacheBlock(BlockKey(self._model, block.name), block.block_id)
