# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which block go from one rank to another.

A plan is made once per peer from the two cache descriptions. It is a list of lanes. A lane is contiguous in every block
on both sides: a part of one plane, or of several planes that are adjacent. If both ranks hold the same heads it has the
whole block, otherwise the heads that both hold: in a token-major cache that is a lane for each token. What a layer has
beside its heads (`WholeRegion`) is a lane, too, and goes with them. A write takes pairs of block ids and moves every
lane of every pair. A peer that can't be mapped is refused when it is added, never in the middle of a request.

Ranks hold heads by vLLM's rule (`head_range`): KV heads are split evenly over the ranks, and if there are fewer heads
than ranks, several ranks hold the same head. Only one of these writes it (`heads_to_write`), so no byte is sent twice.
"""
from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from vllm_pd.errors import PeerMismatch, UnmappableSplit
from vllm_pd.transfer.layout import CacheDescription, WholeRegion

MAX_SAID = 4  # different sizes of regions in a message: a peer says what they are


class Run(NamedTuple):
    """One contiguous run of `bytes` in each block of a cache: `address` in block 0, `stride_bytes` further in each next
    one."""
    address: int
    bytes: int
    stride_bytes: int


class Lane(NamedTuple):
    """One contiguous run of `bytes` in each block. `local` and `remote` are its addresses in block 0; from block to
    block it advances by the stride of either cache."""
    local: int
    remote: int
    bytes: int
    local_stride_bytes: int
    remote_stride_bytes: int

    @property
    def ours(self) -> Run:
        """Where it is in our cache."""
        return Run(self.local, self.bytes, self.local_stride_bytes)

    @property
    def theirs(self) -> Run:
        """Where it is in the peer's."""
        return Run(self.remote, self.bytes, self.remote_stride_bytes)


def head_range(rank: int, ranks: int, kv_heads: int) -> range:
    """The KV heads, of `kv_heads` in the model, that tensor-parallel rank `rank` of `ranks` holds.

    Raises UnmappableSplit if neither of `ranks` and `kv_heads` divides the other: vLLM has no such split.
    """
    if max(ranks, kv_heads) % min(ranks, kv_heads):
        raise UnmappableSplit(f"{kv_heads} KV heads can't be split over {ranks} ranks: one must divide the other")
    if ranks > kv_heads:
        head = rank // (ranks // kv_heads)
        return range(head, head + 1)
    count = kv_heads // ranks
    return range(rank * count, (rank + 1) * count)


