# SPDX-License-Identifier: Apache-2.0
"""An arena in a model, and processes that put and read blocks in it until they are killed, at any operation.

Payloads, and the header's fields, are written and read in pieces: other processes act between two of them, and a
killed process leaves what it has written. `ArenaModel.look` says what is wrong in the arena.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from vllm_pd.store import slots
from vllm_pd.store.blocks import BlockHeader, BlockKey, seal_of
from vllm_pd.store.slots import SetGeometry, SlotRecord

PIECES = 4
LENGTH = 4096
MODEL = b"m" * 16


def key_of(number: int) -> BlockKey:
    """The key of a block. Blocks of one residue of the number of sets meet in one set."""
    return BlockKey(MODEL, number.to_bytes(8, "little").ljust(32, b"n"))


def right_pieces(key: BlockKey) -> list[object]:
    """What a payload of this key consists of."""
    return [(key.name, piece) for piece in range(PIECES)]


def checksum_of(key: BlockKey, length: int, pieces: list[object]) -> int:
    """The model's checksum."""
    return hash((key, length, *pieces)) & (1 << 64) - 1


@dataclass
class ModelSlot:
    """The memory of a slot and its locks: `writer` a process, `readers` processes."""
    header: BlockHeader | None = None
    seal: int = 0
    used_ns: int = 0
    pieces: list[object] = field(default_factory=lambda: [None] * PIECES)
    writer: int | None = None
    readers: list[int] = field(default_factory=list)
    leased_pieces: list[object] | None = None
    damaged: bool = False  # by something that is no process of ours

    def record(self) -> SlotRecord:
        """As read from its memory."""
        whole = self.header is not None and self.seal == seal_of(self.header.encode())
        return SlotRecord(self.header if whole else None, self.used_ns)


class ArenaModel:
    """The slots, and what a process does to them."""

    def __init__(self, geometry: SetGeometry) -> None:
        self.geometry = geometry
        self.slots = [ModelSlot() for _ in range(geometry.slots)]

    def do(self, process: int, step: object, taken: list[object]) -> Iterator[object]:
        """The operation as a generator: others may act at each yield. Returns its result. `taken` gets the pieces that
        a reader copies."""
        if isinstance(step, slots.ScanSet):
            return self._scan(step)
        slot = self.slots[step.slot]
        match step:
            case slots.ReadRecord():
                return slot.record()
            case slots.LockSlot():
                return self.lock(slot, process, step.exclusive)
            case slots.UpgradeLock():
                if slot.readers != [process]:
                    return False
                slot.readers, slot.writer, slot.leased_pieces = [], process, None
                return True
            case slots.UnlockSlot():
                self.unlock(slot, process)
            case slots.Unseal():
                slot.seal = 0
            case slots.SetSeal():
                slot.seal = step.seal
            case slots.TouchSlot():
                slot.used_ns = step.now_ns
            case slots.WriteFields():
                slot.header = None  # half of it
                yield
                slot.header = step.header
            case slots.FillPayload():
                slot.damaged = False
                for piece, value in enumerate(right_pieces(step.key)):
                    slot.pieces[piece] = value
                    yield
                return checksum_of(step.key, step.length, right_pieces(step.key))
            case slots.SumPayload():
                for piece in range(PIECES):
                    taken.append(slot.pieces[piece])
                    yield
                return checksum_of(step.key, step.length, taken)
        return None

    def _scan(self, step: slots.ScanSet) -> slots.SetScan:
        """From memory as it is: a name may be of another time than its seal."""
        found = [self.slots[number] for number in step.slots]
        matches = [number for number, slot in zip(step.slots, found, strict=True)
                   if slot.seal and slot.header is not None and slot.header.key.name[:8] == step.key.name[:8]]
        return slots.SetScan(matches, np.array([slot.seal != 0 for slot in found]),
                             np.array([slot.used_ns for slot in found], np.uint64))

    def lock(self, slot: ModelSlot, process: int, exclusive: bool) -> bool:
        """What the kernel does at a lock."""
        if slot.writer is not None or (exclusive and slot.readers):
            return False
        if exclusive:
            slot.writer = process
        else:
            slot.readers.append(process)
            slot.leased_pieces = list(slot.pieces)
        return True

    def unlock(self, slot: ModelSlot, process: int) -> None:
        """What the kernel does at an unlock, and at the end of a process."""
        if slot.writer == process:
            slot.writer = None
        if process in slot.readers:
            slot.readers.remove(process)
        if not slot.readers:
            slot.leased_pieces = None

    def end(self, process: int) -> None:
        """The process has ended: the kernel releases its locks."""
        for slot in self.slots:
            while slot.writer == process or process in slot.readers:
                self.unlock(slot, process)

    def damage(self, rng: random.Random) -> None:
        """A stray store into a payload."""
        slot = rng.choice(self.slots)
        slot.pieces[rng.randrange(PIECES)] = "stray"
        slot.damaged = True

    def look(self) -> str | None:
        """What is wrong, if anything: a block that can be seen and is not whole, a leased one that changed."""
        for number, slot in enumerate(self.slots):
            header = slot.record().header
            if slot.damaged:
                continue
            if slot.writer is None and header is not None and slot.pieces != right_pieces(header.key):
                return f"slot {number} can be seen and is not whole: {slot.pieces}"
            if slot.leased_pieces is not None and slot.leased_pieces != slot.pieces:
                return f"slot {number} changed while {slot.readers} read it"
        return None


