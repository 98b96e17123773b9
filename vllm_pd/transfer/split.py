# SPDX-License-Identifier: Apache-2.0
"""Which rank of a prefill engine sends which layers and KV heads to which rank of a decode engine.

For what is printed and tested; engines map their ranks themselves (`vllm_pd.transfer.ranks`), by the same functions.
Ranks of one engine are numbered as vLLM does: stage by stage, and by tensor-parallel rank within a stage. Layers go to
stages by vLLM's rule (`layer_range`), heads to ranks by `vllm_pd.transfer.plan.head_range`. Where a stage or a rank of
one engine has what several have at the other, a rank sends to several or receives from several. Of ranks of the
prefill engine that hold the same head, one sends it to each rank of the decode engine (`heads_to_write`).
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vllm_pd.errors import UnmappableSplit
from vllm_pd.transfer.plan import head_range, heads_to_write


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


def sendings(prefill: ParallelSplit, decode: ParallelSplit, layers: int, kv_heads: int) -> list[Sending]:
    """Who sends what to whom, by rank of the prefill engine, then of the decode engine. Each layer and head of each
    rank of the decode engine is in exactly one. Raises UnmappableSplit where vLLM has no such split, or where neither
    tensor-parallel size divides the other."""
    return list(_sendings(prefill, decode, layers, kv_heads))


def _sendings(prefill: ParallelSplit, decode: ParallelSplit, layers: int, kv_heads: int) -> Iterator[Sending]:
    receivers = rank_shares(decode, layers, kv_heads)
    for sender, ours in enumerate(rank_shares(prefill, layers, kv_heads)):
        for receiver, theirs in enumerate(receivers):
            heads = heads_to_write(sender % prefill.tp, prefill.tp, receiver % decode.tp, decode.tp, kv_heads)
            shared = range(max(ours.layers.start, theirs.layers.start), min(ours.layers.stop, theirs.layers.stop))
            if shared and heads:
                yield Sending(sender, receiver, shared, heads)
