# SPDX-License-Identifier: Apache-2.0
"""B11, B97: upstream's own metrics of D and P, and the cached tokens of a client's usage, with real engines."""

import pytest
from harness import EngineProcess, prompt

# A stat logger that adds up what upstream's loggers are told.
SPY = """
from collections import Counter
class Spy:
    def __init__(self):
        self.counted = Counter()
    def log(self, stats):
        self.counted.update(
            prompt_tokens=stats.num_prompt_tokens_iter, generation_tokens=stats.num_generation_tokens_iter,
            computed_tokens=stats.num_tokens_iter, first_tokens=len(stats.time_to_first_tokens_iter),
            requests=len(stats.finished_reason_requests), ends=len(stats.time_e2e_requests),
            request_prompt_tokens=sum(stats.num_prompt_tokens_requests),
            request_generation_tokens=sum(stats.num_generation_tokens_requests))
spy = Spy()
engine.log_stats, engine.stat_loggers = True, {"spy": spy}
"""


@pytest.fixture
def spied(pair, mono):
    """All three engines, with caches as new."""
    engines = (pair.d, pair.p, mono)
    for engine in engines:
        assert engine.do("reset_prefix_cache")
        engine.execute(SPY)
    yield pair
    for engine in engines:
        engine.execute("engine.log_stats, engine.stat_loggers = False, {}")


def counted(engine: EngineProcess) -> dict:
    return engine.evaluate("dict(spy.counted)")


def hit_rate(engine: EngineProcess) -> float:
    return engine.evaluate("scheduler.get_prefix_cache_hit_rate(__import__('vllm').utils.Device.GPU)")


def test_b97_each_request_is_counted_once_where_its_client_is(spied, mono):
    """B97: D counts what mono counts, P nothing but its own; what P did is in families of ours."""
    prompts = [prompt(length, "counted") for length in (16, 17, 60, 130)]
    before = spied.p.counters()
    assert spied.d.tokens(prompts) == mono.tokens(prompts)
    spied.at_rest()
    apart, alone, elsewhere = counted(spied.d), counted(mono), counted(spied.p)
    assert apart.pop("computed_tokens") < alone.pop("computed_tokens")
    assert apart == alone and alone["requests"] == len(prompts)
    assert elsewhere.pop("computed_tokens") >= sum(map(len, prompts))
    assert not any(elsewhere.values())
    ours = spied.p.counters().since(before)
    assert (ours["jobs_total"], ours["job_tokens_total"]) == (len(prompts), sum(map(len, prompts)))
    own = prompt(20, "P's own")
    assert spied.p.tokens([own]) == mono.tokens([own])
    assert (counted(spied.p)["requests"], counted(spied.p)["prompt_tokens"]) == (1, 20)


def test_b11_cached_tokens_and_hit_rate_are_those_of_an_engine_alone(spied, mono):
    """B11, B5: D's own prefix hit, whoever computed the rest; what P finds in its cache is not D's."""
    stem = prompt(48, "stem")
    prompts = [stem + prompt(20, "one"), stem + prompt(30, "two"), prompt(40, "three")]
    for tokens in prompts:
        [got], [expected] = spied.d.generate([tokens]), mono.generate([tokens])
        assert got["cached_tokens"] == expected["cached_tokens"] == (48 if tokens is prompts[1] else 0)
    assert hit_rate(spied.d) == pytest.approx(hit_rate(mono)) and hit_rate(mono) > 0
    for engine in (spied.d, mono):
        assert engine.do("reset_prefix_cache")
    [got], [expected] = spied.d.generate(prompts[:1]), mono.generate(prompts[:1])
    assert got["cached_tokens"] == expected["cached_tokens"] == 0
