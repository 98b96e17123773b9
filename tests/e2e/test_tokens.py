# SPDX-License-Identifier: Apache-2.0
"""The right answers: what two engines make together is what one makes alone."""

import random

from harness import prompt


def test_b1_greedy_tokens_equal_those_of_one_engine(pair, mono):
    """B1: 200 prompts of many lengths, all prefilled remotely."""
    draw = random.Random(1)
    prompts = [prompt(draw.choice([draw.randint(1, 64), draw.randint(1, 400)]), seed) for seed in range(200)]
    before = pair.d.counters()
    expected = mono.tokens(prompts)
    got = pair.d.tokens(prompts)
    assert got == expected
    assert len({tuple(tokens) for tokens in expected}) > 150  # or equality would prove little
    counted = pair.d.counters().since(before)
    assert counted["decisions_total:remote,length"] == 200
    assert counted["attempts_total:done"] == 200
