# SPDX-License-Identifier: Apache-2.0
"""B44, B101: who sends what to whom, for every small split of two engines, and as `vllm-pd plan` prints it."""
import itertools
import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from vllm_pd.cli import app
from vllm_pd.errors import ConfigError, UnmappableSplit
from vllm_pd.ops.split import STAGES_REFUSED, SplitOptions, report
from vllm_pd.transfer.plan import head_range
from vllm_pd.transfer.ranks.split import (
    ParallelSplit,
    RankShare,
    Sending,
    layer_range,
    rank_shares,
    sendings,
    shares_sent,
    stage_ranks,
)

TPS, PPS, HEADS, LAYERS = (1, 2, 3, 4, 6, 8), (1, 2, 3), (1, 2, 3, 4, 6, 8), range(1, 8)


def divides(one: int, other: int) -> bool:
    return not max(one, other) % min(one, other)


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("prefill_tp,decode_tp", itertools.product(TPS, TPS))
def test_b44_b101_each_layer_and_head_of_each_decode_rank_comes_exactly_once(prefill_tp, decode_tp, kv_heads):
    """B44, B101: and from a rank that holds it. The others are refused."""
    for prefill_pp, decode_pp, layers in itertools.product(PPS, PPS, LAYERS):
        if max(prefill_pp, decode_pp) > layers:
            continue
        prefill, decode = ParallelSplit(prefill_tp, prefill_pp), ParallelSplit(decode_tp, decode_pp)
        if not (divides(prefill_tp, decode_tp) and divides(prefill_tp, kv_heads) and divides(decode_tp, kv_heads)):
            with pytest.raises(UnmappableSplit):
                sendings(prefill, decode, layers, kv_heads)
            continue
        got: list[Counter] = [Counter() for _ in range(decode.tp * decode.pp)]
        holds = rank_shares(prefill, layers, kv_heads)
        for each in sendings(prefill, decode, layers, kv_heads):
            assert set(each.layers) <= set(holds[each.prefill_rank].layers)
            assert set(each.heads) <= set(holds[each.prefill_rank].heads)
            got[each.decode_rank].update(itertools.product(each.layers, each.heads))
        for found, share in zip(got, rank_shares(decode, layers, kv_heads), strict=True):
            assert found == Counter(itertools.product(share.layers, share.heads))


def held(layers: tuple[int, ...], tp: int, kv_heads: int) -> list[RankShare]:
    """The shares of an engine whose stages have so many layers each."""
    ends = list(itertools.accumulate(layers))
    return [RankShare(range(end - count, end), head_range(rank, tp, kv_heads))
            for count, end in zip(layers, ends, strict=True) for rank in range(tp)]


def partitions(layers: int) -> list[tuple[int, ...]]:
    """Every way to split them over 1 to 3 stages."""
    return [sizes for stages in (1, 2, 3) for sizes in itertools.product(range(1, layers + 1), repeat=stages)
            if sum(sizes) == layers]


@pytest.mark.parametrize("prefill_tp,decode_tp,kv_heads", [(1, 1, 1), (1, 2, 2), (2, 1, 4), (4, 2, 2), (2, 4, 1)])
def test_b101_stages_may_be_split_in_any_way(prefill_tp, decode_tp, kv_heads):
    """VLLM_PP_LAYER_PARTITION: each layer and head of each decode rank comes once, from a rank that holds it."""
    for layers in range(1, 7):
        for prefill, decode in itertools.product(partitions(layers), repeat=2):
            ours, theirs = held(prefill, prefill_tp, kv_heads), held(decode, decode_tp, kv_heads)
            assert (stage_ranks(ours, kv_heads), stage_ranks(theirs, kv_heads)) == (prefill_tp, decode_tp)
            got: list[Counter] = [Counter() for _ in theirs]
            for rank, share in enumerate(ours):
                for found, sent in zip(got, shares_sent(rank, share, prefill_tp, theirs, decode_tp, kv_heads),
                                       strict=True):
                    assert set(sent.heads) <= set(share.heads)
                    assert not sent.heads or set(sent.layers) <= set(share.layers)
                    found.update(itertools.product(sent.layers, sent.heads))
            assert got == [Counter(itertools.product(share.layers, share.heads)) for share in theirs]


@pytest.mark.parametrize("shares,word", [
    (held((2, 2), 2, 4)[:3], "rank 0 of 3 has layers 0..1 and KV heads 0..1; of 4 KV heads, 1 ranks to a stage"),
    (held((2, 2), 1, 2)[::-1], "rank 0 of 2 has layers 2..3"),
    (held((2, 2), 1, 2)[1:], "rank 0 of 1 has layers 2..3.*should have layers 0..3"),
    ([*held((2, ), 1, 2), *held((3, 1), 1, 2)[1:]], "rank 1 of 2 has layers 3..3.*should have layers 2..3"),
    ([*held((2, ), 1, 2), RankShare(range(1, 4), range(2))], "rank 1 of 2 has layers 1..3.*should have layers 2..3"),
    (held((2, 2), 2, 2)[::2], "rank 0 of 2 has.*KV heads 0..0.*1 ranks to a stage.*KV heads 0..1"),
    ([*held((2, ), 2, 2)[:1], *held((3, ), 2, 2)[1:]], "rank 1 of 2 has layers 0..2.*should have layers 0..1"),
])
def test_b80_b101_shares_that_no_engine_has_are_refused(shares, word):
    """A stage is missing, or in the wrong place, has a gap or an overlap, or ranks that don't hold the same layers."""
    with pytest.raises(UnmappableSplit, match=word):
        stage_ranks(shares, 4 if "of 3" in word else 2)


