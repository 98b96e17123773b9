# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines whose layers are in two groups of blocks, one of them with a sliding window: tokens as one stock
engine has them (B1, B2, B6, B114), in blocks that hardly suffice. Over simulated memory: tests/v1/test_windows.py.
"""
import random

import pytest

from tests.v1.test_real_engines import done, prompts
from tests.v1_engines.test_real_shapes import WINDOWS
from tests.v1_engines.trio import stock_p_d
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
BLOCK, WINDOW, STEP, TOKENS = 32, 64, 256, 6
LENGTHS = (42, 63, 64, 65, 66, 95, 96, 97, 98, 127, 128, 129, 130, 255, 256, 257, 258, 300, 511, 512, 513, 600, 900)
TOKEN_BYTES = 4 * 2 * 32 * 4  # of a layer: heads, keys and values, their size, float32
BYTES = "vllm:pd_transfer_bytes_total:"
BLOCKS = 90  # of D and P; a prompt of 1,024 tokens has 32, and at most 11 of the window's group


@pytest.fixture(scope="module")
def engines(logs):
    """A stock engine, P and D."""
    with stock_p_d(logs, {"num_gpu_blocks_override": BLOCKS}, max_num_batched_tokens=STEP, **WINDOWS) as made:
        yield made


def test_b114_of_a_window_only_the_end_is_sent(engines):
    """Two layers of all tokens, and two of the last 64: of these three blocks, of 899 tokens."""
    *_, d = engines
    before = d.figures()[BYTES]
    d.generate(prompts(117, (900, )))
    wait_for(lambda: d.generate([[7, 8, 9]], 1) and d.figures()[BYTES] > before, "its bytes are counted")
    assert d.figures()[BYTES] - before == (29 + 3) * 2 * BLOCK * TOKEN_BYTES


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.heavy)])
def test_b114_tokens_are_those_of_one_stock_engine(engines, every):
    """Around the borders of blocks and of the window, then with the beginning of others, with aborts between."""
    stock, _, d = engines
    draw = random.Random(114)
    many = prompts(114, LENGTHS)
    many += [one[:draw.randrange(BLOCK, len(one))] + prompts(draw.random(), (draw.randrange(1, 300), ))[0]
             for one in many] + prompts(115, [draw.randrange(41, 400) for _ in range(8)])
    many, before = many[::every], done(d)
    for number, one in enumerate(many):  # in the same steps, so with the same rounding
        for engine in (stock, d):
            engine.ask([one], TOKENS)
        assert d.answer()[0][0] == stock.answer()[0][0], f"{number}: {len(one)} tokens"
        if number % 4 == 0:
            d.abort(prompts(-number, (draw.randrange(41, 900), )), draw.choice((0.0, 0.02, 0.1)))
    assert done(d) >= before + 0.7 * len(many)


def test_b114_b2_many_at_once_in_few_blocks(engines):
    """More than fit at a time: requests wait, are preempted and fall back. Afterwards nobody has a block."""
    stock, p, d = engines
    many = prompts(116, [900, 700, 41, 513, 64, 65, 1000, 300, 640, 801])
    right = [stock.generate([one], TOKENS)[0] for one in many]
    got = d.generate(many, TOKENS)
    same = sum(one == other for one, other in zip(got, right, strict=True))
    assert same >= len(many) - 2, "batches of other sizes round otherwise now and then"
    for engine in (p, d):
        wait_for(lambda engine=engine: not engine.used(), "blocks come back")
