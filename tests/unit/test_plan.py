# SPDX-License-Identifier: Apache-2.0
"""B2, B3, B42, B44: what a plan maps, and what it refuses."""

import numpy as np
import pytest

from vllm_pd.errors import PeerMismatch, UnmappableSplit
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory
from vllm_pd.transfer.plan import (
    Lane,
    by_token,
    descriptor_indices,
    descriptor_rows,
    pair_blocks,
    plan,
    run_descriptors,
)

BLOCK_SIZE, HEAD_SIZE, ELEMENT = 4, 2, 4


def cache(*, blocks=10, heads=range(4), layers=range(2), base=1 << 20, **other) -> CacheDescription:
    block_bytes = BLOCK_SIZE * HEAD_SIZE * ELEMENT * len(heads)
    fields = dict(layout=Layout.HEADS_FIRST, memory=Memory.DRAM, device_id=0, dtype="float32", num_blocks=blocks,
                  block_size=BLOCK_SIZE, head_size=HEAD_SIZE, first_head=heads.start, kv_heads=len(heads),
                  first_layer=layers.start, layers=len(layers), block_bytes=block_bytes,
                  block_stride_bytes=block_bytes,
                  planes=tuple(base + i * blocks * block_bytes for i in range(2 * len(layers))))
    return CacheDescription(**{**fields, **other})


def test_b3_equal_ranks_need_one_whole_block_per_plane():
    ours, theirs = cache(), cache(base=1 << 30, blocks=20)
    assert plan(ours, theirs) == [Lane(a, b, *[ours.block_bytes] * 3)
                                  for a, b in zip(ours.planes, theirs.planes, strict=True)]


def test_b3_equal_ranks_need_no_runs_of_heads():
    ours = cache(layout=Layout.TOKENS_FIRST)
    assert len(plan(ours, ours)) == 4


@pytest.mark.parametrize("ours,theirs", [(range(4), range(2, 4)), (range(2), range(4)), (range(1, 3), range(2, 4))])
def test_b44_only_heads_that_both_hold_are_moved(ours, theirs):
    mine, other = cache(heads=ours), cache(heads=theirs, base=1 << 30)
    shared = sorted(set(ours) & set(theirs))
    for number, lane in enumerate(plan(mine, other)):
        assert lane.bytes == len(shared) * mine.head_bytes
        assert lane.local == mine.planes[number] + (shared[0] - ours.start) * mine.head_bytes
        assert lane.remote == other.planes[number] + (shared[0] - theirs.start) * mine.head_bytes


def test_b44_only_layers_that_both_hold_are_moved():
    ours, theirs = cache(layers=range(0, 3)), cache(layers=range(2, 4), base=1 << 30)
    lanes = plan(ours, theirs)
    assert [lane.local for lane in lanes] == list(ours.planes[4:])
    assert [lane.remote for lane in lanes] == list(theirs.planes[:2])


@pytest.mark.parametrize("key,value,ours,theirs", [
    ("dtype", "bfloat16", "float32", "bfloat16"),
    ("block_size", 2, "4", "2"),
    ("head_size", 1, "2", "1"),
    ("layout", Layout.PACKED, "heads-first", "packed"),
])
def test_b42_blocks_of_another_kind_are_refused_with_both_values(key, value, ours, theirs):
    with pytest.raises(PeerMismatch) as refusal:
        plan(cache(), cache(**{key: value}))
    assert refusal.value.key == key and ours in str(refusal.value) and theirs in str(refusal.value)


@pytest.mark.parametrize("theirs,word", [
    (dict(heads=range(4, 8)), "KV heads 4..7"),
    (dict(layers=range(2, 4)), "layers 2..3"),
])
def test_b44_nothing_shared_is_refused_with_both_shares(theirs, word):
    with pytest.raises(UnmappableSplit, match=word):
        plan(cache(), cache(**theirs))


@pytest.mark.parametrize("ours,theirs", [(range(4), range(2, 4)), (range(2), range(4)), (range(1, 3), range(2, 4)),
                                         (range(4), range(3, 4))])
def test_b101_other_heads_of_a_token_major_cache_need_a_lane_for_each_token(ours, theirs):
    mine = cache(layout=Layout.TOKENS_FIRST, heads=ours)
    other = cache(layout=Layout.TOKENS_FIRST, heads=theirs, base=1 << 30)
    shared = sorted(set(ours) & set(theirs))
    run = HEAD_SIZE * ELEMENT  # of one head and one token
    lanes = plan(mine, other)
    assert lanes == [Lane(mine.planes[plane] + (token * len(ours) + shared[0] - ours.start) * run,
                          other.planes[plane] + (token * len(theirs) + shared[0] - theirs.start) * run,
                          len(shared) * run, mine.block_stride_bytes, other.block_stride_bytes)
                     for plane in range(4) for token in range(BLOCK_SIZE)]
    assert by_token(lanes, mine, other)
    assert not by_token(plan(mine, mine), mine, mine)


def test_b101_a_block_of_one_token_is_one_run_again():
    one = dict(block_size=1, block_bytes=32, block_stride_bytes=32, layout=Layout.TOKENS_FIRST)
    lanes = plan(cache(**one), cache(**{**one, "block_bytes": 16, "block_stride_bytes": 16}, heads=range(2, 4)))
    assert len(lanes) == 4 and {lane.bytes for lane in lanes} == {16}


def test_pairs_keep_together_when_put_in_order():
    assert pair_blocks([7, 1, 4], [2, 9, 3], cache(), cache()) == ([1, 4, 7], [9, 3, 2])


@pytest.mark.parametrize("local,remote,word", [
    ([1, 2], [1], "2 local blocks against 1"),
    ([10], [0], "local block ids 10..10 are outside 0..9"),
    ([0], [20], "remote block ids 20..20 are outside 0..19"),
    ([0], [-1], "remote block ids"),
    ([0, 1], [5, 5], "occurs twice"),
])
def test_b2_pairs_that_must_not_be_written_are_refused(local, remote, word):
    with pytest.raises(ValueError, match=word):
        pair_blocks(local, remote, cache(), cache(blocks=20))


def test_b3_indices_point_at_the_rows_of_every_block_in_every_lane():
    ours, theirs = cache(blocks=10), cache(blocks=20, base=1 << 30)
    lanes = plan(ours, theirs)
    rows = descriptor_rows([lane.theirs for lane in lanes], theirs)
    expanded = [(int(base) + i * int(stride), int(nbytes)) for base, nbytes, _, stride, count in rows
                for i in range(int(count))]
    chosen = [expanded[i] for i in descriptor_indices([3, 19], lanes, theirs)]
    assert chosen == [(lane.remote + block * theirs.block_stride_bytes, lane.bytes) for lane in lanes
                      for block in (3, 19)]


def test_b101_descriptors_of_some_blocks_are_the_lanes_of_each_block():
    theirs = cache(blocks=20, base=1 << 30)
    runs = [lane.theirs for lane in plan(cache(), theirs)]
    assert run_descriptors([3, 19], np.array(runs, dtype=np.uint64), theirs).tolist() == [
        [address + block * theirs.block_stride_bytes, nbytes, 0] for block in (3, 19) for address, nbytes, _ in runs]
