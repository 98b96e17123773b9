# SPDX-License-Identifier: Apache-2.0
"""One rank's transport, when the engines at both ends may have several ranks.

A rank writes its share of the layers and KV heads into every rank of the peer that holds some of them
(`vllm_pd.transfer.ranks.split`). When all of it has landed, it sends one notice to the peer's rank 0. So the peer has
all KV when it has as many notices as we have ranks, over all pipeline stages, and its other ranks have nothing to
report: their memory is written to, and that is all.

A rank reads its own share from ranks of the peer that hold it together: one for each part, also where several have it.

If one write covers the share, it carries the notice. Otherwise the write is split into parts without a notice, one for
each rank of the peer. It ends when the last part has ended, and the notice follows if all parts succeeded.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_pd.errors import TransferError, UnmappableSplit
from vllm_pd.transfer.ranks.split import RankShare, shares_sent, sources_of, stage_ranks
from vllm_pd.transfer.requests import Finished
from vllm_pd.transfer.transport import PeerMetadata, RanksMetadata, Transport, TransportProgress, rank_name


class _RankedPeer(NamedTuple):
    """A peer: its metadata, and the transport names of its ranks."""
    metadata: bytes
    targets: list[str]  # the ranks that we write to
    sources: list[str]  # the ranks that we read from, which together hold our layers and heads once
    known: list[str]  # the ranks that were added to the transport


class _SplitTransfer:
    """A write or a read in several parts without notices. `peer` is the rank that gets the notice afterwards."""

    def __init__(self, peer: str, notice: bytes) -> None:
        self.peer = peer
        self.notice = notice  # empty after it was sent
        self.open: set[str] = set()  # keys of the open parts
        self.errors: list[str] = []
        self.may_land = False
        self.bytes = 0
        self.started_s = time.monotonic()

    def ended(self, key: str) -> Finished:
        """The end of the whole transfer."""
        return Finished(key=key, ok=not self.errors, bytes=0 if self.errors else self.bytes,
                        seconds=time.monotonic() - self.started_s, error="; ".join(self.errors),
                        may_land=self.may_land)


class RankedTransport:
    """The `Transport` of rank `rank` of an engine that has `tp` ranks in each pipeline stage, for a model of `kv_heads`
    KV heads.

    Peers are engines, so their metadata is a `RanksMetadata`. `transport` is this rank's own, with a name made by
    `rank_name`. This object owns it.
    """

    def __init__(self, transport: Transport, rank: int, tp: int, kv_heads: int) -> None:
        self.transport = transport
        self._rank = rank
        self._tp = tp
        self._kv_heads = kv_heads
        own = PeerMetadata.decode_any(transport.metadata())
        self._share, self._has_regions = _share(own), bool(own.cache.whole)
        self._engines: dict[str, _RankedPeer] = {}
        self._splits: dict[str, _SplitTransfer] = {}
        self._part_of: dict[str, str] = {}
        self._finished: list[Finished] = []

    @property
    def needs_polls(self) -> bool:
        """See Transport."""
        return self.transport.needs_polls

    def metadata(self) -> bytes:
        """This rank's entry in the engine's `RanksMetadata`."""
        return self.transport.metadata()

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        """See Transport. `heads` is ignored: it follows from the ranks. Raises UnmappableSplit where the ranks of both
        don't fit."""
        known = self._engines.get(name)
        if known is not None and known.metadata != metadata:
            raise TransferError(f"peer {name} is known with other metadata; a new incarnation needs a new name")
        ranks = RanksMetadata.decode(name, metadata).ranks
        theirs = [_share(PeerMetadata.decode(rank_name(name, other), each)) for other, each in enumerate(ranks)]
        shares, sources = self._shares_sent(name, theirs), sources_of(self._rank, self._share, theirs)
        engine = _RankedPeer(metadata, [rank_name(name, other) for other, share in enumerate(shares) if share.heads],
                             [rank_name(name, other) for other in sources], [])
        try:
            for other, share in enumerate(shares):
                if share.heads or other == 0 or other in sources:
                    self.transport.add_peer(rank_name(name, other), ranks[other],
                                            sources[other].heads if other in sources else share.heads)
                    engine.known.append(rank_name(name, other))
        except Exception:
            for rank in engine.known if known is None else ():
                self.transport.drop_peer(rank)
            raise
        self._engines[name] = engine

    def drop_peer(self, name: str) -> None:
        """See Transport."""
        engine = self._engines.pop(name, None)
        for rank in engine.known if engine is not None else ():
            self.transport.drop_peer(rank)

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int], notice: bytes,
              grant: str = "") -> None:
        """See Transport."""
        engine = self._engines.get(peer)
        if engine is None:
            raise TransferError(f"peer {peer} is not known")
        if key in self._splits:
            raise TransferError(f"write {key} is already open")
        front = rank_name(peer, 0)
        if not engine.targets:  # others write what we hold; `front` may be one that we read from
            local_block_ids = remote_block_ids = []
        if engine.targets == [front] or not local_block_ids:
            self.transport.write(key, front, local_block_ids, remote_block_ids, notice, grant)
            return
        self._splits[key] = _SplitTransfer(front, notice)
        for number, target in enumerate(engine.targets):
            self._begin(key, f"{key}@{number}", self.transport.write, target, local_block_ids, remote_block_ids, b"",
                        grant)
        self._go_on(key)

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        """See Transport."""
        engine = self._engines.get(peer)
        if engine is None:
            raise TransferError(f"peer {peer} is not known")
        if key in self._splits:
            raise TransferError(f"transfer {key} is already open")
        if len(engine.sources) == 1:
            self.transport.read(key, engine.sources[0], local_block_ids, remote_block_ids)
            return
        self._splits[key] = _SplitTransfer("", b"")
        for number, source in enumerate(engine.sources):
            self._begin(key, f"{key}@{number}", self.transport.read, source, local_block_ids, remote_block_ids)
        self._go_on(key)

    def open_grant(self, name: str, block_ids: list[int]) -> None:
        """See Transport."""
        self.transport.open_grant(name, block_ids)

    def close_grant(self, name: str) -> bool:
        """See Transport."""
        return self.transport.close_grant(name)

    def cancel(self, key: str) -> None:
        """See Transport."""
        split = self._splits.get(key)
        for open_key in list(split.open) if split is not None else [key]:
            self.transport.cancel(open_key)

    def is_open(self, key: str) -> bool:
        """See Transport."""
        return key in self._splits or self.transport.is_open(key)

    def poll(self) -> TransportProgress:
        """See Transport."""
        progress = self.transport.poll()
        for end in progress.finished:
            key = self._part_of.pop(end.key, None)
            if key is None:
                self._finished.append(end)
                continue
            split = self._splits[key]
            split.open.discard(end.key)
            split.bytes += end.bytes
            split.may_land |= end.may_land
            if not end.ok:
                split.errors.append(end.error)
            self._go_on(key)
        finished, self._finished = self._finished, []
        return TransportProgress(finished=finished, notices=progress.notices, unseen=progress.unseen)

    def renew(self, name: str) -> bytes:
        """See Transport. `name` is the engine's."""
        return self.transport.renew(rank_name(name, self._rank))

    def retire(self, key: str) -> None:
        """See Transport."""
        self.transport.retire(key)

    def live_handles(self) -> int:
        """See Transport."""
        return max(self.transport.live_handles(), len(self._splits))

    def close(self) -> bool:
        """See Transport."""
        return self.transport.close()

    def _go_on(self, key: str) -> None:
        """After the last part has ended: send the notice if all parts succeeded, then report the end."""
        split = self._splits[key]
        if split.open:
            return
        if split.notice and not split.errors:
            notice, split.notice = split.notice, b""
            self._begin(key, f"{key}@notice", self.transport.write, split.peer, [], [], notice)
        if not split.open:
            self._finished.append(self._splits.pop(key).ended(key))

    def _begin(self, key: str, part: str, start: Callable[..., None], *arguments: Any) -> None:
        """Start one part of a split transfer. A part that can't start has ended."""
        try:
            start(part, *arguments)
        except Exception as error:  # the other parts must still reach their ends
            self._splits[key].errors.append(str(error) if isinstance(error, TransferError) else repr(error))
            if not self.transport.is_open(part):
                return
        self._splits[key].open.add(part)
        self._part_of[part] = key

    def _shares_sent(self, name: str, theirs: list[RankShare]) -> list[RankShare]:
        """What we send to each rank of the peer, which hold `theirs`. Raises UnmappableSplit."""
        try:
            their_tp = stage_ranks(theirs, self._kv_heads)
            if self._has_regions and self._kv_heads > 1 and self._tp != their_tp:
                raise UnmappableSplit(f"tensor parallel size {self._tp} over {their_tp}: it must be the same where "
                                      f"regions of whole bytes are beside the KV of {self._kv_heads} heads")
            return shares_sent(self._rank, self._share, self._tp, theirs, their_tp, self._kv_heads)
        except UnmappableSplit as error:
            raise UnmappableSplit(f"peer {name}: {error}") from error


def _share(metadata: PeerMetadata) -> RankShare:
    """What that rank holds."""
    cache = metadata.cache
    return RankShare(range(cache.first_layer, cache.first_layer + cache.layers),
                     range(cache.first_head, cache.first_head + cache.kv_heads))
