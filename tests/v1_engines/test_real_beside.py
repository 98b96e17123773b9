# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines, each with vLLM's OffloadingConnector beside ours: tokens as one stock engine has them, and both
tiers of both engines are used (B116). Over simulated memory: tests/v1/test_beside.py.
"""
import random

import pytest

from tests.v1.test_real_engines import done, prompts
from tests.v1_engines.trio import stock_p_d
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
BLOCK, TOKENS, BLOCKS = 32, 6, 90
BLOCK_BYTES = 4 * BLOCK * 4 * 2 * 32 * 4  # layers, tokens, heads, keys and values, their size, float32
LOADED, STORED = "vllm:kv_offload_load_bytes_total:", "vllm:kv_offload_store_bytes_total:"
TIER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
    "cpu_bytes_to_use": 1 << 27, "spec_name": "HostTierSpec", "spec_module_path": "tests.v1.host_tier"}}


@pytest.fixture(scope="module")
def engines(logs):
    """A stock engine, P and D."""
    with stock_p_d(logs, {"num_gpu_blocks_override": BLOCKS, "beside": TIER}) as made:
        yield made


def figure(engine, name):
    """After a step, with which figures come."""
    engine.generate([[7, 8, 9]], 1)
    return engine.figures().get(name, 0)


def test_b116_what_either_has_offloaded_it_loads(engines):
    """B116: one prompt, after the cache of D, of P and of both was forgotten."""
    stock, p, d = engines
    (one, ), before = prompts(1160, (421, )), done(d)
    right, = stock.generate([one], TOKENS)
    assert d.generate([one], TOKENS) == [right] and done(d) == before + 1
    for engine in (p, d):
        wait_for(lambda engine=engine: figure(engine, STORED) >= 13 * BLOCK_BYTES, "all of it is offloaded")
    loaded = figure(d, LOADED), figure(p, LOADED)
    d.forget_prefixes()
    d.ask([one], TOKENS)
    assert d.answer() == [(right, 13 * BLOCK)], "the rest is D's own to compute"
    wait_for(lambda: figure(d, LOADED) == loaded[0] + 13 * BLOCK_BYTES, "D has loaded it")
    assert done(d) == before + 1
    longer, = prompts(1161, (200, ))
    right, = stock.generate([one + longer], TOKENS)
    d.forget_prefixes()
    p.forget_prefixes()
    computed = p.computed_tokens()
    d.ask([one + longer], TOKENS)
    assert d.answer() == [(right, 13 * BLOCK)] and done(d) == before + 2
    assert p.computed_tokens() - computed <= 5 + 200, "P loads, too"
    wait_for(lambda: figure(p, LOADED) == loaded[1] + 13 * BLOCK_BYTES, "P has loaded it")


def test_b116_tokens_are_those_of_one_stock_engine(engines):
    """B116: 60 prompts that share beginnings, in blocks that hardly suffice for four, with aborts between. What one
    evicts from the cache of an engine another loads from its tier."""
    stock, p, d = engines
    draw = random.Random(116)
    texts = prompts(1162, [draw.randrange(300, 700) for _ in range(8)])
    many = [draw.choice(texts)[:draw.randrange(40, 700)] + prompts(draw.random(), (draw.randrange(1, 200), ))[0]
            for _ in range(60)]
    before, loaded = done(d), [figure(one, LOADED) for one in (p, d)]
    for number, one in enumerate(many):  # in the same steps, so with the same rounding
        for engine in (stock, d):
            engine.ask([one], TOKENS)
        assert d.answer()[0][0] == stock.answer()[0][0], f"{number}: {len(one)} tokens"
        if number % 5 == 0:
            d.abort([draw.choice(texts)[:draw.randrange(41, 700)], *prompts(-number, (draw.randrange(41, 600), ))],
                    draw.choice((0.0, 0.01, 0.03, 0.1)))
    loaded = [(figure(one, LOADED) - was) / BLOCK_BYTES for one, was in zip((p, d), loaded, strict=True)]
    print(f"\n{len(many)} prompts, {done(d) - before:.0f} handed over; blocks loaded by P {loaded[0]:.0f}, by D "
          f"{loaded[1]:.0f}, stored {[figure(one, STORED) / BLOCK_BYTES for one in (p, d)]}")
    assert done(d) > before + 20 and all(loaded)
    for engine in (p, d):
        wait_for(lambda engine=engine: engine.used() < 1.5 / BLOCKS, "blocks come back, but that of `used` itself")


def test_b116_many_at_once_in_few_blocks(engines):
    """B116: more than fit at a time, so requests wait, are preempted and fall back, and copies are waited for."""
    stock, p, d = engines
    texts = prompts(1163, (700, 500))
    many = [text[:length] + one for (text, length), one in zip(
        [(text, length) for length in (300, 500, 64, 32, 480) for text in texts],
        prompts(1164, (80, 300, 41, 200, 64, 65, 100, 300, 150, 201)), strict=True)]
    right = [stock.generate([one], TOKENS)[0] for one in many]
    for _ in range(2):
        got = d.generate(many, TOKENS)
        same = sum(one == other for one, other in zip(got, right, strict=True))
        assert same >= len(many) - 2, "batches of other sizes round otherwise now and then"
    for engine in (p, d):
        wait_for(lambda engine=engine: engine.used() < 1.5 / BLOCKS, "blocks come back, but that of `used` itself")