def heads_to_write(rank: int, ranks: int, peer_rank: int, peer_ranks: int, kv_heads: int) -> range:
    """The KV heads that our rank `rank` of `ranks` writes into rank `peer_rank` of the peer's `peer_ranks`.

    Over all our ranks, each head of the peer's rank is written once: of our ranks with the same heads, each serves
    other ranks of the peer. Raises UnmappableSplit if neither number of ranks divides the other.
    """
    if max(ranks, peer_ranks) % min(ranks, peer_ranks):
        raise UnmappableSplit(f"tensor parallel size {ranks} over {peer_ranks}: one must divide the other")
    ours, theirs = head_range(rank, ranks, kv_heads), head_range(peer_rank, peer_ranks, kv_heads)
    copies = max(1, ranks // kv_heads)
    if rank % copies != peer_rank % copies:
        return range(0)
    return overlap(ours, theirs)


def plan(ours: CacheDescription, theirs: CacheDescription, heads: range | None = None) -> list[Lane]:
    """The lanes for writing from our cache into theirs: all layers that both ranks hold, with the heads that both ranks
    hold, limited to `heads` if given, and what these layers have beside their heads. No lanes if `heads` is empty.

    Raises PeerMismatch if the blocks differ in dtype, shape, layout or in what is beside the heads, and UnmappableSplit
    if no layer or no head is shared, or if something is beside heads of which not all are shared. Both name the values
    of both sides.
    """
    for key in ("dtype", "block_size", "head_size", "layout"):
        mine, other = getattr(ours, key), getattr(theirs, key)
        if mine != other:
            raise PeerMismatch(key, _plain(mine), _plain(other))
    layers = overlap(range(ours.first_layer, ours.first_layer + ours.layers),
                     range(theirs.first_layer, theirs.first_layer + theirs.layers))
    beside = _beside(ours, theirs, layers)
    if heads is not None and not heads:
        return []
    shared = overlap(_heads(ours), _heads(theirs))
    heads = shared if heads is None else overlap(shared, heads)
    if not layers or not heads:
        raise UnmappableSplit(f"no layer or no KV head is shared: ours is {_share(ours)}, theirs is {_share(theirs)}")
    equal = _heads(ours) == _heads(theirs) == heads
    if beside and not equal:
        raise UnmappableSplit("with regions of whole bytes beside the KV both ranks must have the same heads: ours is "
                              f"{_share(ours)}, theirs is {_share(theirs)}")
    tokens = range(1 if equal else ours.head_runs)
    whole = ours.plane_heads == ours.kv_heads and theirs.plane_heads == theirs.kv_heads
    runs = [heads] if whole else [range(head, head + 1) for head in heads]
    of_heads = (Lane(ours.address(layer, part, run.start, token), theirs.address(layer, part, run.start, token),
                     len(run) * ours.head_bytes // len(tokens), ours.block_stride_bytes, theirs.block_stride_bytes)
                for run in runs for layer in layers for part in range(ours.layout.parts) for token in tokens)
    return _merge_adjacent(itertools.chain(of_heads, beside))


def by_token(lanes: list[Lane], ours: CacheDescription, theirs: CacheDescription) -> bool:
    """Whether a plan has a lane for each token, and not one for each plane or region at most."""
    return len(lanes) > max(len(cache.planes) + len(cache.whole) for cache in (ours, theirs))


def pair_blocks(local_ids: list[int], remote_ids: list[int], ours: CacheDescription,
                theirs: CacheDescription) -> tuple[list[int], list[int]]:
    """Check the block pairs of a write. Returns the local and the remote ids, sorted by the local id.

    The order of the pairs has no effect on the data. But allocators often return descending ids, and only ascending
    neighbours can be merged. Raises ValueError for pairs that must not be written.
    """
    if len(local_ids) != len(remote_ids):
        raise ValueError(f"{len(local_ids)} local blocks against {len(remote_ids)} remote blocks")
    for side, ids, end in (("local", local_ids, ours.num_blocks), ("remote", remote_ids, theirs.num_blocks)):
        if ids and not (min(ids) >= 0 and max(ids) < end):
            raise ValueError(f"{side} block ids {min(ids)}..{max(ids)} are outside 0..{end - 1}")
    for side, ids in (("remote", remote_ids), ("local", local_ids)):
        if len(set(ids)) != len(ids):
            raise ValueError(f"a {side} block id occurs twice")
    order = sorted(range(len(local_ids)), key=local_ids.__getitem__)
    return [local_ids[i] for i in order], [remote_ids[i] for i in order]


def descriptor_rows(runs: list[Run], cache: CacheDescription) -> np.ndarray:
    """NIXL's descriptors for every block of every lane, as strided rows. `runs`: of the lanes, in this cache.

    Returns uint64 [lanes, 5] = address, bytes, device, stride in bytes, count. Each row stands for one descriptor per
    block of the cache.
    """
    return np.array([(run.address, run.bytes, cache.device_id, run.stride_bytes, cache.num_blocks) for run in runs],
                    dtype=np.uint64)


def descriptor_indices(block_ids: list[int], lanes: list[Lane], cache: CacheDescription) -> np.ndarray:
    """The descriptors of these blocks in a list made of `descriptor_rows`: int32 [lanes * blocks], lane by lane."""
    first = np.arange(len(lanes), dtype=np.int32)[:, None] * np.int32(cache.num_blocks)
    return (first + np.array(block_ids, dtype=np.int32)[None, :]).ravel()


def run_descriptors(block_ids: list[int], runs: np.ndarray, cache: CacheDescription) -> np.ndarray:
    """NIXL's descriptors for these blocks alone. `runs`: uint64 [lanes, 3], a `Run` of this cache each. Returns uint64
    [blocks * lanes, 3] = address, bytes, device, block by block."""
    blocks = np.array(block_ids, dtype=np.uint64)
    rows = np.empty((len(block_ids), len(runs), 3), dtype=np.uint64)
    rows[..., 0], rows[..., 1], rows[..., 2] = runs[:, 0] + blocks[:, None] * runs[:, 2], runs[:, 1], cache.device_id
    return rows.reshape(-1, 3)


def _merge_adjacent(lanes: Iterable[Lane]) -> list[Lane]:
    """The same bytes in as few lanes as possible. Lanes are adjacent where all layers of a block are stored together,
    and then their blocks are at the same distance (`CacheDescription`)."""
    merged: list[Lane] = []
    for lane in lanes:
        last = merged[-1] if merged else None
        if last is not None and (last.local + last.bytes, last.remote + last.bytes) == (lane.local, lane.remote):
            merged[-1] = last._replace(bytes=last.bytes + lane.bytes)
        else:
            merged.append(lane)
    return merged


def _beside(ours: CacheDescription, theirs: CacheDescription, layers: range) -> list[Lane]:
    """The lanes of what these layers have beside their heads. Raises PeerMismatch."""
    mine, other = ([region for region in cache.whole if region.layer in layers] for cache in (ours, theirs))
    if [(one.layer, one.block_bytes) for one in mine] != [(one.layer, one.block_bytes) for one in other]:
        raise PeerMismatch("what is beside the KV of a block", said_regions(mine), said_regions(other))
    return [Lane(one.address, two.address, one.block_bytes, one.block_stride_bytes, two.block_stride_bytes)
            for one, two in zip(mine, other, strict=True)]


def said_regions(regions: Sequence[WholeRegion]) -> str:
    """How many regions of how many bytes these are, and a digest of what is of which layer. "" for none."""
    sizes = Counter(region.block_bytes for region in regions)
    digest = hashlib.sha256(repr([(region.layer, region.block_bytes) for region in regions]).encode()).hexdigest()[:8]
    said = [f"{sizes[size]} x {size} bytes" for size in sorted(sizes)]
    return f"{', '.join([*said[:MAX_SAID], *(['...'] if len(said) > MAX_SAID else [])])} ({digest})" if said else ""


def overlap(one: range, other: range) -> range:
    """What both have; `one` and `other` are ranges of step 1."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _heads(cache: CacheDescription) -> range:
    return range(cache.first_head, cache.first_head + cache.kv_heads)


def _share(cache: CacheDescription) -> str:
    return (f"layers {cache.first_layer}..{cache.first_layer + cache.layers - 1}, "
            f"KV heads {cache.first_head}..{cache.first_head + cache.kv_heads - 1}")


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
