# SPDX-License-Identifier: Apache-2.0
"""The server of an arena to readers of other hosts: it looks blocks up, and writes them into a reader's memory.

The server writes, and the reader does not read. Over TCP a read is answered by UCX in the process that is read, and UCX
ends that process if the reader is gone meanwhile (`vllm_pd.transfer.nixl.transport`): a reader that is killed would end
an engine of another host. A write whose receiver is gone is an error and no more.

Life of a send: the blocks are leased, from the first name on, up to the first that is not whole here. A reader that is
new is added to the agent, and proven by a read of a few bytes, for its address may be another process's by now
(`vllm_pd.transfer.nixl.identity`). Then one write carries all parts. When it has ended, the reader gets their
checksums, and the leases end. They also end LEASE_S after the beginning: a reader that is stopped holds no slot of this
host. After a failed write nothing is sent to that reader before all writes to it have ended and it is added anew.

Everything has a bound: readers, sends and bytes that are open for one reader and for all, names that are looked up in a
second, and the share of time that is lost with readers that can't be reached. Beyond it the answer is that there is
nothing.
"""
from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from vllm_pd.errors import TransferError
from vllm_pd.store.arena import BlockArena, LeasedBlock
from vllm_pd.store.beyond.messages import FindBlocks, FoundBlocks, SendBlocks, SentBlocks
from vllm_pd.store.blocks import BlockKey
from vllm_pd.transfer.layout import Memory
from vllm_pd.transfer.nixl.agent import NixlAgent, TransferState
from vllm_pd.transfer.nixl.identity import DIGEST_BYTES, Proofs

logger = logging.getLogger("vllm.pd")

MAX_READERS = 64
MAX_SENDS = 64  # that are open, and of one reader:
MAX_READER_SENDS = 8
MAX_OPEN_BYTES = 1 << 30
LEASE_S = 5.0
UNMET_S = 30.0  # where nothing answers, to add a reader takes this thread 3 s (`vllm_pd.transfer.nixl.agent`):
UNMET_PAUSE = 10  # so many times as long nobody new is added, and twice as long after each further one, up to
MAX_UNMET_PAUSE = 80
MAX_UNMET = 256
WARNING_S = 60.0
NAMES_PER_S = 50_000  # that are looked up: each takes about 10 microseconds of this process
POLL_S = 0.001
MAX_POLL_S = 0.02


class Budget:
    """Work that others may cause: so many units a second, of which those of one second may be saved."""

    def __init__(self, now: float, per_s: float) -> None:
        self._per_s = self._left = per_s
        self._at_s = now

    def has(self, now: float) -> bool:
        """Whether there is any left."""
        self._left = min(self._per_s, self._left + (now - self._at_s) * self._per_s)
        self._at_s = now
        return self._left >= 1

    def spend(self, units: int) -> None:
        """So many were used. What is beyond the budget is waited for."""
        self._left -= units

    def again_in_s(self) -> float:
        """After how many seconds there is some again."""
        return max(0.0, (1 - self._left) / self._per_s)


@dataclass
class _Reader:
    metadata: bytes
    identity: int
    open: int = 0
    is_parted: bool = False  # a transfer with it has failed


@dataclass
class _OpenSend:
    route: bytes
    number: int
    reader: str
    blocks: list[LeasedBlock]
    checksums: tuple[int, ...]
    rows: tuple[np.ndarray, np.ndarray]  # ours and the reader's, uint64 [n, 3] = address, bytes, device
    began_s: float
    handle: int = 0
    is_proof: bool = False
    is_leased: bool = True

    @property
    def size_bytes(self) -> int:
        return int(self.rows[0][:, 1].sum())

    def release(self) -> None:
        """End the leases."""
        self.is_leased = False
        for block in self.blocks:
            block.release()


class SendReply(NamedTuple):
    """An answer, and the route by which it goes."""
    route: bytes
    message: FoundBlocks | SentBlocks


