# SPDX-License-Identifier: Apache-2.0
"""A transport without a network: real bytes, copied inside one process, with faults on demand.

It ships for tests and simulations. Addresses come from the same descriptions and plans as the real transport's, so a
wrong offset shows as wrong bytes. Everything is decided by one seeded generator and a clock that is passed in.

Life of a write: it lands at a random moment within `Faults.delay_s`, its notice at or after that moment; the fabric
carries out what is due whenever anyone polls. A read lives alike, without a notice. A stopped peer's writes and reads
wait and land once it goes on; a killed peer's never land, and those to it end as not ok.
"""
from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from vllm_pd.errors import TransferError
from vllm_pd.transfer.layout import CacheDescription
from vllm_pd.transfer.plan import Lane, merge_runs, pair_blocks, plan
from vllm_pd.transfer.requests import Finished, Notice
from vllm_pd.transfer.transport import PeerMetadata, Progress


@dataclass(frozen=True)
class Faults:
    """What goes wrong: probabilities per write, and the longest delay of data and of notices."""
    error: float = 0.0  # the write, or read, ends as not ok, with some of its bytes landed
    notice_lost: float = 0.0
    notice_twice: float = 0.0
    delay_s: float = 0.0


class _Landing(NamedTuple):
    """A write, or a read (that has no notice), on its way."""
    due_s: float
    started_s: float
    sender: str
    key: str
    peer: str
    local: list[int]
    remote: list[int]
    notice: bytes | None


class _Open(NamedTuple):
    """A transfer that has not ended: with whom, by which lanes, in which direction."""
    peer: str
    reads: bool
    bytes: int
    theirs: CacheDescription
    lanes: list[Lane]


class _Delivery(NamedTuple):
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
        if transport.name in self._members:
            raise TransferError(f"the name {transport.name} is taken")
        self._members[transport.name] = transport

    def kill(self, name: str) -> None:
        """The process is gone: nothing more comes from it or reaches it."""
        self._members.pop(name, None)
        self._stopped.discard(name)
        self._landings = [landing for landing in self._landings if landing.sender != name]

    def stop(self, name: str) -> None:
        """The process stands still. What it has posted lands after `resume`."""
        self._stopped.add(name)

    def resume(self, name: str) -> None:
        self._stopped.discard(name)

    def post(self, sender: str, key: str, peer: str, local: list[int], remote: list[int],
             notice: bytes | None) -> None:
        now_s = self.clock()
        self._landings.append(_Landing(now_s + self._delay_s(), now_s, sender, key, peer, local, remote, notice))

    def advance(self) -> None:
        """Carry out what is due, in the order of its moments."""
        now_s = self.clock()
        due = [landing for landing in self._landings if landing.due_s <= now_s and landing.sender not in self._stopped]
        for landing in sorted(due, key=lambda landing: landing.due_s):
            self._landings.remove(landing)
            self._land(landing)

    def take_notices(self, name: str) -> list[Notice]:
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
    """Transport over a fabric. Keeps the cache tensors alive, as the real one does."""

    def __init__(self, fabric: FakeFabric, name: str, caches: list, description: CacheDescription) -> None:
        self.name = name
        self._fabric = fabric
        self._caches = caches
        self._cache = description
        self._peers: dict[str, tuple[CacheDescription, list[Lane]]] = {}
        self._open: dict[str, _Open] = {}
        self._given_up: dict[str, str] = {}
        self._finished: list[Finished] = []
        fabric.join(self)

    def metadata(self) -> bytes:
        return PeerMetadata(self.name, b"", self._cache).encode()

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        theirs = PeerMetadata.decode(name, metadata).cache
        if name in self._peers and self._peers[name][0] != theirs:
            raise TransferError(f"peer {name} is known with other metadata; a new life needs a new name")
        self._peers[name] = (theirs, plan(self._cache, theirs, heads))

    def drop_peer(self, name: str) -> None:
        self._peers.pop(name, None)
        for key, write in self._open.items():
            if write.peer == name:
                self._given_up.setdefault(key, "peer dropped")

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int],
              notice: bytes) -> None:
        self._post(key, peer, local_block_ids, remote_block_ids, notice)

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        self._post(key, peer, local_block_ids, remote_block_ids, None)

    def _post(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int],
              notice: bytes | None) -> None:
        if key in self._open:
            raise TransferError(f"transfer {key} is under way already")
        if peer not in self._peers:
            raise TransferError(f"peer {peer} is not known")
        theirs, lanes = self._peers[peer]
        try:
            local, remote = pair_blocks(local_block_ids, remote_block_ids, self._cache, theirs)
        except ValueError as error:
            raise TransferError(f"transfer {key}: {error}") from error
        self._open[key] = _Open(peer, notice is None, len(local) * sum(lane.bytes for lane in lanes), theirs, lanes)
        self._fabric.post(self.name, key, peer, local, remote, notice)

    def cancel(self, key: str) -> None:
        if key in self._open:
            self._given_up.setdefault(key, "cancelled")

    def is_open(self, key: str) -> bool:
        return key in self._open

    def poll(self) -> Progress:
        self._fabric.advance()
        finished, self._finished = self._finished, []
        return Progress(finished=finished, notices=self._fabric.take_notices(self.name))

    def live_handles(self) -> int:
        return len(self._open)

    def close(self) -> bool:
        self._fabric.kill(self.name)
        for key in list(self._open):
            self.end(key, 0.0, "closed")
        self._peers.clear()
        return True

    def copy(self, key: str, local: list[int], remote: list[int]) -> None:
        """The fabric's hardware: move these blocks of a transfer."""
        transfer, ours = self._open[key], self._cache
        for run in merge_runs(local, remote):
            for lane in transfer.lanes:
                for block in range(run.count):
                    there = lane.remote + (run.remote + block) * transfer.theirs.block_stride_bytes
                    here = lane.local + (run.local + block) * ours.block_stride_bytes
                    ctypes.memmove(*((here, there) if transfer.reads else (there, here)), lane.bytes)

    def end(self, key: str, seconds: float, error: str) -> None:
        """The fabric's word that a transfer is over."""
        write = self._open.pop(key)
        error = self._given_up.pop(key, "") or error
        self._finished.append(
            Finished(key=key, ok=not error, bytes=0 if error else write.bytes, seconds=seconds, error=error))
