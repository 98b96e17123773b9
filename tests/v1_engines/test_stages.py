# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines with pipeline stages, also of several ranks each: tokens as one stock engine says them (B1, B5, B20,
B21, B22, B25, B44, B101). By hand: `heavy`.
"""
import random
import signal
import time

import pytest

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import check_killed, done, prompts, remote
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1500)]
SETTINGS = {"attempt_deadline_s": 200.0, "lease_s": 3.0, "heartbeat_s": 1.0, "prefix_reads": "always"}
LENGTHS = (1, 31, 32, 33, 64, 65, 200, 511, 513, 700, 1300)


def quarantined(engine: RealEngine) -> float:
    return engine.figures().get("vllm:pd_quarantined_blocks:", 0)


SHAPES = ["2to1", "1to2", "2to2", "2x2to1x2", "2x1to2x2"]  # of P and D: stages, or stages x ranks of each


@pytest.fixture(scope="module", params=SHAPES)
def pair(logs, mono, request):
    """P and D of such a shape."""
    broker, engines = BrokerProcess(), []
    try:
        for role, shape in zip(("kv_producer", "kv_consumer"), request.param.split("to"), strict=True):
            stages, _, ranks = shape.partition("x")
            engines.append(RealEngine(role, logs / f"{role}.{request.param}.log", broker.url, SETTINGS,
                                      pipeline_parallel_size=int(stages), tensor_parallel_size=int(ranks or 1),
                                      kv_cache_memory_bytes=128 << 20))
            engines[-1].ready()
        p, d = engines
        wait_for(lambda: d.generate(prompts(random.randrange(10**6), (300, ))) and done(d), "nothing goes remote")
        yield p, d
    finally:
        for engine in engines:
            engine.stop()
        broker.stop()


def test_b1_b44_b101_tokens_are_those_of_one_stock_engine(mono, pair):
    """One at a time, then many at once, so that several batches are in flight while prompts are handed over. B20: all
    blocks are back in the end."""
    p, d = pair
    before = done(d)
    for one in prompts(1, LENGTHS):
        assert d.generate([one]) == mono.generate([one]), len(one)
    assert done(d) >= before + 6
    many = prompts(2, [random.Random(3).randrange(20, 600) for _ in range(16)])
    assert d.generate(many, 20) == mono.generate(many, 20)
    for engine in pair:
        wait_for(lambda engine=engine: not engine.used(), "blocks are left over")
    assert p.figures().get("vllm:pd_jobs_total:", 0) >= done(d) - before


def test_b5_b101_a_prefix_that_d_has_is_read(mono, pair):
    """From all stages of D into all of P."""
    p, d = pair
    first = prompts(4, (512, ))[0]
    second = first[:256] + prompts(5, (300, ))[0]
    here = d.generate([first], params=[{"extra_args": {"kv_transfer_params": {"pd": "local"}}}])  # P must not have it
    assert here + d.generate([second]) == mono.generate([first]) + mono.generate([second])
    p.generate(prompts(302, (5, )))  # its front end takes figures while it serves
    assert p.figures().get("vllm:pd_prefix_reads_total:done")


def test_b25_b101_requests_that_are_aborted_harm_nobody(mono, pair):
    """While their prompts are prefilled elsewhere; other requests get their blocks at once."""
    _, d = pair
    for seed in range(20, 23):
        d.abort(prompts(seed, (1900, 1800, 900)), after_s=0.02 * (seed - 19))
        after = prompts(100 + seed, (700, 800, 900))
        assert d.generate(after) == mono.generate(after)
    wait_for(lambda: d.generate(prompts(9, (50, ))) and not quarantined(d), "blocks are never free")


def test_b22_b101_p_is_stopped_past_its_lease(mono, pair):
    p, d = pair
    many = prompts(6, (1900, 600))
    right, sent_away = mono.generate(many), remote(d)
    p.signal(signal.SIGSTOP)
    try:
        d.ask(many)
        time.sleep(2 * SETTINGS["lease_s"])
    finally:
        p.signal(signal.SIGCONT)
    assert [tokens for tokens, _ in d.answer()] == right
    assert remote(d) == sent_away + len(many)


def test_b20_b21_b101_p_is_killed_and_d_answers_by_itself(mono, pair):
    _, d = pair
    check_killed(mono, pair)
    wait_for(lambda: not d.used(), "blocks are left over")
