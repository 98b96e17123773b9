# SPDX-License-Identifier: Apache-2.0
"""B44, B101: who sends what to whom, for every small split of two engines, and as `vllm-pd plan` prints it."""
import itertools
import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from vllm_pd.admin.split import STAGES_REFUSED, SplitOptions, report
from vllm_pd.cli import app
from vllm_pd.errors import ConfigError, UnmappableSplit
from vllm_pd.transfer.split import ParallelSplit, Sending, layer_range, rank_shares, sendings

TPS, PPS, HEADS, LAYERS = (1, 2, 3, 4, 6, 8), (1, 2, 3), (1, 2, 3, 4, 6, 8), (3, 7)


def divides(one: int, other: int) -> bool:
    return not max(one, other) % min(one, other)


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("prefill_tp,decode_tp", itertools.product(TPS, TPS))
def test_b44_b101_each_layer_and_head_of_each_decode_rank_comes_exactly_once(prefill_tp, decode_tp, kv_heads):
    """B44, B101: and from a rank that holds it. The others are refused."""
    for prefill_pp, decode_pp, layers in itertools.product(PPS, PPS, LAYERS):
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


def test_b101_the_command_says_what_is_refused_on_engines():
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
