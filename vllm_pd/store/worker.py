# SPDX-License-Identifier: Apache-2.0
"""The worker's end of the store: copies blocks between V1's cache, in host memory, and the store.

Blocks are put in the worker's main thread, after the step that filled them and before the next one, so nothing writes
them meanwhile; and only if that step, and all before it, were computed whole.

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
from vllm_pd.store.loads import BlockLoad, BlockLoader, EndedLoads
from vllm_pd.store.plan import NamedBlock
from vllm_pd.store.steps import WholeSteps
from vllm_pd.store.store import CLOSE_S, BlockStore

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vllm_pd.protocol.messages import Fingerprint

logger = logging.getLogger("vllm.pd")


def model_of(fingerprint: Fingerprint, rank: int, release: str, weights: str) -> bytes:
    """The `model` of a `BlockKey`: all that decides what the bytes of a block of this rank mean. `release`: of vLLM,
    whole; the fingerprint has only its beginning, and files outlive an engine. `weights`: as from `weights_state`."""
    return hashlib.sha256(msgspec.json.encode([fingerprint, rank, release, weights])).digest()[:MODEL_BYTES]


def block_parts(views: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Each layer's cache as bytes [block, byte], over the same memory. `views`: [blocks, heads, tokens, content] of
    each layer. Raises ConfigError for a cache that is not in host memory, or where a layer's part of a block is in
    pieces."""
    import torch
    parts = []
    for view in views:
        if view.device.type != "cpu":
            raise ConfigError("device", view.device.type, "serve on the CPU platform: the store is not connected to "
                              "caches on a device yet")
        if not view[0].is_contiguous():
            raise ConfigError("kv_cache", f"strides {view.stride()}", "choose an attention backend in whose cache a "
                              "layer's part of a block is one piece")
        rows = view.as_strided((view.shape[0], view[0].numel()), (view.stride(0), 1)).view(torch.uint8).numpy()
        parts.append(rows)
    return parts


class StoreWorker:
    """One rank's cache and the store. All methods are for the worker's main thread. Owns the store and a thread."""

    def __init__(self, settings: StoreSettings, model: bytes, parts: Sequence[np.ndarray],
                 layers: Sequence[str]) -> None:
        """`model`: as from `model_of`. `parts`: as from `block_parts`, of the layers with these names. Raises
        ConfigError."""
        self.slot_bytes = sum(part.shape[1] for part in parts)
        self.store = BlockStore(settings, self.slot_bytes)
        self._model = model
        self._parts = parts
        self.steps = WholeSteps(layers)
        self.is_on = True  # until `stop`; to be read only
        self._taken: Counter[str] = Counter()
        self.loader = BlockLoader(self._load_block)

    def end_step(self, step: int, has_tokens: bool, blocks: Sequence[NamedBlock]) -> None:
        """Put the blocks that this step has filled, unless it or one before it was not computed whole."""
        if not self.steps.end(step, has_tokens):
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
        for block in reversed(blocks):
            self.store.put(BlockKey(self._model, block.name), self._rows(block))

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
        if self.loader.close(CLOSE_S):
            self.store.close()
        else:
            logger.warning("store: the disk does not answer: the slots stay mapped until this process ends")

    def _load_block(self, block: NamedBlock, load: BlockLoad) -> bool:
        return self.store.get(BlockKey(self._model, block.name), self._rows(block), load)

    def _rows(self, block: NamedBlock) -> list[np.ndarray]:
        return [part[block.block_id] for part in self._parts]