class BlockSender:
    """Used by one thread. `agent` has the arena and `proofs` registered; both are the caller's. `counts`: parts that
    were "sent", and questions beyond a bound, "busy"."""

    def __init__(self, arena: BlockArena, agent: NixlAgent, proofs: Proofs,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._arena, self._agent, self._proofs, self._clock = arena, agent, proofs, clock
        self._budget = Budget(clock(), NAMES_PER_S)
        self._readers: dict[str, _Reader] = {}  # the least recently added first
        self._unmet: dict[str, float] = {}  # readers that could not be added, and until when that is not tried again
        self._pause, self._meets_from_s = UNMET_PAUSE, 0.0  # no new reader is added before
        self._has_met = False
        self._quiet_until_s = 0.0
        self._open: list[_OpenSend] = []
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def find(self, message: FindBlocks) -> FoundBlocks:
        """How many of the first blocks are here."""
        if not self._budget.has(self._clock()):
            self.counts["busy"] += 1
            return FoundBlocks(message.number, 0)
        models, found = set(message.models), 0
        for name in message.names:
            if not models <= self._arena.models_of(name):
                break
            found += 1
        self._budget.spend(found + 1)
        return FoundBlocks(message.number, found if message.length <= self._arena.shape.slot_bytes else 0)

    def send(self, route: bytes, message: SendBlocks) -> SentBlocks | None:
        """Begin to send. Returns an answer where that is already known."""
        nothing = SentBlocks(message.number, ())
        if not self._admits(message):
            return nothing
        message = self._fitting(message)
        with contextlib.ExitStack() as undone:
            blocks = self._lease(message, undone)
            if not blocks:
                return nothing
            try:
                self._post(route, message, blocks)
            except (TransferError, OverflowError) as error:  # an address that is none
                self._warn(message.agent_name, error)
                return nothing
            undone.pop_all()
        return None

    def take_met(self) -> bool:
        """Whether a reader was added, or should have been, since the last call. That may have taken seconds."""
        has_met, self._has_met = self._has_met, False
        return has_met

    def poll(self) -> list[SendReply]:
        """What has ended since the last call."""
        replies: list[SendReply] = []
        for one in list(self._open):
            if one.is_leased and self._clock() - one.began_s > LEASE_S:
                one.release()
            try:
                state = self._agent.check(one.handle)
                if state is TransferState.DONE and one.is_proof:
                    self._write(one)
                    continue
            except TransferError:
                state = TransferState.FAILED
            if state is not TransferState.OPEN:
                replies.append(self._end(one, state is TransferState.DONE))
        return replies

    def next_timeout(self) -> float | None:
        """In how many seconds `poll` is to be called; None: not before the next `send`."""
        if not self._open:
            return None
        age_s = self._clock() - max(one.began_s for one in self._open)
        return min(MAX_POLL_S, max(POLL_S, age_s / 50))

    def close(self) -> None:
        """End all leases, and forget all readers."""
        for one in self._open:
            one.release()
            self._quietly(self._agent.release, one.handle)
        self._open.clear()
        for name in list(self._readers):
            self._forget(name)

    def _admits(self, message: SendBlocks) -> bool:
        """Whether it makes sense, and is within all bounds."""
        parts = len(message.names) * len(message.models)
        if parts != len(message.addresses) or not 0 < message.length <= self._arena.shape.slot_bytes:
            return False
        is_busy = (self._is_full(len(message.models) * message.length) or self._holds_back(message.agent_name)
                   or not self._budget.has(self._clock()))
        self.counts["busy"] += is_busy
        self._budget.spend(0 if is_busy else parts)
        return not is_busy

    def _fitting(self, message: SendBlocks) -> SendBlocks:
        """The first blocks of it for which there is room."""
        blocks = min(len(message.names), self._room_bytes() // (len(message.models) * message.length))
        return msgspec.structs.replace(message, names=message.names[:blocks],
                                       addresses=message.addresses[:blocks * len(message.models)])

    def _warn(self, name: str, error: Exception) -> None:
        """Once in WARNING_S: anybody may cause it."""
        if self._clock() >= self._quiet_until_s:
            self._quiet_until_s = self._clock() + WARNING_S
            logger.warning("store: nothing is sent to another host's %r: %s; this is said once in %d s", name[:80],
                           error, WARNING_S)

    def _is_full(self, block_bytes: int) -> bool:
        """Whether so much is open that not one block more may be."""
        return sum(one.is_leased for one in self._open) >= MAX_SENDS or block_bytes > self._room_bytes()

    def _room_bytes(self) -> int:
        """How many bytes more may be open. What is open for long does not count: its reader gets nothing more."""
        return MAX_OPEN_BYTES - sum(one.size_bytes for one in self._open if one.is_leased)

    def _holds_back(self, name: str) -> bool:
        """Whether nothing is to be sent to this reader now."""
        if self._clock() < self._unmet.get(name, 0.0):
            return True
        reader = self._readers.get(name)
        if (reader is None or reader.is_parted) and self._clock() < self._meets_from_s:
            return True
        return reader is not None and bool(reader.open) and (
            reader.is_parted or reader.open >= MAX_READER_SENDS
            or any(one.reader == name and not one.is_leased for one in self._open))

    def _lease(self, message: SendBlocks, undone: contextlib.ExitStack) -> list[LeasedBlock]:
        """The parts of the first blocks that are whole here; `undone` releases them."""
        leased: list[LeasedBlock] = []
        for name in message.names:
            parts: list[LeasedBlock] = []
            for model in message.models:
                held = self._arena.hold(BlockKey(model, name), message.length)
                if held is None:
                    return leased
                undone.callback(held.release)
                parts.append(held)
            leased += parts
        return leased

    def _post(self, route: bytes, message: SendBlocks, blocks: Sequence[LeasedBlock]) -> None:
        """Begin the write, or the proof before it. Raises TransferError."""
        name, length = message.agent_name, message.length
        theirs = np.array([(address, length, 0) for address in message.addresses[:len(blocks)]], dtype=np.uint64)
        ours = np.array([(block.address, length, 0) for block in blocks], dtype=np.uint64)
        checksums = tuple(0 if block.header is None else block.header.checksum for block in blocks)
        self._meet(name, message.agent, message.identity)
        one = _OpenSend(route, message.number, name, list(blocks), checksums, (ours, theirs), self._clock())
        one.is_proof = not self._proofs.is_proven(name)
        one.handle = self._make(one)
        self._readers[name].open += 1
        self._open.append(one)
        self._start(one)

    def _make(self, one: _OpenSend) -> int:
        rows, notice = one.rows, b""
        if one.is_proof:
            try:
                places = self._proofs.slot(one.reader), self._readers[one.reader].identity
            except IndexError:
                raise TransferError("there are too many readers") from None
            rows = tuple(np.array([(place, DIGEST_BYTES, 0)], dtype=np.uint64) for place in places)
            notice = None  # a read
        return self._agent.make_unprepared(rows[0], Memory.DRAM, rows[1], Memory.DRAM, one.reader, notice)

    def _start(self, one: _OpenSend) -> None:
        """Post its handle. If that fails, the next `poll` ends it."""
        with contextlib.suppress(TransferError):
            self._agent.post(one.handle)

    def _write(self, one: _OpenSend) -> None:
        """The proof has been read: post the write. Raises TransferError if it is another agent's."""
        if not self._proofs.prove(one.reader):
            raise TransferError("another agent listens there")
        one.is_proof = False
        handle = self._make(one)
        self._quietly(self._agent.release, one.handle)
        one.handle = handle
        self._start(one)

    def _end(self, one: _OpenSend, is_sent: bool) -> SendReply:
        """It is over."""
        self._open.remove(one)
        one.release()
        self._quietly(self._agent.release, one.handle)
        reader = self._readers[one.reader]
        reader.open -= 1
        reader.is_parted |= not is_sent
        self.counts["sent"] += len(one.checksums) * is_sent
        return SendReply(one.route, SentBlocks(one.number, one.checksums if is_sent else ()))

    def _meet(self, name: str, metadata: bytes, identity: int) -> None:
        """Let the agent know this reader. Raises TransferError where it can't."""
        known = self._readers.get(name)
        if known is not None and not known.is_parted:
            if (known.metadata, known.identity) != (metadata, identity):
                raise TransferError("it has said other things about itself before")
            return
        if known is not None:  # of which nothing is open: see `_admits`
            self._forget(name)
        if len(self._readers) >= MAX_READERS:
            idle = next((one for one, reader in self._readers.items() if not reader.open), None)
            if idle is None:
                raise TransferError("there are too many readers")
            self._forget(idle)
        loaded = self._add(name, metadata)
        if loaded != name:
            if loaded not in self._readers:
                self._quietly(self._agent.remove_peer, loaded)
            raise TransferError(f"its agent has the name {loaded[:80]}")
        self._readers[name] = _Reader(metadata, identity)

    def _add(self, name: str, metadata: bytes) -> str:
        """Returns the name that it has by its metadata. Raises TransferError."""
        began_s, self._has_met = self._clock(), True
        try:
            loaded = self._agent.add_peer(metadata)
        except TransferError:
            now = self._clock()
            self._meets_from_s = now + (now - began_s) * self._pause
            self._pause = min(MAX_UNMET_PAUSE, 2 * self._pause)
            self._unmet[name] = now + UNMET_S
            if len(self._unmet) > MAX_UNMET:
                del self._unmet[next(iter(self._unmet))]
            raise
        self._pause = UNMET_PAUSE
        return loaded

    def _forget(self, name: str) -> None:
        del self._readers[name]
        self._proofs.forget(name)
        self._quietly(self._agent.remove_peer, name)

    @staticmethod
    def _quietly(release: Callable[[object], None], what: object) -> None:
        with contextlib.suppress(TransferError):  # the reader may be gone
            release(what)
