# SPDX-License-Identifier: Apache-2.0
"""One rank's transport, when the engines at both ends may consist of several.

A rank writes its share of the KV heads into every rank of the peer that holds some of them, and gives notice once, to
the peer's rank 0, when all of it has landed there. So the peer needs to hear nothing from its other ranks: their memory
is written to, and that is all.

Where one write covers the share, the notice rides on it. Otherwise a write is split into parts, one for each rank of
the peer, which bear no notice; it ends when the last part has ended, and the notice follows if all went well.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_pd.errors import TransferError, UnmappableSplit
from vllm_pd.transfer.plan import head_range, heads_to_write
from vllm_pd.transfer.requests import Finished
from vllm_pd.transfer.transport import PeerMetadata, Progress, RanksMetadata, Transport, rank_name


class _Engine(NamedTuple):
    """A peer: what it said of itself, and the transport names of its ranks."""
    metadata: bytes
    targets: list[str]  # those that we write to
    sources: list[str]  # those that hold all our heads, each once; empty where we don't write what we hold
    known: list[str]


class _Split:
    """A write, or a read, in several parts, none of which bears a notice."""

    def __init__(self, peer: str, notice: bytes) -> None:
        self.peer = peer
        self.notice = notice  # empty once it was sent
        self.open: set[str] = set()
        self.errors: list[str] = []
        self.bytes = 0
        self.started_s = time.monotonic()

    def ended(self, key: str) -> Finished:
        """The end of the whole."""
        return Finished(key=key, ok=not self.errors, bytes=0 if self.errors else self.bytes,
                        seconds=time.monotonic() - self.started_s, error="; ".join(self.errors))


class RankedTransport:
    """The `Transport` of tensor-parallel rank `rank` of `ranks`, for a model of `kv_heads` KV heads.

    Peers are engines: their metadata is a `RanksMetadata`. `transport` is this rank's own, named by `rank_name`, and
    belongs to this object.
    """

    def __init__(self, transport: Transport, rank: int, ranks: int, kv_heads: int) -> None:
        self._transport = transport
        self._rank = rank
        self._ranks = ranks
        self._kv_heads = kv_heads
        self._engines: dict[str, _Engine] = {}
        self._splits: dict[str, _Split] = {}
        self._part_of: dict[str, str] = {}
        self._finished: list[Finished] = []

    def metadata(self) -> bytes:
        """This rank's part of the engine's `RanksMetadata`."""
        return self._transport.metadata()

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        """As `Transport.add_peer`; `heads` is decided here."""
        known = self._engines.get(name)
        if known is not None and known.metadata != metadata:
            raise TransferError(f"peer {name} is known with other metadata; a new life needs a new name")
        ranks = RanksMetadata.decode(name, metadata).ranks
        shares = [heads_to_write(self._rank, self._ranks, other, len(ranks), self._kv_heads)
                  for other in range(len(ranks))]
        engine = _Engine(metadata, [rank_name(name, other) for other, share in enumerate(shares) if share],
                         self._sources(name, shares), [])
        try:
            for other, share in enumerate(shares):
                self._check(name, other, len(ranks), ranks[other])
                if share or other == 0:
                    self._transport.add_peer(rank_name(name, other), ranks[other], share)
                    engine.known.append(rank_name(name, other))
        except Exception:
            for rank in engine.known if known is None else ():
                self._transport.drop_peer(rank)
            raise
        self._engines[name] = engine

    def drop_peer(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        for rank in engine.known if engine is not None else ():
            self._transport.drop_peer(rank)

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int],
              notice: bytes) -> None:
        engine = self._engines.get(peer)
        if engine is None:
            raise TransferError(f"peer {peer} is not known")
        if key in self._splits:
            raise TransferError(f"write {key} is under way already")
        front = rank_name(peer, 0)
        if engine.targets == [front] or not (engine.targets and local_block_ids):
            self._transport.write(key, front, local_block_ids, remote_block_ids, notice)
            return
        self._splits[key] = _Split(front, notice)
        for number, target in enumerate(engine.targets):
            self._begin(key, f"{key}@{number}", self._transport.write, target, local_block_ids, remote_block_ids, b"")
        self._go_on(key)

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        engine = self._engines.get(peer)
        if engine is None or not engine.sources:
            raise TransferError(f"peer {peer} is not known" if engine is None else
                                f"KV heads that several ranks hold are not read from {peer}")
        if key in self._splits:
            raise TransferError(f"transfer {key} is under way already")
        if len(engine.sources) == 1:
            self._transport.read(key, engine.sources[0], local_block_ids, remote_block_ids)
            return
        self._splits[key] = _Split("", b"")
        for number, source in enumerate(engine.sources):
            self._begin(key, f"{key}@{number}", self._transport.read, source, local_block_ids, remote_block_ids)
        self._go_on(key)

    def cancel(self, key: str) -> None:
        split = self._splits.get(key)
        for open_key in list(split.open) if split is not None else [key]:
            self._transport.cancel(open_key)

    def is_open(self, key: str) -> bool:
        return key in self._splits or self._transport.is_open(key)

    def poll(self) -> Progress:
        progress = self._transport.poll()
        for end in progress.finished:
            key = self._part_of.pop(end.key, None)
            if key is None:
                self._finished.append(end)
                continue
            split = self._splits[key]
            split.open.discard(end.key)
            split.bytes += end.bytes
            if not end.ok:
                split.errors.append(end.error)
            self._go_on(key)
        finished, self._finished = self._finished, []
        return Progress(finished=finished, notices=progress.notices)

    def live_handles(self) -> int:
        return max(self._transport.live_handles(), len(self._splits))

    def close(self) -> bool:
        return self._transport.close()

    def _go_on(self, key: str) -> None:
        """Give notice when the last part has ended well, and end with that."""
        split = self._splits[key]
        if split.open:
            return
        if split.notice and not split.errors:
            notice, split.notice = split.notice, b""
            self._begin(key, f"{key}@notice", self._transport.write, split.peer, [], [], notice)
        if not split.open:
            self._finished.append(self._splits.pop(key).ended(key))

    def _begin(self, key: str, part: str, start: Callable[..., None], *arguments: Any) -> None:
        """One part of a split transfer; one that can't start has ended."""
        try:
            start(part, *arguments)
        except Exception as error:  # whatever it is, the other parts must come to their end
            self._splits[key].errors.append(str(error) if isinstance(error, TransferError) else repr(error))
            if not self._transport.is_open(part):
                return
        self._splits[key].open.add(part)
        self._part_of[part] = key

    def _sources(self, name: str, shares: list[range]) -> list[str]:
        ours, sources, covered = head_range(self._rank, self._ranks, self._kv_heads), [], set()
        for other, share in enumerate(shares):
            if not covered.issuperset(share):
                covered.update(share)
                sources.append(rank_name(name, other))
        return sources if covered == set(ours) else []

    def _check(self, name: str, rank: int, ranks: int, metadata: bytes) -> None:
        """That this rank of the peer holds the heads that it should by the rule."""
        cache = PeerMetadata.decode(rank_name(name, rank), metadata).cache
        heads = head_range(rank, ranks, self._kv_heads)
        if (cache.first_head, cache.kv_heads) != (heads.start, len(heads)):
            raise UnmappableSplit(f"rank {rank} of {ranks} of {name} has KV heads {cache.first_head}.."
                                  f"{cache.first_head + cache.kv_heads - 1}; of {self._kv_heads} it should have "
                                  f"{heads.start}..{heads.stop - 1}")