def test_b80_a_peer_of_fewer_layers_is_refused():
    with pytest.raises(UnmappableSplit, match="our rank 1 has layers 2..3.*fewer"):
        shares_sent(1, held((2, 2), 1, 2)[1], 1, held((1, 2), 1, 2), 1, 2)


def test_b44_every_rank_holds_what_vllm_gives_it():
    assert [list(share.heads) for share in rank_shares(ParallelSplit(4), 2, 2)] == [[0], [0], [1], [1]]
    assert [list(share.heads) for share in rank_shares(ParallelSplit(2), 2, 4)] == [[0, 1], [2, 3]]
    assert [(list(share.layers), list(share.heads)) for share in rank_shares(ParallelSplit(2, 2), 3, 2)] == [
        ([0, 1], [0]), ([0, 1], [1]), ([2], [0]), ([2], [1])]


@pytest.mark.parametrize("layers,sizes", [(32, [8, 8, 8, 8]), (33, [8, 8, 9, 8]), (34, [8, 9, 9, 8]),
                                          (35, [9, 9, 9, 8]), (61, [31, 30]), (5, [1, 1, 1, 1, 1]), (7, [2, 3, 2])])
def test_b101_layers_go_to_stages_by_vllms_rule(layers, sizes):
    """tests/upstream/test_split.py asks vLLM itself."""
    ranges = [layer_range(stage, len(sizes), layers) for stage in range(len(sizes))]
    assert [len(each) for each in ranges] == sizes
    assert list(itertools.chain(*ranges)) == list(range(layers))


def test_b101_more_stages_than_layers_are_refused():
    with pytest.raises(UnmappableSplit, match="3 layers can't be split over 4 stages"):
        layer_range(0, 4, 3)


def test_b44_the_six_rows_of_a_known_rank_table():
    """One prefill engine of TP 2 and one decode engine of TP 4, as groups of a collective transport have them: a group
    is a rank of P, at place 0, and the ranks of D that it sends to. Its port is 2 * rank of P + 1."""
    sent = sendings(ParallelSplit(2), ParallelSplit(4), 32, 8)
    groups = {rank: [each.decode_rank for each in sent if each.prefill_rank == rank] for rank in (0, 1)}
    rows = [("P", rank, 0, 0, 1 + len(receivers), rank, 2 * rank + 1) for rank, receivers in groups.items()]
    rows += [("D", receiver, 1, 1 + place, 1 + len(receivers), 2 + receiver, 2 * rank + 1)
             for rank, receivers in groups.items() for place, receiver in enumerate(receivers)]
    # role, rank, engine, place in the group, size of the group, rank over both engines, port
    assert rows == [("P", 0, 0, 0, 3, 0, 1),
                    ("P", 1, 0, 0, 3, 1, 3),
                    ("D", 0, 1, 1, 3, 2, 1),
                    ("D", 1, 1, 2, 3, 3, 1),
                    ("D", 2, 1, 1, 3, 4, 3),
                    ("D", 3, 1, 2, 3, 5, 3)]


def test_b44_of_ranks_with_the_same_heads_each_serves_other_ranks():
    assert sendings(ParallelSplit(4), ParallelSplit(2), 1, 1) == [
        Sending(0, 0, range(1), range(1)), Sending(1, 1, range(1), range(1))]
    assert report(SplitOptions(prefill_tp=4, decode_tp=2, kv_heads=1)).idle == [2, 3]


def plan(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_table_of_the_command():
    assert plan("--prefill-tp", "2", "--decode-tp", "4").splitlines() == [
        "8 KV heads, 32 layers; prefill: TP 2, PP 1; decode: TP 4, PP 1",
        "P rank  D rank  layers  KV heads  of all bytes",
        "0       0       0..31   0..1      25.00%",
        "0       1       0..31   2..3      25.00%",
        "1       2       0..31   4..5      25.00%",
        "1       3       0..31   6..7      25.00%"]


def test_b101_the_command_says_what_v0_refuses():
    table = plan("--prefill-tp", "4", "--prefill-pp", "2", "--kv-heads", "2", "--layers", "3")
    assert STAGES_REFUSED in table and "hold the same heads: 1, 3, 5, 7" in table
    assert STAGES_REFUSED not in plan()


def test_the_json_of_the_command():
    found = json.loads(plan("--prefill-tp", "2", "--decode-pp", "2", "--kv-heads", "4", "--layers", "5", "--json"))
    assert found["prefill"] == {"tp": 2, "pp": 1} and found["decode"] == {"tp": 1, "pp": 2}
    assert found["sendings"][0] == {"prefill_rank": 0, "decode_rank": 0, "layers": [0, 2], "heads": [0, 1],
                                    "share": 0.3}
    assert [each["share"] for each in found["sendings"]] == [0.3, 0.2, 0.3, 0.2]
    assert found["idle_prefill_ranks"] == [] and found["refused"] == STAGES_REFUSED


@pytest.mark.parametrize("options,key", [
    (dict(prefill_tp=0), "--prefill-tp=0"), (dict(layers=-1), "--layers=-1"),
    (dict(prefill_tp=3), "--prefill-tp=3.*8 KV heads"), (dict(decode_tp=3), "--decode-tp=3.*8 KV heads"),
    (dict(decode_pp=33), "--decode-pp=33.*32 layers"),
    (dict(prefill_tp=2, decode_tp=3, kv_heads=6), "--decode-tp=3.*2 over 3"),
])
def test_b80_what_cannot_be_mapped_is_refused_by_key(options, key):
    with pytest.raises(ConfigError, match=key):
        report(SplitOptions(**options))
