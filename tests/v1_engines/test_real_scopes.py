# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines, real transfers, prompts with salts: tokens as one stock engine has them, and prefix hits within one
salt alone, on D and on P (B1, B115). Over simulated memory: tests/v1/test_scopes.py.
"""
import random

import pytest

from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts
from tests.v1_engines.trio import stock_p_d

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
BLOCK, STEP, TOKENS = 32, 256, 6
LENGTHS = (64, 65, 96, 128, 129, 255, 256, 257, 300, 512, 513, 600, 700, 900)
SALTS = ("", "one", "two")


@pytest.fixture(scope="module")
def engines(logs):
    """A stock engine, P and D."""
    with stock_p_d(logs, max_num_batched_tokens=STEP, kv_cache_memory_bytes=192 << 20) as made:
        yield made


def answer(engine: RealEngine, prompt: list[int], salt: str) -> tuple[list[int], int]:
    """Its tokens, and how many of the prompt were cached."""
    engine.ask([prompt], TOKENS, salts=[salt])
    (found,) = engine.answer()
    return found


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.heavy)])
def test_b115_tokens_are_those_of_one_stock_engine(engines, every):
    """The same prompts in three salts, then with the beginning of these, with aborts between."""
    stock, _, d = engines
    draw = random.Random(115)
    many = [(one, salt) for one in prompts(115, LENGTHS)[::every] for salt in SALTS]
    many += [(one[:draw.randrange(BLOCK, min(700, len(one)))]
              + prompts(draw.random(), (draw.randrange(33, 300), ))[0], salt) for one, salt in many]
    before = done(d)
    for number, (one, salt) in enumerate(many):  # in the same steps, so with the same rounding
        right, got = answer(stock, one, salt), answer(d, one, salt)
        assert got == right, f"{number}: {len(one)} tokens with salt {salt!r}, cached ones too"
        if number % 8 == 0:
            d.abort(prompts(-number, (draw.randrange(41, 900), )), draw.choice((0.0, 0.02, 0.1)))
    assert done(d) >= before + 0.7 * len(many)


def test_b115_p_computes_each_salt_once(engines):
    """D has too little of each to read, and P all of it from the second time on: with the same salt."""
    _, p, d = engines
    prompt, tokens = prompts(116, (512, ))[0], []
    for salt in ("x", "y", "x "):
        before = p.computed_tokens()
        assert answer(d, prompt, salt)[1] == 0
        tokens.append(p.computed_tokens() - before)
    assert min(tokens) >= 512, tokens
