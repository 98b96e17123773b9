# SPDX-License-Identifier: Apache-2.0
"""A transport without a network: it copies real bytes inside one process, with faults on demand.

Addresses come from the same descriptions and plans as those of the real transport, so a wrong offset shows as wrong
bytes. One seeded generator and a clock that is passed in decide everything.

Life of a write: it lands at a random moment within `Faults.delay_s`, and its notice arrives at that moment or later.
The fabric carries out what is due whenever a transport polls. A read has the same life, without a notice. The transfers
of a stopped peer wait and land after it continues. Those of a killed peer never land, and those to it end with `ok`
false. So it is with those of, and to, a generation of a transport that is retired.
"""
from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from vllm_pd.errors import TransferError
from vllm_pd.transfer.layout import CacheDescription
from vllm_pd.transfer.plan import Lane, pair_blocks, plan
from vllm_pd.transfer.requests import Finished, Notice
from vllm_pd.transfer.transport import PeerMetadata, TransportProgress


@dataclass(frozen=True)
class Faults:
    """What goes wrong: probabilities per transfer, and the longest delay of data and of notices."""
    error: float = 0.0  # the transfer ends with `ok` false after some of its bytes have landed
    notice_lost: float = 0.0
    notice_twice: float = 0.0
    delay_s: float = 0.0


class _Landing(NamedTuple):
    """A write in flight, or a read, which has no notice."""
    due_s: float
    started_s: float
    sender: str
    key: str
    peer: str
    local: list[int]
    remote: list[int]
    notice: bytes | None


class _Open(NamedTuple):
    """A transfer that has not ended. `name` is that of our generation."""
    name: str
    peer: str
    reads: bool
    bytes: int
    theirs: CacheDescription
    lanes: list[Lane]


class _Delivery(NamedTuple):
    """A notice in flight to `peer`."""
    due_s: float
    peer: str
    notice: Notice


class FakeFabric:
    """What connects the fake transports of one process."""

    def __init__(self, seed: int = 0, faults: Faults = Faults(), clock: Callable[[], float] = lambda: 0.0) -> None:
        self.faults = faults
        self.clock = clock
        self._random = random.Random(seed)
        self._members: dict[str, FakeTransport] = {}
        self._stopped: set[str] = set()
        self._landings: list[_Landing] = []
        self._deliveries: list[_Delivery] = []

    def join(self, transport: FakeTransport) -> None:
        """Connect a transport."""
        if transport.name in self._members:
            raise TransferError(f"the name {transport.name} is taken")
        self._members[transport.name] = transport

    def kill(self, name: str) -> None:
        """End that process: nothing more comes from it or reaches it."""
        self._members.pop(name, None)
        self._stopped.discard(name)
        self._landings = [landing for landing in self._landings if landing.sender != name]

    def stop(self, name: str) -> None:
        """Stop that process. What it has posted lands after `resume`."""
        self._stopped.add(name)

    def resume(self, name: str) -> None:
        """Let a stopped process continue."""
        self._stopped.discard(name)

    def post(self, sender: str, key: str, peer: str, local: list[int], remote: list[int],
             notice: bytes | None) -> None:
        """Start a transfer of these block pairs."""
        now_s = self.clock()
        self._landings.append(_Landing(now_s + self._delay_s(), now_s, sender, key, peer, local, remote, notice))

    def advance(self) -> None:
        """Carry out what is due, in order of time."""
        now_s = self.clock()
        due = [landing for landing in self._landings if landing.due_s <= now_s and landing.sender not in self._stopped]
        for landing in sorted(due, key=lambda landing: landing.due_s):
            self._landings.remove(landing)
            self._land(landing)

    def take_notices(self, name: str) -> list[Notice]:
        """The notices that have arrived at that process."""
        now_s = self.clock()
        arrived = [delivery for delivery in self._deliveries if delivery.peer == name and delivery.due_s <= now_s]
        self._deliveries = [delivery for delivery in self._deliveries if delivery not in arrived]
        return [delivery.notice for delivery in sorted(arrived, key=lambda delivery: delivery.due_s)]

    def _land(self, landing: _Landing) -> None:
        sender, now_s = self._members[landing.sender], self.clock()
        if landing.peer not in self._members:
            sender.end(landing.key, now_s - landing.started_s, "peer is gone")
            return
        failed = self._random.random() < self.faults.error
        count = self._random.randrange(len(landing.local) + 1) if failed else len(landing.local)
        sender.copy(landing.key, landing.local[:count], landing.remote[:count])
        sender.end(landing.key, now_s - landing.started_s, "injected error" if failed else "")
        if failed or not landing.notice or self._random.random() < self.faults.notice_lost:
            return
        for _ in range(2 if self._random.random() < self.faults.notice_twice else 1):
            self._deliveries.append(
                _Delivery(now_s + self._delay_s(), landing.peer, Notice(landing.sender, landing.notice)))

    def _delay_s(self) -> float:
        return self._random.uniform(0.0, self.faults.delay_s)


