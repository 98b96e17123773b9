# SPDX-License-Identifier: Apache-2.0
"""A transport behind an emulated wire, for tests and benchmarks on machines where every transfer ends at once.

It passes a write or a read to the real transport at the moment when the wire would have carried its bytes. The wire
carries one transfer after the other. This happens in `poll`, where the end of a real transfer is seen too: after a late
poll the end is seen late and the notice leaves late.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from vllm_pd.errors import TransferError
from vllm_pd.transfer.requests import Finished
from vllm_pd.transfer.transport import Transport, TransportProgress


class EmulatedWire(NamedTuple):
    """How slow the wire is: its latency, and its throughput."""
    delay_s: float = 0.0
    bytes_per_s: float = float("inf")


class _DelayedTransfer(NamedTuple):
    """A transfer that the wire has not carried yet. `start` passes it to the real transport."""
    due_s: float
    peer: str
    start: Callable[[], None]


class SlowTransport:
    """Makes `transport` slower, and owns it. `block_bytes` is the size of one of our blocks over all layers."""

    def __init__(self, transport: Transport, wire: EmulatedWire, block_bytes: int,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.transport = transport
        self._wire = wire
        self._block_bytes = block_bytes
        self._clock = clock
        self._free_at = 0.0  # when the wire has carried everything
        self._waiting: dict[str, _DelayedTransfer] = {}
        self._started_s: dict[str, float] = {}
        self._given_up: dict[str, str] = {}

    @property
    def needs_polls(self) -> bool:
        """See Transport. The emulated wire itself may be looked at late."""
        return self.transport.needs_polls

    def metadata(self) -> bytes:
        """See Transport."""
        return self.transport.metadata()

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        """See Transport."""
        self.transport.add_peer(name, metadata, heads)

    def drop_peer(self, name: str) -> None:
        """See Transport."""
        for key, waiting in self._waiting.items():
            if waiting.peer == name:
                self._given_up.setdefault(key, "peer dropped")
        self.transport.drop_peer(name)

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int], notice: bytes,
              grant: str = "") -> None:
        """See Transport."""
        self._put(key, peer, len(local_block_ids),
                  lambda: self.transport.write(key, peer, local_block_ids, remote_block_ids, notice, grant))

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        """See Transport."""
        self._put(key, peer, len(local_block_ids),
                  lambda: self.transport.read(key, peer, local_block_ids, remote_block_ids))

    def open_grant(self, name: str, block_ids: list[int]) -> None:
        """See Transport."""
        self.transport.open_grant(name, block_ids)

    def close_grant(self, name: str) -> bool:
        """See Transport."""
        return self.transport.close_grant(name)

    def cancel(self, key: str) -> None:
        """See Transport."""
        if key in self._waiting:
            self._given_up.setdefault(key, "cancelled")
        else:
            self.transport.cancel(key)

    def is_open(self, key: str) -> bool:
        """See Transport."""
        return key in self._waiting or self.transport.is_open(key)

    def poll(self) -> TransportProgress:
        """See Transport."""
        finished: list[Finished] = []
        for key in [key for key, waiting in self._waiting.items() if waiting.due_s <= self._clock()]:
            error = self._given_up.pop(key, "")
            start = self._waiting.pop(key).start
            if not error:
                try:
                    start()
                except TransferError as problem:
                    error = str(problem)
            if error:
                finished.append(Finished(key=key, ok=False, error=error))
        progress = self.transport.poll()
        return msgspec.structs.replace(progress, finished=[self._timed(end) for end in finished + progress.finished])

    def renew(self, name: str) -> bytes:
        """See Transport. What waits goes through the new generation."""
        return self.transport.renew(name)

    def retire(self, key: str) -> None:
        """See Transport."""
        self._started_s[key] = self._clock()
        self.transport.retire(key)

    def live_handles(self) -> int:
        """See Transport."""
        return len(self._waiting) + self.transport.live_handles()

    def close(self) -> bool:
        """See Transport."""
        self._waiting.clear()
        return self.transport.close()

    def _put(self, key: str, peer: str, blocks: int, start: Callable[[], None]) -> None:
        if key in self._started_s:
            raise TransferError(f"transfer {key} is already open")
        now = self._started_s[key] = self._clock()
        self._free_at = max(now, self._free_at) + blocks * self._block_bytes / self._wire.bytes_per_s
        self._waiting[key] = _DelayedTransfer(self._free_at + self._wire.delay_s, peer, start)

    def _timed(self, end: Finished) -> Finished:
        return msgspec.structs.replace(end, seconds=self._clock() - self._started_s.pop(end.key))
