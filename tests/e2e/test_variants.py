# SPDX-License-Identifier: Apache-2.0
"""Engines that do both jobs, with prefix caching on one side only, chunked prefill on both, and lengths that differ."""

import random
from collections.abc import Iterator

import pytest
from harness import PATIENT, WAIT_S, BrokerProcess, EngineProcess, Pair, lend, prompt, resumed_together


@pytest.fixture(scope="module")
def both_processes(zygote, starting) -> Iterator[Pair]:
    broker = BrokerProcess()
    starting.callback(broker.stop)
    extra = {**PATIENT, "max_local_prefill_tokens": 20}
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    two_at_a_time = {"max_num_partial_prefills": 2, "max_long_partial_prefills": 2}  # as a kv_producer has it
    p = EngineProcess(zygote, "kv_both", 0, broker.url, extra, enable_prefix_caching=False,
                      **{**chunked, **two_at_a_time, "max_model_len": 512})
    d = EngineProcess(zygote, "kv_both", 1, broker.url, extra, **chunked)
    yield Pair(broker, p, d)
    for process in (d, p, broker):
        process.stop()


@pytest.fixture
def both(both_processes) -> Iterator[Pair]:
    """Two engines of role kv_both. "p" has no prefix caching and takes 512 tokens, "d" has it and takes 1024."""
    both_processes.p.ready()
    both_processes.p.wait_for_peers()
    yield from lend(both_processes)


def test_b1_both_ways_at_once(both, mono):
    """B1, and no dead-lock: each sends its long prompts to the other and computes what it gets."""
    draw = random.Random(12)
    prompts = [prompt(draw.randint(1, 300), 100 + seed) for seed in range(40)]
    expected = mono.tokens(prompts)
    before = both.p.counters(), both.d.counters()
    first = both.p.add_all(prompts)
    second = both.d.add_all(prompts)
    assert [r["outputs"][0]["token_ids"] for r in both.p.wait(first, WAIT_S)] == expected
    assert [r["outputs"][0]["token_ids"] for r in both.d.wait(second, WAIT_S)] == expected
    for engine, start in ((both.p, before[0]), (both.d, before[1])):
        counted = engine.counters().since(start)
        assert counted["attempts_total:done"] == counted["decisions_total:remote,length"] >= 5
        assert counted["decisions_total:local,threshold"] >= 1


@pytest.mark.parametrize("sender", ["p", "d"])
def test_b1_one_way_with_caching_on_one_side(sender, both, mono):
    """B1, B5: with prefix caching here or there; twice, so that there is something in the caches."""
    stem = prompt(64, f"stem for {sender}")
    prompts = [stem + prompt(21 + 9 * number, f"rest for {sender}") for number in range(6)]
    engine = {"p": both.p, "d": both.d}[sender]
    before = engine.counters()
    expected = mono.tokens(prompts)
    assert engine.tokens(prompts) == expected
    assert engine.tokens(prompts) == expected
    counted = engine.counters().since(before)
    assert counted["attempts_total:done"] == counted["decisions_total:remote,length"] >= (6 if sender == "d" else 12)


def test_b30_a_prompt_too_long_for_p(both, mono):
    """B30: P says no at once, D prefills by itself, P lives and is used again."""
    before, served = both.d.counters(), both.p.counters()
    long, short = prompt(700, 300), prompt(100, 301)
    assert both.d.tokens([long]) == mono.tokens([long])
    counted = both.d.counters().since(before)
    assert counted["attempts_total:failed"] == 1
    assert counted["decisions_total:local,peer"] == 1, "there is no other"
    assert counted["agent:decode_granted"] == both.p.counters().since(served)["agent:prefill_failed"] == 1
    assert both.d.tokens([short]) == mono.tokens([short])
    assert both.d.counters().since(before)["attempts_total:done"] == 1


