# SPDX-License-Identifier: Apache-2.0
"""The memory into which other hosts write, and the NIXL agent that lets them.

Nothing of it is believed: a block is checked where it has arrived in the arena. The memory stays as it is until the end
of the process. A server on the same machine may write into it by the kernel, without an agent of ours, and so may what
was under way when the agent ended.
"""
from __future__ import annotations

import contextlib

import numpy as np

from vllm_pd.errors import TransferError
from vllm_pd.store.arena import PAGE
from vllm_pd.transfer.layout import Memory
from vllm_pd.transfer.nixl.agent import NixlAgent
from vllm_pd.transfer.nixl.identity import DIGEST_BYTES, Identity, Proofs

_kept: list[np.ndarray] = []


class StagingMemory:
    """Rows of `row_bytes` bytes. Owned by the process."""

    def __init__(self, row_bytes: int, size_bytes: int) -> None:
        """As many rows as fit. Pages are taken when they are first written to."""
        self.rows = size_bytes // row_bytes
        self._memory = np.zeros(self.rows * row_bytes + PAGE, dtype=np.uint8)
        self._row_bytes = row_bytes
        start = int(self._memory.ctypes.data)
        self._skipped = -start % PAGE
        self.address, self.size_bytes = start + self._skipped, self.rows * row_bytes
        _kept.append(self._memory)

    def address_of(self, row: int) -> int:
        """Where a row is."""
        return self.address + row * self._row_bytes

    def row(self, row: int, length: int) -> np.ndarray:
        """Its first `length` bytes."""
        start = self._skipped + row * self._row_bytes
        return self._memory[start:start + length]


class BlockAgent:
    """The NIXL agent of an engine's far store, with what it has registered: the arena, if it is served, and the staging
    memory, if others are asked. Raises TransferError where there can be none."""

    def __init__(self, name: str, host: str, regions: list[tuple[int, int]]) -> None:
        """`regions`: (address, bytes) of what the agent of another host writes to, or this one reads."""
        self.name = name
        self.nixl = NixlAgent(name, progress_thread=True, host=host)
        self._identity, self.proofs = Identity(name), Proofs()
        self.identity = self._identity.address
        own = [(self.identity, DIGEST_BYTES), (self.proofs.address, self.proofs.size_bytes)]
        self._registered = self.nixl.register([(*region, 0) for region in (*regions, *own)], Memory.DRAM)
        self.metadata = self.nixl.metadata()

    def close(self) -> None:
        """End the agent. Idempotent."""
        if self._registered is None:
            return
        self._identity.clear()
        with contextlib.suppress(TransferError):
            self.nixl.deregister(self._registered)
        self._registered = None
        self.nixl.destroy()
