# SPDX-License-Identifier: Apache-2.0
"""Prefill engines behind the broker's registry, with V0's real block allocator: B5, and what the choice is worth."""
import json
import random

import msgspec
import pytest

from vllm_pd.bench.simulation import hits, prefill_hits
from vllm_pd.bench.simulation.prefills import PrefillFleet, SimFleet
from vllm_pd.bench.simulation.trace import Arrival, TraceConfig
from vllm_pd.bench.simulation.workers import SimSpeed, SimWorker
from vllm_pd.errors import ConfigError
from vllm_pd.protocol import messages as m
from vllm_pd.router.policy import Policy, RoutingPolicyConfig

BLOCK = 16
COMMON, OWN = 2048, 320  # tokens
SMALL = prefill_hits.PrefillBench(2, (1, ), (4.0, ), trace=TraceConfig(
    conversations=40, system_tokens=150, documents=6, document_tokens=1500, document_share=0.7, longest_tokens=4000),
    fleet=hits.FleetConfig(workers=2))


def decode_engine(name, blocks=4000):
    return SimWorker(name, blocks, BLOCK, SimSpeed(8000.0, 0.001), lambda *_: None, lambda *_: None)


def fleet(decodes, **more):
    return SimFleet(decodes, PrefillFleet((8000.0, 8000.0), 4000, BLOCK, **more))


def asked(common, number, at_s):
    dice = random.Random(number)
    return Arrival(at_s, number, 0, (*common, *dice.choices(range(50_000), k=OWN)), (1, 2, 3))


@pytest.mark.parametrize("pause_s", [0.0, 1.0], ids=["at once", "one after the other"])
def test_b5_a_common_prompt_is_computed_once_by_two_prefill_engines(pause_s):
    """Four decode engines get a prompt each with the same beginning. The prefill engine that computes it for the first
    has it for the others, whether it is computed by then or not."""
    decodes = [decode_engine(f"d{number}") for number in range(4)]
    engines = fleet(decodes)
    common = random.Random(99).choices(range(50_000), k=COMMON)
    for number, decode in enumerate(decodes):
        engines.advance(pause_s * number)
        decode.submit(asked(common, number, pause_s * number), pause_s * number)
    engines.advance(float("inf"))
    found = engines.figures()
    assert found.jobs == 4 and found.computed_tokens == COMMON + 4 * OWN and found.skew == 2.0
    assert all(len(decode.done) == 1 and decode.done[0].hit_tokens == 0 for decode in decodes)
    before = [decode_engine(f"d{number}") for number in range(4)]
    by_slots = fleet(before, count_tokens=False)
    for number, decode in enumerate(before):
        by_slots.advance(pause_s * number)
        decode.submit(asked(common, number, pause_s * number), pause_s * number)
    by_slots.advance(float("inf"))
    assert by_slots.figures().computed_tokens == 2 * COMMON + 4 * OWN, "each of the two computed it"


def test_b5_another_prompt_does_not_wait_behind_the_common_one():
    decodes = [decode_engine(f"d{number}") for number in range(3)]
    engines = fleet(decodes)
    common, other = (random.Random(seed).choices(range(50_000), k=COMMON) for seed in (98, 99))
    engines.advance(0.0)
    for number, decode in enumerate(decodes):
        decode.submit(asked(other if number == 2 else common, number, 0.0), 0.0)
    engines.advance(float("inf"))
    found = engines.figures()
    assert found.computed_tokens == 2 * COMMON + 3 * OWN and found.skew < 1.2
    assert decodes[2].done[0].first_token_s == pytest.approx((COMMON + OWN) / 8000.0)


def test_b5_over_nats_a_prompt_goes_where_its_decode_engine_sent_the_last_of_its_kind():
    """The decode engine has room for two prompts, so that it forgets two kinds for two others."""
    (decode, ) = decodes = [decode_engine("d", blocks=340)]
    engines = fleet(decodes, nats=True, max_parked_fraction=1.0)
    kinds = [random.Random(seed).choices(range(50_000), k=COMMON) for seed in range(4)]
    for number, kind in enumerate((0, 1, 2, 3, 1, 0, 3, 2)):
        engines.advance(1.5 * (number // 2))
        decode.submit(asked(kinds[kind], number, 1.5 * (number // 2)), 1.5 * (number // 2))
    engines.advance(float("inf"))
    found = engines.figures()
    assert found.jobs == 8 and found.computed_tokens == 4 * COMMON + 8 * OWN and found.skew == 1.0


def test_over_nats_a_job_does_not_wait_for_the_preferred_engine():
    decodes = [decode_engine("d")]
    engines = fleet(decodes, nats=True, max_prefill_jobs=1)
    engines.advance(0.0)
    common = random.Random(99).choices(range(50_000), k=COMMON)
    for number in range(4):
        decodes[0].submit(asked(common, number, 0.0), 0.0)
    engines.advance(float("inf"))
    found = engines.figures()
    assert found.jobs == 4 and found.computed_tokens == 2 * COMMON + 4 * OWN, "both have computed the beginning"


def test_short_prompts_and_those_without_a_place_stay_where_they_are():
    (decode, ) = decodes = [decode_engine("d", blocks=500)]
    engines = fleet(decodes, max_local_prefill_tokens=COMMON)
    engines.advance(0.0)
    for number, length in enumerate((COMMON, COMMON, COMMON - OWN)):  # the last one is short
        decode.submit(asked(random.Random(number + 7).choices(range(50_000), k=length), number, 0.0), 0.0)
    assert decode.load().remote_prefilling == 1, "for the second one too many blocks would be parked"
    engines.advance(float("inf"))
    assert engines.figures().jobs == 1 and len(decode.done) == 3
    assert decode.load() == msgspec.structs.replace(decode.load(), remote_prefilling=0, used_blocks=0)


def test_what_the_choice_is_worth_is_measured():
    said: list[str] = []
    report = prefill_hits.measure(SMALL, said.append)
    assert len(said) == len(report["runs"]) == 4
    slots, nats, tokens, pool = report["summary"]
    assert tokens["p_hit_share"] > 1.2 * slots["p_hit_share"]
    assert nats["p_hit_share"] > slots["p_hit_share"] and nats["p_computed_tokens"] < slots["p_computed_tokens"]
    assert tokens["p_computed_tokens"] < slots["p_computed_tokens"]
    assert pool["p_skew"] == 1.0 and pool["p_mean_s"] < tokens["p_mean_s"] < slots["p_mean_s"]
    assert prefill_hits.table(report).row_count == 4
    json.dumps(report)
    with pytest.raises(ConfigError, match="--prefill=-1"):
        prefill_hits.PrefillBench.of(-1, None, 0)
    with pytest.raises(ConfigError, match="--prefill=90 can't be used: write at most"):
        prefill_hits.measure(msgspec.structs.replace(SMALL, prefills=90))


def test_without_prefill_engines_all_is_as_before():
    trace = hits.make(SMALL.trace)
    alone = hits.FleetConfig(workers=2, worker_blocks=1500)
    decide = hits.by_policy(RoutingPolicyConfig(), Policy.KV)
    far = msgspec.structs.replace(alone, prefill=PrefillFleet(max_local_prefill_tokens=m.MAX_TOKENS))
    assert hits.simulate(trace, alone, decide) == hits.simulate(trace, far, decide)