@dataclass
class ModelRules:
    """What the processes do; a test puts a broken one in its place."""
    put: Callable = slots.put
    lease: Callable = slots.lease
    check: Callable = slots.check


@dataclass
class SlotsOutcome:
    """What happened in a run. `broken`: the first thing that was wrong."""
    broken: str | None = None
    kills: int = 0
    killed_writing: int = 0
    killed_reading: int = 0
    stored: int = 0
    read: int = 0
    refused: int = 0  # blocks that did not pass their check


class SlotsRun:
    """Processes at random on one arena. A seed is a history."""

    def __init__(self, seed: int, rules: ModelRules | None = None, processes: int = 6, slots_count: int = 8,
                 ways: int = 4, blocks: int = 24, stray: bool = True) -> None:
        self._rng = random.Random(seed)
        self._rules = rules or ModelRules()
        self.model = ArenaModel(SetGeometry(slots_count, ways))
        self._blocks = blocks
        self._stray = stray
        self._processes = list(range(processes))
        self._next = processes
        self._tasks: dict[int, Iterator] = {}
        self._now_ns = 0
        self.outcome = SlotsOutcome()

    def run(self, kills: int) -> SlotsOutcome:
        """Run until so many were killed, then let all end, and look whether the arena is as good as new."""
        while self.outcome.kills < kills and self.outcome.broken is None:
            self._act(self._rng.choice(self._processes))
            if self._rng.random() < 0.03:
                self._kill(self._rng.choice(self._processes))
            if self._stray and self._rng.random() < 0.002:
                self.model.damage(self._rng)
            self.outcome.broken = self.outcome.broken or self.model.look()
        for process in list(self._processes):
            self._kill(process)
        self.outcome.broken = self.outcome.broken or self._look_after()
        return self.outcome

    def _act(self, process: int) -> None:
        if process not in self._tasks:
            self._tasks[process] = self._task(process, key_of(self._rng.randrange(self._blocks)))
        try:
            next(self._tasks[process])
        except StopIteration:
            del self._tasks[process]

    def _kill(self, process: int) -> None:
        writes = any(slot.writer == process for slot in self.model.slots)
        reads = any(process in slot.readers for slot in self.model.slots)
        self.outcome.kills += 1
        self.outcome.killed_writing += writes
        self.outcome.killed_reading += reads
        self._tasks.pop(process, None)
        self.model.end(process)
        self._processes.remove(process)
        self._processes.append(self._next)  # another one starts
        self._next += 1

    def _task(self, process: int, key: BlockKey) -> Iterator:
        geometry, rules = self.model.geometry, self._rules
        self._now_ns += 1
        if self._rng.random() < 0.5:
            result = yield from self.drive(process, rules.put(geometry, key, LENGTH, self._now_ns), [])
            self.outcome.stored += result is slots.PutResult.STORED
            return
        slot = yield from self.drive(process, rules.lease(geometry, key, LENGTH, self._now_ns), [])
        if slot is None:
            return
        taken: list[object] = []
        if not (yield from self.drive(process, rules.check(slot, key, LENGTH), taken)):
            self.outcome.refused += 1
            return
        if taken != right_pieces(key):
            self.outcome.broken = f"a reader was given {taken} for {key.name!r}"
        self.outcome.read += 1
        yield from self.drive(process, iter_unlock(slot), [])

    def drive(self, process: int, steps: Iterator, taken: list[object]) -> Iterator:
        """Do the steps; others act after each operation and within the long ones."""
        answer = None
        for _ in range(1000):
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = yield from self.model.do(process, step, taken)
            yield
        self.outcome.broken = "an operation does not end"
        return None

    def _look_after(self) -> str | None:
        """All have ended: no lock is left, and each slot can be used."""
        for number, slot in enumerate(self.model.slots):
            if slot.writer is not None or slot.readers:
                return f"slot {number} is locked by nobody who lives"
        for number in range(1000, 1000 + self.model.geometry.slots):
            for reads in (False, True):
                if problem := self.alone(key_of(number), reads):
                    return problem
        return None

    def alone(self, key: BlockKey, reads: bool) -> str | None:
        """Put or lease a block while nobody else does anything. Returns what is wrong, if anything."""
        geometry, process = self.model.geometry, -1
        self._now_ns += 1
        if not reads:
            result = _finish(self.drive(process, self._rules.put(geometry, key, LENGTH, self._now_ns), []))
            return None if result is slots.PutResult.STORED else f"{result} in an arena that nobody else uses"
        slot = _finish(self.drive(process, self._rules.lease(geometry, key, LENGTH, self._now_ns), []))
        if slot is None:
            return "a block that was stored is not there"
        _finish(self.drive(process, iter_unlock(slot), []))
        return None


def iter_unlock(slot: int) -> Iterator:
    """The end of a lease."""
    yield slots.UnlockSlot(slot)


def _finish(task: Iterator) -> object:
    while True:
        try:
            next(task)
        except StopIteration as end:
            return end.value