@pytest.mark.parametrize("sender", ["d", "p"], ids=["P without caching", "P with caching"])
def test_b25_abort_between_two_chunks_on_p(sender, both, mono):
    """B25, B10: P has computed a part; it stops, sends nothing, and of its cache only that part is a hit."""
    tokens = prompt(400, f"chunks {sender}")
    decoder, prefiller = (both.d, both.p) if sender == "d" else (both.p, both.d)
    before = prefiller.counters()
    prefiller.do("hold", held=True)
    decoder.add(tokens, "x")
    decoder.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    prefiller.wait_until("scheduler.running")
    prefiller.do("step", count=2)
    assert prefiller.stats()["running"] == 1
    decoder.abort("x")
    prefiller.hear_cancel(before)
    prefiller.do("hold", held=False)
    both.at_rest()
    assert prefiller.counters().since(before)["transfer_bytes_total"] == 0
    assert 0 < prefiller.hit(tokens) < 400 if sender == "p" else prefiller.hit(tokens) == 0
    assert decoder.tokens([tokens]) == mono.tokens([tokens])


@pytest.mark.parametrize("sender", ["d", "p"], ids=["caching", "no caching"])
def test_b8_preempted_with_chunks(sender, both, mono):
    """B8: chunked prefill on both sides, with and without prefix caching where it is preempted."""
    engine = {"p": both.p, "d": both.d}[sender]
    prompts = [prompt(48, f"preempted {sender} {number}") for number in range(4)]
    expected = mono.tokens(prompts, max_tokens=70)
    engine.do("ballast", free_blocks=24)
    preempted = engine.evaluate("scheduler.num_cumulative_preemption")
    before = engine.counters()
    try:
        with engine.policy(max_parked_fraction=1.0):
            assert resumed_together(engine, both.d if sender == "p" else both.p, prompts, max_tokens=70) == expected
    finally:
        engine.do("ballast", free_blocks=0)
    assert engine.evaluate("scheduler.num_cumulative_preemption") > preempted
    assert engine.counters().since(before)["attempts_total:done"] == 4


def test_b7_samples_with_chunks(both, mono):
    """B7: n > 1 shares one prefill where there is prefix caching."""
    tokens, parameters = prompt(150, "samples"), {"n": 3, "temperature": 0.9, "seed": 3}
    before = both.d.counters()
    [got] = both.d.generate([tokens], **parameters)
    [expected] = mono.generate([tokens], **parameters)
    assert [part["token_ids"] for part in got["outputs"]] == [part["token_ids"] for part in expected["outputs"]]
    counted = both.d.counters().since(before)
    assert counted["decisions_total:remote,length"] == counted["attempts_total:done"] == 1


def test_b7_samples_without_prefix_caching_stay(both):
    """B7: each would need a transfer of its own. (Not compared: with chunked prefill upstream's sampler lets a seeded
    sequence draw for one that does not sample yet, so seeds mean nothing beside such a one.)"""
    before = both.p.counters()
    [got] = both.p.generate([prompt(150, "samples")], n=3, temperature=0.9)
    assert [len(part["token_ids"]) for part in got["outputs"]] == [8, 8, 8]
    counted = both.p.counters().since(before)
    assert counted["decisions_total:local,feature"] >= 1 and counted["decisions_total:remote,length"] == 0


def test_b10_an_aborted_chunked_prefill_in_a_real_engine(both, mono):
    """B10: upstream's own defect, without any peer: what no chunk computed is no hit."""
    tokens = prompt(300, 500)
    with both.d.policy(max_local_prefill_tokens=10_000):
        both.d.do("hold", held=True)
        both.d.add(tokens, "x")
        both.d.do("step", count=2)
        both.d.abort("x")
        both.d.do("hold", held=False)
        both.d.at_rest()
        assert both.d.tokens([tokens]) == mono.tokens([tokens])


def test_b6_seeded_with_chunks(both, mono):
    """B6: sampling starts on D whatever P did in how many steps."""
    prompts = [prompt(150, 600 + number) for number in range(3)]
    parameters = {"temperature": 1.0, "seed": 42, "max_tokens": 12}
    before = both.d.counters()
    assert both.d.tokens(prompts, **parameters) == mono.tokens(prompts, **parameters)
    assert both.d.counters().since(before)["attempts_total:done"] == len(prompts)
