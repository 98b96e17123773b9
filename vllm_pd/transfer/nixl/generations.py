# SPDX-License-Identifier: Apache-2.0
"""The generations of one rank's NIXL transport (`vllm_pd.protocol.generations`): several over the same memory.

All that begins goes through the newest. The older ones are polled until they are destroyed. A transport is destroyed
with its agent: UCX's worker and its connections end, and with them what comes in and goes out through them. What that
proves (UCX 1.23 over TCP between network namespaces):

- Peers on other machines write and read nothing here any more. Of a write of 16 MiB, a tenth of which had landed, 0
  bytes came later. Its sender gets an error at its next poll, and goes on with the new agent.
- A read of ours is over: it is this process that would go on copying, and it does not.
- Of a write of ours nobody knows here what of it the peer still gets: our kernel goes on sending what it has taken.
- **Peers on this machine may still write and read here.** They need no agent of ours for that (CMA): one wrote 256 MiB
  after it was destroyed, although its write ended in an error.

The destruction does not wait for the other end. It took 2 to 5 ms on an idle machine (docs/benchmarks.md), and beside
other work on both cores 10 to 90 ms, and 0.13 and 0.25 s at most: with reads and writes of ours that hung, with writes
that came in, on a wire that was cut, also for longer than UCX's keepalive, to a process that was stopped or was never
reached, and with writers that sent all the time; with a progress thread and without. Nearly all of it is the library's
destructor, which holds Python's lock. So another thread would not help, and it happens in the one that owns the
transport. Over TCP releasing handles, peers and memory takes 0.1 ms. On a network card that has to unpin the memory it
takes longer, but Python's lock is free meanwhile.

A peer on another machine that is being read by us then may die of it: over TCP UCX ends a process that answers a reader
whose connection is gone (`transport`). So own reads should have ended before.

A new generation meets each peer with the first transfer there. To add one connects to it, and UCX waits for that, with
the lock that all transfers of the agent need. Where nothing answers the kernel would try for two minutes; here it does
so for 3 s (`agent.SYN_RETRIES`).
"""
from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, NamedTuple

from vllm_pd.errors import PeerNotAdded, TransferError
from vllm_pd.transfer.layout import CacheDescription, Memory
from vllm_pd.transfer.nixl.transport import NixlTransport
from vllm_pd.transfer.requests import Finished
from vllm_pd.transfer.transport import TransportProgress

if TYPE_CHECKING:
    import torch

MAX_GENERATIONS = 4  # at a time; the protocol asks for two


class _Added(NamedTuple):
    """How a peer was added."""
    metadata: bytes
    heads: range | None


class NixlGenerations:
    """A `Transport`. `name` is that of the first generation. For the parameters see NixlTransport. `newest` is the one
    through which all goes that begins. A peer that is parted is that in its generation only."""

    def __init__(self, name: str, caches: list[torch.Tensor], description: CacheDescription,
                 progress_thread: bool = True, host: str = "127.0.0.1") -> None:
        self._make = functools.partial(NixlTransport, caches=caches, description=description,
                                       progress_thread=progress_thread, host=host)
        self._cache = description
        self._name, self.newest = name, self._make(name)
        self._older: list[NixlTransport] = []
        self._added: dict[str, _Added] = {}
        self._unmet: dict[str, str] = {}  # peers that the newest generation could not meet, and why; until added anew
        self._progress = TransportProgress([], [])
        self._is_closed = False

    @property
    def needs_polls(self) -> bool:
        """See Transport."""
        return self.newest.needs_polls

    def metadata(self) -> bytes:
        """See Transport. That of the newest generation."""
        return self.newest.metadata()

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        """See Transport."""
        self._unmet.pop(name, None)
        self.newest.add_peer(name, metadata, heads)
        self._added.setdefault(name, _Added(metadata, heads))

    def drop_peer(self, name: str) -> None:
        """See Transport."""
        self._added.pop(name, None)
        self._unmet.pop(name, None)
        for transport in self._all():
            transport.drop_peer(name)

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int], notice: bytes,
              grant: str = "") -> None:
        """See Transport."""
        self._meet(key, peer)
        self.newest.write(key, peer, local_block_ids, remote_block_ids, notice, grant)

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        """See Transport."""
        self._meet(key, peer)
        self.newest.read(key, peer, local_block_ids, remote_block_ids)

    def open_grant(self, name: str, block_ids: list[int]) -> None:
        """See Transport. Does nothing."""

    def close_grant(self, name: str) -> bool:
        """See Transport. Always False."""
        return False

    def cancel(self, key: str) -> None:
        """See Transport."""
        for transport in self._all():
            transport.cancel(key)

    def is_open(self, key: str) -> bool:
        """See Transport."""
        return any(transport.is_open(key) for transport in self._all())

    def poll(self) -> TransportProgress:
        """See Transport."""
        for transport in self._all():
            self._take(transport)
        progress, self._progress = self._progress, TransportProgress([], [])
        return progress

    def renew(self, name: str) -> bytes:
        """See Transport. An engine asks for the same name again if another of its ranks could not make its transport.
        The one that was made here is taken then, with what goes on in it."""
        if self._is_closed:
            raise TransferError("the transport is closed")
        if name == self._name:
            return self.newest.metadata()
        if len(self._older) + 1 >= MAX_GENERATIONS:
            raise TransferError(f"{len(self._older)} older generations have not been destroyed")
        made = self._make(name)
        self._older.append(self.newest)
        self._name, self.newest = name, made
        self._unmet.clear()
        return made.metadata()

    def retire(self, key: str) -> None:
        """See Transport."""
        for transport in self._older:
            self._take(transport)  # what has ended by now has ended
            transport.close(timeout_s=0.0, reads_end=True)
            self._take(transport)
        if self._older and self._cache.memory is Memory.VRAM:
            import torch
            torch.cuda.synchronize()  # copies of reads by CUDA IPC that UCX had given to the device
        self._older = [transport for transport in self._older if not transport.is_gone]
        error = "an older transfer agent is still in use in the process of its rank" if self._older else ""
        self._progress.finished.append(Finished(key, ok=not error, error=error))

    def live_handles(self) -> int:
        """See Transport."""
        return sum(transport.live_handles() for transport in self._all())

    def close(self, timeout_s: float = 1.0) -> bool:
        """See NixlTransport."""
        self._is_closed = True
        deadline_s = time.monotonic() + timeout_s
        return all([transport.close(max(0.0, deadline_s - time.monotonic())) for transport in self._all()])

    def _all(self) -> list[NixlTransport]:
        return [*self._older, self.newest]

    def _meet(self, key: str, peer: str) -> None:
        """A transfer with this key begins. Raises TransferError, and PeerNotAdded where the newest generation can't
        meet that peer."""
        if any(transport.is_open(key) for transport in self._older):
            raise TransferError(f"transfer {key} is already open")
        if peer in self._unmet:
            raise PeerNotAdded(self._unmet[peer])
        if peer in self._added:
            try:
                self.newest.add_peer(peer, *self._added[peer])
            except TransferError as error:
                self._unmet[peer] = str(error)
                raise PeerNotAdded(str(error)) from error

    def _take(self, transport: NixlTransport) -> None:
        """Poll it, and keep what has happened for `poll`."""
        progress = transport.poll()
        self._progress.finished += progress.finished
        self._progress.notices += progress.notices
        self._progress.unseen |= progress.unseen
