# SPDX-License-Identifier: Apache-2.0
"""The hit-rate bench: which policy hits most must not change unseen, and none may beat what can't be beaten."""
import functools
import json
import re

import msgspec
import pytest

from vllm_pd.bench.simulation import hits
from vllm_pd.bench.simulation.trace import TraceConfig
from vllm_pd.errors import ConfigError
from vllm_pd.router.policy import RoutingPolicyConfig, choose

SMALL = hits.HitBench(seeds=(1,), pool_shares=(0.5, 1.2), trace=TraceConfig(
    conversations=50, conversations_per_s=0.7, system_tokens=150, document_tokens=600, longest_tokens=2500,
    documents=5), moves=1000)


def test_the_kv_policy_is_close_to_what_is_possible_and_the_others_are_in_their_order(tmp_path):
    said: list[str] = []
    report = hits.measure(SMALL, said.append)
    assert len(said) == len(report["runs"]) == 2
    tight, roomy = (part["policies"] for part in report["summary"])
    for part in report["summary"]:
        assert all(each["of_bound"] <= 1.0 for each in part["policies"].values())
        shares = {name: each["hit_share"] for name, each in part["policies"].items()}
        assert shares["kv"] > shares["consistent-hash"] > 1.3 * max(shares["round-robin"], shares["least-load"])
        assert part["policies"]["kv"]["mean_ttft_s"] < part["policies"]["round-robin"]["mean_ttft_s"]
    assert tight[hits.PLACED]["hit_share"] > tight["kv"]["hit_share"] - 0.01, "it is where that search began"
    assert roomy["kv"]["of_bound"] > 0.95 and tight["kv"]["of_pool"] > 0.9
    hits.picture(report, tmp_path / "hits.png")
    assert (tmp_path / "hits.png").stat().st_size > 10_000
    assert hits.table(report).row_count == 2 * 7
    json.dumps(report)


def test_b80_more_workers_than_the_longest_request_allows_are_refused():
    """Before anything is simulated, with the number that is possible."""
    with pytest.raises(ConfigError, match=r"--workers=15 can't be used: write at most (\d+)") as caught:
        hits.measure(hits.HitBench.of(15, 0), print)
    most = int(re.search(r"at most (\d+)", str(caught.value))[1])
    trace = hits.make(msgspec.structs.replace(hits.HitBench().trace, seed=0))
    blocks = 0.25 * hits.oracle.footprint_blocks(trace, 16)
    longest = max(hits.blocks_of(one, 16) for one in trace)
    assert round(blocks / most) >= longest > round(blocks / (most + 1))


def test_a_run_is_its_seeds():
    trace = hits.make(msgspec.structs.replace(SMALL.trace, conversations=15))
    fleet = hits.FleetConfig(workers=3, worker_blocks=400)
    warm = functools.partial(choose, RoutingPolicyConfig(temperature=0.5))
    assert hits.simulate(trace, fleet, warm, 1) == hits.simulate(trace, fleet, warm, 1)
    assert hits.simulate(trace, fleet, warm, 1) != hits.simulate(trace, fleet, warm, 2)
    placed: list[int] = []
    first = hits.simulate(trace, fleet, warm, 1, placed)
    again = hits.simulate(trace, fleet, hits.FixedPlacement(placed), 7)
    assert msgspec.structs.replace(again, reasons=first.reasons) == first, "the same placement has the same hits"
