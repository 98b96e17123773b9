# SPDX-License-Identifier: Apache-2.0
"""How processes share the slots of an arena, pure: `put`, `lease`, `check`, `drop` as generators.

Each yields what is to be done to the arena, one small operation at a time, and is sent its result.
`vllm_pd.store.arena` does it in shared memory, the simulator of tests/proof in a model in which any process may end
after any operation.

A slot holds one block. Its states:

    free      no sealed header; no lock
    writing   locked exclusively by the process that fills it; no sealed header
    whole     a sealed header, and all bytes of its payload; no lock
    leased    whole, and locked by each process that reads it

Only the holder of the exclusive lock changes a header or a payload. It removes the seal first and sets it last, by one
store of a word. The kernel releases the locks of a process that ends: a slot whose writer ended is free, a slot whose
readers ended is whole. No operation waits: a slot that is locked is left alone, so a process that is stopped holds back
the slots that it has locked and nobody else.

A block can be in the slots of one set only, which its name selects. A new block replaces the least recently used one of
its set. There is no index that could be wrong.
"""
from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from vllm_pd.store.blocks import BlockHeader, BlockKey, recency, seal_of

WAYS = 64  # slots in a set, at least: fewer are full while others are not, more take longer to look through


class SetGeometry(NamedTuple):
    """How many slots an arena has, in sets of `ways`. The last `slots % ways` slots are not used."""
    slots: int
    ways: int

    @classmethod
    def of(cls, slots: int) -> SetGeometry:
        """For an arena of this many slots, at least one. No set has 2 * WAYS."""
        return cls(slots, slots // max(1, slots // WAYS))

    def candidates(self, key: BlockKey) -> range:
        """The slots that this block may be in."""
        first = int.from_bytes(key.name[:8], "little") % (self.slots // self.ways) * self.ways
        return range(first, first + self.ways)


class SlotRecord(NamedTuple):
    """What a slot's header says: the block, None if there is no whole one, and when it was last used, in ns since 1970:
    of a clock that goes on over a restart of the machine, for the file may, too."""
    header: BlockHeader | None
    used_ns: int


class SetScan(NamedTuple):
    """What a quick look at a set says, unchecked. The arrays have an element for each slot, in order, and are the
    caller's own."""
    matches: list[int]  # the slots that seem to hold the block looked for
    is_sealed: np.ndarray  # bool: it seems to hold a block
    used_ns: np.ndarray  # uint64


class ScanSet(NamedTuple):
    """Gives a `SetScan`."""
    slots: range
    key: BlockKey


class ReadRecord(NamedTuple):
    """Gives the `SlotRecord`."""
    slot: int


class LockSlot(NamedTuple):
    """Gives whether the caller has the lock now. It never waits."""
    slot: int
    exclusive: bool


class UpgradeLock(NamedTuple):
    """Make the caller's shared lock exclusive. Gives whether it is: not where anybody else shares it."""
    slot: int


class UnlockSlot(NamedTuple):
    """Gives nothing."""
    slot: int


class Unseal(NamedTuple):
    """Make the header mean nothing, by one store of a word."""
    slot: int


class FillPayload(NamedTuple):
    """Copy the caller's bytes into the slot. Gives their checksum, or None where the caller has no whole block."""
    slot: int
    key: BlockKey
    length: int


class SumPayload(NamedTuple):
    """Gives the checksum of `length` bytes: of what a reader has taken out of the slot, or of the slot itself."""
    slot: int
    key: BlockKey
    length: int


class WriteFields(NamedTuple):
    """Write the header's fields; it means nothing yet."""
    slot: int
    header: BlockHeader


class SetSeal(NamedTuple):
    """Make the header valid, by one store of a word."""
    slot: int
    seal: int


class TouchSlot(NamedTuple):
    """Note that the block was used."""
    slot: int
    now_ns: int


class PutResult(Enum):
    """What has become of a block that was put."""
    STORED = "stored"
    PRESENT = "present"  # it is there already
    BUSY = "busy"  # all slots that it may be in are locked: not stored
    TORN = "torn"  # there was no whole block to store


Steps = Generator[NamedTuple, Any, Any]


def put(geometry: SetGeometry, key: BlockKey, length: int, now_ns: int) -> Steps:
    """Store a block of `length` bytes. Returns a `PutResult`."""
    candidates = geometry.candidates(key)
    scan = yield ScanSet(candidates, key)
    for slot in scan.matches:
        header = (yield ReadRecord(slot)).header
        if header is not None and (header.key, header.length) == (key, length):
            yield TouchSlot(slot, now_ns)
            return PutResult.PRESENT
    not_ahead, used = recency(scan.used_ns, now_ns)
    for index in np.lexsort((used, not_ahead, scan.is_sealed)):
        slot, used_ns = candidates[index], int(scan.used_ns[index])
        if not (yield LockSlot(slot, True)):
            continue
        record = yield ReadRecord(slot)
        if record.header is not None and record.used_ns != used_ns:  # filled or used meanwhile
            yield UnlockSlot(slot)
            continue
        yield Unseal(slot)
        checksum = yield FillPayload(slot, key, length)
        if checksum is None:
            yield UnlockSlot(slot)
            return PutResult.TORN
        header = BlockHeader(key, length, checksum)
        yield WriteFields(slot, header)
        yield TouchSlot(slot, now_ns)
        yield SetSeal(slot, seal_of(header.encode()))
        yield UnlockSlot(slot)
        return PutResult.STORED
    return PutResult.BUSY


def lease(geometry: SetGeometry, key: BlockKey, length: int, now_ns: int) -> Steps:
    """Find a block and lock it against being replaced. Returns its slot, or None: it is not there, or is being written.
    The caller yields `UnlockSlot` for it, or ends."""
    for slot in (yield ScanSet(geometry.candidates(key), key)).matches:
        if not (yield LockSlot(slot, False)):
            continue
        record = yield ReadRecord(slot)
        if record.header is not None and record.header.key == key and record.header.length == length:
            yield TouchSlot(slot, now_ns)
            return slot
        yield UnlockSlot(slot)
    return None


def check(slot: int, key: BlockKey, length: int) -> Steps:
    """Whether the bytes taken out of a leased slot are those that were put. Where not, the lease is over and the block
    is removed, unless others read it: they will find out."""
    record = yield ReadRecord(slot)
    checksum = yield SumPayload(slot, key, length)
    if record.header == BlockHeader(key, length, checksum):
        return True
    yield from drop(slot)
    return False


def drop(slot: int) -> Steps:
    """End the caller's lease of a slot, and remove the block, unless others read it."""
    if (yield UpgradeLock(slot)):
        yield Unseal(slot)
    yield UnlockSlot(slot)
