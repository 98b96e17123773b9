# SPDX-License-Identifier: Apache-2.0
"""B97: V1's figures of where prompt tokens come from agree with each other, on V1's real schedulers: the counters by
source, those of its prefix cache, and those of a connector's.
"""
import collections
from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.v1.simulated import BLOCK_SIZE, Engine
from tests.v1.test_hazards import end, parked, prompt
from vllm_pd.protocol.actions import Released

LONG = 6 * BLOCK_SIZE + 5


@pytest.fixture
def engine(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, threshold=2 * BLOCK_SIZE, blocks=128)
    engine.sums = collections.Counter()
    deliver, publish = engine.deliver, engine.access.publish
    engine.deliver = lambda outputs: (count(engine.sums, outputs), deliver(outputs))
    engine.access.publish = lambda stats: (count(engine.sums, {0: SimpleNamespace(outputs=(), scheduler_stats=stats)}),
                                           publish(stats))
    return engine


def count(sums, outputs) -> None:
    """As V1's front end does."""
    for output in outputs.values():
        stats = output.scheduler_stats
        for name, found in (("cache", stats.prefix_cache_stats), ("external", stats.connector_prefix_cache_stats)) \
                if stats is not None else ():
            for field in ("requests", "queries", "hits"):
                added = getattr(found, field)
                assert added >= 0, "a counter of Prometheus does not go down"
                sums[f"{name} {field}"] += added
            for tier, tokens in found.hits_by_source.items():
                assert tokens >= 0
                sums[f"hits by source {tier.value}"] += tokens
        for one in output.outputs:
            if (found := one.prefill_stats) is not None:
                sums["prompt"] += found.num_prompt_tokens
                sums["computed"] += found.num_computed_tokens
                sums["local"] += found.num_local_cached_tokens
                sums["external"] += found.num_external_cached_tokens
                sums["cached"] += found.num_cached_tokens


def check(engine, answered: int, no_cache: int = 0) -> None:
    """All families, over so many prompts with an answer; `no_cache`: the tokens of those that may use no cache."""
    end(engine)
    sums = engine.sums
    assert sums["prompt"] == sums["computed"] + sums["local"] + sums["external"]
    assert sums["local"] == sums["cached"] == sums["cache hits"]
    assert sums["external"] == sums["external hits"] == sums[f"hits by source {CacheHitSource.P2P.value}"]
    assert sums["cache queries"] == sums["prompt"] - no_cache
    assert sums["external queries"] == sums["cache queries"] - sums["cache hits"]
    assert sums["cache requests"] == sums["external requests"] == answered - bool(no_cache)


def test_b97_what_a_peer_computed_is_external_and_what_is_computed_here_is_not(engine):
    engine.add("short", prompt(20))
    parked(engine, "remote", tokens=LONG)
    engine.prefilled("remote")
    engine.run()
    engine.add("hit", engine.prompts["remote"] + prompt(3 * BLOCK_SIZE))
    engine.run()
    engine.prefilled("hit")
    check(engine, 3)
    assert engine.sums["external"] == LONG + (len(engine.prompts["hit"]) - engine.cached["hit"])
    assert engine.sums["computed"] == 20 and engine.cached == {"short": 0, "remote": 0, "hit": 6 * BLOCK_SIZE}


def test_b97_what_did_not_come_is_no_hit(engine):
    first = parked(engine, "failed", tokens=LONG)
    parked(engine, "aborted", tokens=LONG)
    engine.abort("aborted")
    engine.protocol.peers = 0
    engine.lost(first)
    engine.run()
    engine.tell(Released(first), Released(engine.attempt("aborted")))
    engine.ended.pop("aborted"), engine.prompts.pop("aborted")
    check(engine, 1)
    assert engine.sums["external"] == 0 and engine.sums["computed"] == LONG


def test_b97_a_second_attempt_counts_once(engine):
    first = parked(engine, "a", tokens=LONG)
    engine.lost(first, peer="")
    engine.run()
    engine.tell(Released(first))
    engine.prefilled("a")
    check(engine, 1)
    assert engine.sums["external"] == LONG


def test_b97_a_prompt_that_may_use_no_cache_is_no_miss(engine):
    engine.add("plain", prompt(20))
    engine.add("scored", prompt(LONG), params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True,
                                                             skip_reading_prefix_cache=True))
    check(engine, 2, no_cache=LONG)
    assert engine.sums["external queries"] == 20


def test_b97_jobs_of_peers_are_in_none(engine):
    attempt = engine.job(prompt(LONG), cached_blocks=3)
    engine.run()
    engine.fill(engine._jobs[str(attempt)])
    engine.run()
    engine.transfer.end(engine.sent(attempt).key)
    engine.run()
    engine.add("after", prompt(20))
    check(engine, 1)
    assert engine.sums["prompt"] == 20
