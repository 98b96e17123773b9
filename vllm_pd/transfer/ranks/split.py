# SPDX-License-Identifier: Apache-2.0
"""Which rank of a prefill engine sends which layers and KV heads to which rank of a decode engine.

Ranks of one engine are numbered as vLLM does: stage by stage, and by tensor-parallel rank within a stage. Layers go to
stages by vLLM's rule (`layer_range`), heads to ranks by `vllm_pd.transfer.plan.head_range`. Where a stage or a rank of
one engine has what several have at the other, a rank sends to several or receives from several. Of ranks of the
prefill engine that hold the same head, one sends it to each rank of the decode engine (`heads_to_write`).

Engines (`vllm_pd.transfer.ranks.transport`) take the layers of each rank from the description of its cache, and check
them (`stage_ranks`): a user may have split them in another way. What a rank then sends is `shares_sent`, here and
there.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_pd.errors import UnmappableSplit
from vllm_pd.transfer.plan import head_range, heads_to_write, overlap


class ParallelSplit(NamedTuple):
    """How many tensor-parallel ranks each stage of an engine has, and how many stages there are."""
    tp: int
    pp: int = 1


class RankShare(NamedTuple):
    """What one rank holds: layers and KV heads by their numbers in the model."""
    layers: range
    heads: range


class Sending(NamedTuple):
    """What one rank of the prefill engine sends to one rank of the decode engine: these heads of these layers."""
    prefill_rank: int
    decode_rank: int
    layers: range
    heads: range


def layer_range(stage: int, stages: int, layers: int) -> range:
    """The layers, of `layers` in the model, that pipeline stage `stage` of `stages` holds. vLLM's rule, unless
    VLLM_PP_LAYER_PARTITION names another: each stage has layers // stages, and the stages before the last one have one
    more each, from the back, until none is left over. Raises UnmappableSplit for more stages than layers."""
    if stages > layers:
        raise UnmappableSplit(f"{layers} layers can't be split over {stages} stages")
    least, more = divmod(layers, stages)
    sizes = [least + (stages - 1 - more <= each < stages - 1) for each in range(stages)]
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def rank_shares(split: ParallelSplit, layers: int, kv_heads: int) -> list[RankShare]:
    """What each rank of an engine holds, by rank. Raises UnmappableSplit."""
    return [RankShare(layer_range(stage, split.pp, layers), head_range(rank, split.tp, kv_heads))
            for stage in range(split.pp) for rank in range(split.tp)]


def stage_ranks(shares: Sequence[RankShare], kv_heads: int) -> int:
    """How many ranks each stage has, of an engine whose ranks hold these shares, by rank.

    Raises UnmappableSplit unless the stages hold all layers from 0, one after the other, and the ranks of each stage
    the heads that `head_range` says.
    """
    tp = max(1, len(shares) // len({share.layers.start for share in shares}))
    for rank, share in enumerate(shares):
        first = rank - rank % tp  # of this stage
        start = shares[first - 1].layers.stop if first else 0
        expected = RankShare(range(start, shares[first].layers.stop), head_range(rank % tp, tp, kv_heads))
        if share != expected:
            raise UnmappableSplit(f"rank {rank} of {len(shares)} has {_said(share)}; of {kv_heads} KV heads, {tp} "
                                  f"ranks to a stage, it should have {_said(expected)}")
    return tp


def shares_sent(rank: int, ours: RankShare, tp: int, theirs: Sequence[RankShare], their_tp: int,
                kv_heads: int) -> list[RankShare]:
    """What our rank `rank`, which holds `ours`, sends to each rank of the peer, which hold `theirs`: without heads
    where it sends nothing. `tp` and `their_tp`: the ranks of each stage.

    Over all our ranks, each layer and head of each rank of the peer is sent once. Raises UnmappableSplit if neither of
    `tp` and `their_tp` divides the other, or if the peer does not hold all of our layers.
    """
    if ours.layers.stop > max(share.layers.stop for share in theirs):
        raise UnmappableSplit(f"our rank {rank} has {_said(ours)}; the peer has fewer layers")
    sent = []
    for other, share in enumerate(theirs):
        layers = overlap(ours.layers, share.layers)
        heads = heads_to_write(rank % tp, tp, other % their_tp, their_tp, kv_heads)
        sent.append(RankShare(layers, heads if layers else range(0)))
    return sent


def sources_of(rank: int, ours: RankShare, theirs: Sequence[RankShare]) -> dict[int, RankShare]:
    """From which ranks of the peer, which hold `theirs`, our rank `rank`, which holds `ours`, reads what. Each of our
    layers and heads that they hold is there once: of several ranks that hold the same, our ranks choose by turns."""
    holders: dict[RankShare, list[int]] = {}
    for other, share in enumerate(theirs):
        shared = RankShare(overlap(ours.layers, share.layers), overlap(ours.heads, share.heads))
        if shared.layers and shared.heads:
            holders.setdefault(shared, []).append(other)
    return {others[rank % len(others)]: shared for shared, others in holders.items()}


def sendings(prefill: ParallelSplit, decode: ParallelSplit, layers: int, kv_heads: int) -> list[Sending]:
    """Who sends what to whom, by rank of the prefill engine, then of the decode engine. Each layer and head of each
    rank of the decode engine is in exactly one. Raises UnmappableSplit where vLLM has no such split, or where neither
    tensor-parallel size divides the other."""
    return list(_sendings(prefill, decode, layers, kv_heads))


def _sendings(prefill: ParallelSplit, decode: ParallelSplit, layers: int, kv_heads: int) -> Iterator[Sending]:
    receivers = rank_shares(decode, layers, kv_heads)
    for sender, ours in enumerate(rank_shares(prefill, layers, kv_heads)):
        for receiver, share in enumerate(shares_sent(sender, ours, prefill.tp, receivers, decode.tp, kv_heads)):
            if share.heads:
                yield Sending(sender, receiver, share.layers, share.heads)


def _said(share: RankShare) -> str:
    return (f"layers {share.layers.start}..{share.layers.stop - 1} and KV heads "
            f"{share.heads.start}..{share.heads.stop - 1}")
