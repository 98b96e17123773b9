# SPDX-License-Identifier: Apache-2.0
"""Engines of two and four tensor-parallel ranks, each of which prefills for the other: a rank has two of the model's
four KV heads, or one. By hand: `heavy`."""
from collections.abc import Iterator

import pytest
from harness import PATIENT, EngineProcess, prompt

from tests.fakes.brokers import BrokerProcess

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]
LENGTHS = (16, 17, 31, 32, 33, 60, 120, 300, 700)
REMOTE = {**PATIENT, "max_local_prefill_tokens": 0}


@pytest.fixture(scope="module")
def engines(zygote) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """One of two ranks, one of four."""
    broker = BrokerProcess()
    made = [EngineProcess(zygote, "kv_both", 0, broker.url, REMOTE, tensor_parallel_size=ranks) for ranks in (2, 4)]
    try:
        for engine in made:
            engine.ready()
        two, four = made
        two.wait_for(four)
        four.wait_for(two)
        yield two, four
    finally:
        for engine in made:
            engine.stop()
        broker.stop()


@pytest.mark.parametrize("decodes", [0, 1], ids=["4 to 2", "2 to 4"])
def test_b1_b44_each_prefills_for_the_other(engines, mono, decodes):
    """B1, B44: tokens are mono's, prompts that share their beginnings included, and nothing is left over."""
    d, p = engines[decodes], engines[1 - decodes]
    texts = [prompt(length, f"{decodes} decodes") for length in LENGTHS]
    texts += [text + prompt(50, "the next turn") for text in texts[-3:]]
    before = [engine.counters() for engine in (d, p)]
    first, second = texts[:len(LENGTHS)], texts[len(LENGTHS):]
    assert d.tokens(first) + d.tokens(second) == mono.tokens(first) + mono.tokens(second)
    for engine in engines:
        engine.at_rest()
    ours, theirs = (engine.counters().since(start) for engine, start in zip((d, p), before, strict=True))
    assert ours["attempts_total:done"] == theirs["agent:prefill_sent"] == len(texts)
