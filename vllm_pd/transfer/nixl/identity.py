# SPDX-License-Identifier: Apache-2.0
"""Whether a connection leads to the agent whose metadata we have.

UCX connects to an address and a port, and nobody says who listens there. So the metadata of an agent that is destroyed
leads to whatever agent listens at its port next: a newer generation of the same engine, which has the same memory at
the same addresses (tests/transfer/test_identity.py: all of a write landed there), or another process. A port comes
again at once where UCX_TCP_PORT_RANGE is small. Then the end of an agent would be no fence.

So each agent registers a few bytes that no other one has, and the first transfer with a peer reads them before anything
else. They are overwritten before the agent is destroyed, and stay where they are as long as the process lives. What
comes later goes through the same connections: one that has ended is not made again, for then the peer is parted.
"""
from __future__ import annotations

import collections
import hashlib

import numpy as np

DIGEST_BYTES = 32
MAX_SLOTS = 1 << 16  # a peer is one rank: those of a thousand engines with the most ranks
_kept: list[np.ndarray] = []


def digest(name: str) -> bytes:
    """What the agent of that name has in its memory."""
    return hashlib.sha256(name.encode()).digest()


class Identity:
    """The bytes of an agent: DIGEST_BYTES at `address`."""

    def __init__(self, name: str) -> None:
        self._memory = np.frombuffer(bytearray(digest(name)), dtype=np.uint8)
        _kept.append(self._memory)
        self.address = int(self._memory.ctypes.data)

    def clear(self) -> None:
        """The agent is about to be destroyed."""
        self._memory.fill(0)


class Proofs:
    """Where the bytes of peers are read to: DIGEST_BYTES each, in `size_bytes` at `address`. A peer has its place, and
    is what it was found to be, until it is forgotten. A place that is free again is used last, for a read of it that
    has failed may land late. `mistaken`: in whose place another agent was found."""

    def __init__(self) -> None:
        self._memory = np.zeros((MAX_SLOTS, DIGEST_BYTES), dtype=np.uint8)
        self.address, self.size_bytes = int(self._memory.ctypes.data), self._memory.nbytes
        self._free = collections.deque(range(MAX_SLOTS))
        self._slots: dict[str, int] = {}
        self._proven: set[str] = set()
        self.mistaken: set[str] = set()

    def is_proven(self, name: str) -> bool:
        """Whether `prove` has been true for it."""
        return name in self._proven

    def slot(self, name: str) -> int:
        """The address for that peer. Raises IndexError where MAX_SLOTS peers have one."""
        if name not in self._slots:
            self._slots[name] = self._free.popleft()
        return self.address + self._slots[name] * DIGEST_BYTES

    def prove(self, name: str) -> bool:
        """Whether what was read is that peer's. Transfers that have begun side by side have all read it."""
        if name not in self._proven:
            is_right = self._memory[self._slots[name]].tobytes() == digest(name)
            (self._proven if is_right else self.mistaken).add(name)
        return name in self._proven

    def forget(self, name: str) -> None:
        """Nothing of it is under way any more."""
        self._proven.discard(name)
        self.mistaken.discard(name)
        if name in self._slots:
            slot = self._slots.pop(name)
            self._memory[slot].fill(0)
            self._free.append(slot)
