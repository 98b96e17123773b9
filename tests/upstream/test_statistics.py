# SPDX-License-Identifier: Apache-2.0
"""B11, B97: what upstream's statistics count on a decode and on a prefill engine: each client's request once, where the
client is, as without disaggregation."""

from collections import Counter
from types import SimpleNamespace

import pytest
from vllm.engine.llm_engine import LLMEngine
from vllm.utils import Device

from tests.fakes.simulated_engine import BLOCK_SIZE, SimulatedEngine

PROMPTS = {"a": list(range(100, 121)), "b": list(range(200, 203)), "c": list(range(300, 312))}


def step(engine: SimulatedEngine, counted: Counter, **progress) -> None:
    """A step, and what upstream's loggers are told of it."""
    engine.step(**progress)
    scheduler = engine.scheduler
    stats = LLMEngine._get_stats(SimpleNamespace(
        scheduler=[scheduler], cache_config=scheduler.cache_config, lora_config=None, disagg=scheduler.disagg,
        device_config=SimpleNamespace(device_type="cuda")), engine.outputs)
    counted.update(prompt_tokens=stats.num_prompt_tokens_iter, generation_tokens=stats.num_generation_tokens_iter,
                   computed_tokens=stats.num_tokens_iter, first_tokens=len(stats.time_to_first_tokens_iter),
                   requests=len(stats.finished_reason_requests), ends=len(stats.time_e2e_requests),
                   request_prompt_tokens=sum(stats.num_prompt_tokens_requests),
                   request_generation_tokens=sum(stats.num_generation_tokens_requests))


@pytest.mark.parametrize("chunk", [None, 8])
def test_b11_a_decode_engine_counts_what_an_engine_alone_counts(chunk):
    """B11: also the prompt tokens that were computed elsewhere; what its steps computed is a figure of its own."""
    counts = {}
    for remote in (False, True):
        engine = SimulatedEngine(chunk=chunk, wants_remote=lambda group, remote=remote: remote)
        counted = counts[remote] = Counter()
        for name, tokens in PROMPTS.items():
            engine.add(name, tokens, max_tokens=5)
        while engine.scheduler.has_unfinished_seqs():
            arrived = list(engine.scheduler.remote_prefilling)
            for attempt in arrived:
                engine.write_remotely(attempt)
            step(engine, counted, finished_prefills=arrived)
    alone, apart = counts[False], counts[True]
    assert alone["requests"] == 3 and alone["prompt_tokens"] == sum(map(len, PROMPTS.values()))
    assert apart.pop("computed_tokens") == 3 * 5 < alone.pop("computed_tokens")
    assert apart == alone


@pytest.mark.parametrize("chunk", [None, 8])
def test_b97_a_job_of_a_peer_is_no_request_of_a_client(chunk):
    """B97: a prefill engine's steps compute it, its clients' figures know nothing of it."""
    engine, counted = SimulatedEngine(chunk=chunk), Counter()
    for name, tokens in PROMPTS.items():
        engine.add(f"pd-{name}", tokens, remote_decode=name)
    engine.peers.wants_remote = lambda group: False
    while engine.scheduler.has_unfinished_seqs():
        step(engine, counted, finished_transfers=list(engine.scheduler.prefill_sending))
    assert counted.pop("computed_tokens") >= sum(map(len, PROMPTS.values()))
    assert set(counted.values()) == {0}, counted
    engine.add("own", [7] * 5, max_tokens=2)
    while engine.scheduler.has_unfinished_seqs():
        step(engine, counted)
    assert (counted["requests"], counted["prompt_tokens"], counted["generation_tokens"]) == (1, 5, 2)


@pytest.mark.parametrize("hit", [0, 3])
def test_b97_prefix_hits_of_a_decode_engine_mean_what_they_mean_without_disaggregation(hit):
    """B97: the hit rate, and the cached tokens that a client is told of; on a GPU a prompt step notes these."""
    first = list(range(500, 520))
    second = first[:hit * BLOCK_SIZE] + list(range(600, 610))
    rates = {}
    for remote in (False, True):
        engine = SimulatedEngine(wants_remote=lambda group, remote=remote: remote)
        for name, tokens in (("first", first), ("second", second)):
            engine.add(name, tokens)
            seq = engine.seq(name)
            engine.step()
            for attempt in list(engine.scheduler.remote_prefilling):
                assert seq.data.get_num_cached_tokens() == (hit * BLOCK_SIZE if name == "second" else 0)
                engine.arrive(attempt)
            engine.run()
        rates[remote] = engine.scheduler.get_prefix_cache_hit_rate(Device.GPU)
    assert rates[True] == rates[False] == pytest.approx(hit / (5 + len(second) // BLOCK_SIZE))