class FakeTransport:
    """Transport over a fabric. Keeps the cache tensors alive, as the real transport does."""

    needs_polls = True

    def __init__(self, fabric: FakeFabric, name: str, caches: list, description: CacheDescription) -> None:
        self.name = name
        self._older: list[str] = []  # the names of the generations before
        self._fabric = fabric
        self._caches = caches
        self._cache = description
        self._peers: dict[str, tuple[CacheDescription, list[Lane]]] = {}
        self._open: dict[str, _Open] = {}
        self._given_up: dict[str, str] = {}
        self._finished: list[Finished] = []
        fabric.join(self)

    def metadata(self) -> bytes:
        """See Transport."""
        return PeerMetadata(self.name, b"", self._cache).encode()

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        """See Transport."""
        theirs = PeerMetadata.decode(name, metadata).cache
        if name in self._peers and self._peers[name][0] != theirs:
            raise TransferError(f"peer {name} is known with other metadata; a new incarnation needs a new name")
        self._peers[name] = (theirs, plan(self._cache, theirs, heads))

    def drop_peer(self, name: str) -> None:
        """See Transport."""
        self._peers.pop(name, None)
        for key, write in self._open.items():
            if write.peer == name:
                self._given_up.setdefault(key, "peer dropped")

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int], notice: bytes,
              grant: str = "") -> None:
        """See Transport."""
        self._post(key, peer, local_block_ids, remote_block_ids, notice)

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        """See Transport."""
        self._post(key, peer, local_block_ids, remote_block_ids, None)

    def _post(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int],
              notice: bytes | None) -> None:
        if key in self._open:
            raise TransferError(f"transfer {key} is already open")
        if peer not in self._peers:
            raise TransferError(f"peer {peer} is not known")
        theirs, lanes = self._peers[peer]
        try:
            local, remote = pair_blocks(local_block_ids, remote_block_ids, self._cache, theirs)
        except ValueError as error:
            raise TransferError(f"transfer {key}: {error}") from error
        self._open[key] = _Open(self.name, peer, notice is None, len(local) * sum(lane.bytes for lane in lanes),
                                theirs, lanes)
        self._fabric.post(self.name, key, peer, local, remote, notice)

    def open_grant(self, name: str, block_ids: list[int]) -> None:
        """See Transport."""

    def close_grant(self, name: str) -> bool:
        """See Transport."""
        return False

    def cancel(self, key: str) -> None:
        """See Transport."""
        if key in self._open:
            self._given_up.setdefault(key, "cancelled")

    def is_open(self, key: str) -> bool:
        """See Transport."""
        return key in self._open

    def poll(self) -> TransportProgress:
        """See Transport."""
        self._fabric.advance()
        finished, self._finished = self._finished, []
        notices = [notice for name in (*self._older, self.name) for notice in self._fabric.take_notices(name)]
        return TransportProgress(finished=finished, notices=notices)

    def renew(self, name: str) -> bytes:
        """See Transport."""
        older, self.name = self.name, name
        try:
            self._fabric.join(self)
        except TransferError:
            self.name = older
            raise
        self._older.append(older)
        return self.metadata()

    def retire(self, key: str) -> None:
        """See Transport."""
        for name in self._older:
            self._fabric.kill(name)
        for open_key, transfer in [item for item in self._open.items() if item[1].name in self._older]:
            self.end(open_key, 0.0, "destroyed", may_land=not transfer.reads)
        self._older.clear()
        self._finished.append(Finished(key=key, ok=True))

    def live_handles(self) -> int:
        """See Transport."""
        return len(self._open)

    def close(self) -> bool:
        """See Transport."""
        for name in (*self._older, self.name):
            self._fabric.kill(name)
        for key in list(self._open):
            self.end(key, 0.0, "closed")
        self._peers.clear()
        return True

    def copy(self, key: str, local: list[int], remote: list[int]) -> None:
        """Called by the fabric: move these blocks of a transfer."""
        transfer = self._open[key]
        for our_block, their_block in zip(local, remote, strict=True):
            for lane in transfer.lanes:
                there = lane.remote + their_block * lane.remote_stride_bytes
                here = lane.local + our_block * lane.local_stride_bytes
                ctypes.memmove(*((here, there) if transfer.reads else (there, here)), lane.bytes)

    def end(self, key: str, seconds: float, error: str, may_land: bool = False) -> None:
        """Called by the fabric: a transfer has ended."""
        write = self._open.pop(key)
        error = self._given_up.pop(key, "") or error
        self._finished.append(
            Finished(key=key, ok=not error, bytes=0 if error else write.bytes, seconds=seconds, error=error,
                     may_land=may_land))
