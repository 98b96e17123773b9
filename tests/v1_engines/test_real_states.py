# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines of models with recurrent states: tokens as one stock engine has them (B1, B2, B6, B114). Over
simulated memory: tests/v1/test_states.py.

vLLM's CPU build runs Mamba-2 layers without prefix caching only: with it the kernel is to leave a state at a block's
end behind, and raises. It runs short convolutions with it, but, also without disaggregation, answers otherwise in
batches, and where a prompt is computed in other steps (13 of 20 prompts): these prompts come one by one, and all
engines compute a block of tokens in each step.
"""
import contextlib
import json
import os
import random
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts
from tests.v1_engines.test_real_shapes import TINY
from tests.v1_engines.trio import stock_p_d
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
ANSWER = 24
STEP, TOKENS, BLOCK = 256, 6, 96  # vLLM makes a block so large that a state goes into it
LENGTHS = (97, 98, 99, 150, 191, 192, 193, 194, 255, 256, 257, 258, 288, 289, 290, 384, 385, 512, 513, 640, 900)
TOKEN_BYTES = 4 * 2 * 32 * 4  # of a layer: heads, keys and values, their size, float32
BYTES = "vllm:pd_transfer_bytes_total:"


@contextlib.contextmanager
def with_states(folder, logs, states: str, step: int, of_peers=None, **arguments):
    """Of a tiny model with such states."""
    model = folder / f"tiny-{states}"
    subprocess.run([sys.executable, TINY, model, "--tokenizer", os.environ["VLLM_PD_MODEL"], "--states", states],
                   check=True, timeout=300)
    with stock_p_d(logs, of_peers, model=str(model), max_num_batched_tokens=step, **arguments) as engines:
        yield Trio(*engines)


class Trio(NamedTuple):
    """A stock engine, P and D with one model."""
    stock: RealEngine
    p: RealEngine
    d: RealEngine

    def compare(self, many: list[list[int]]) -> None:
        """One by one: in the same steps, so with the same rounding. Most go remote."""
        before = done(self.d)
        for number, one in enumerate(many):
            for engine in (self.stock, self.d):
                engine.ask([one], TOKENS)
            assert self.d.answer()[0][0] == self.stock.answer()[0][0], f"{number}: {len(one)} tokens"
        assert done(self.d) >= before + 0.7 * len(many)

    def sent_bytes(self) -> float:
        """All that P has sent to D. A request of D's own brings the figures."""
        self.d.generate([[7, 8, 9]], 1)
        return self.d.figures()[BYTES]


@pytest.fixture(scope="class")
def mamba(tmp_path_factory, logs):
    with with_states(tmp_path_factory.mktemp("models"), logs, "mamba", STEP, enable_prefix_caching=False) as made:
        yield made


class TestMamba:
    """Mamba-2 layers."""

    def test_b114_tokens_are_those_of_one_stock_engine(self, mamba):
        """With aborts between."""
        draw, many = random.Random(118), prompts(118, LENGTHS)
        for first in range(0, len(many), 4):
            mamba.compare(many[first:first + 4])
            mamba.d.abort(prompts(-first - 1, (draw.randrange(41, 900), )), draw.choice((0.0, 0.02, 0.1)))

    def test_b114_a_state_is_one_block(self, mamba):
        """Two layers with attention, whose memory the two layers with states share: of 899 tokens 10 blocks, and
        one with the state."""
        before = mamba.sent_bytes()
        mamba.d.generate(prompts(117, (900, )))
        wait_for(lambda: mamba.sent_bytes() > before, "no bytes are counted")
        assert mamba.sent_bytes() - before == (10 + 1) * 2 * BLOCK * TOKEN_BYTES

    def test_b114_b2_many_at_once(self, mamba):
        """Afterwards nobody has a block."""
        many = prompts(116, [900, 700, 141, 513, 128, 129, 1000, 300, 640, 801])
        right = [mamba.stock.generate([one], TOKENS)[0] for one in many]
        got = mamba.d.generate(many, TOKENS)
        assert [one[0] for one in got] == [one[0] for one in right]
        others = [one for one, answer, alone in zip(many, got, right, strict=True) if answer != alone]
        assert len(others) <= 2, "batches of other sizes round otherwise now and then"
        mamba.compare(others or many[:1])
        for engine in (mamba.p, mamba.d):
            wait_for(lambda engine=engine: not engine.used(), "blocks come back")


@pytest.mark.heavy
def test_b114_short_convolutions_with_prefix_caching(tmp_path, logs):
    """New prompts, then with the beginning of others: D and P have hits."""
    draw, size, fresh = random.Random(119), 32, (2, 3, 4, 5, 6, 8, 9, 10, 13, 16, 20)
    many = prompts(119, [blocks * size + 1 for blocks in fresh])
    more = [draw.randrange(2, 9) for _ in range(2 * len(many))]  # whole blocks after the beginning of another one
    begun = [one[:size * draw.randrange(1, len(one) // size)] for one in many * 2]
    with with_states(tmp_path, logs, "conv", size) as conv:
        before = conv.sent_bytes()
        conv.compare(many)
        conv.compare([one + prompts(draw.random(), (size * blocks + 1, ))[0]
                      for one, blocks in zip(begun, more, strict=True)])
        right = sum(blocks + 1 for blocks in (*fresh, *more))  # what D has is not sent, but a state is
        assert conv.sent_bytes() - before == right * 2 * size * TOKEN_BYTES


@pytest.mark.heavy
def test_b113_b114_drafts_after_the_state_of_a_peer(tmp_path, logs):
    """Mamba-2, prompts one by one and many at once: what P and D answer with drafts, of which all numbers are accepted,
    is what a stock engine answers without. The kernels that update a state, in which vLLM's CPU build is wrong with
    drafts, are ours (tests/v1/known_drafts.py); the model runner, which says where a state begins, is vLLM's."""
    draw, known = random.Random(120), tmp_path / "known.json"
    many = prompts(120, [*LENGTHS, *(draw.randrange(60, 700) for _ in range(31))])
    known.write_text("[]", encoding="utf-8")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with with_states(tmp_path, logs, "mamba", STEP, {"speculative_config": drafts, "known": str(known)},
                     enable_prefix_caching=False) as made:
        right = [made.stock.generate([one], ANSWER)[0] for one in many]
        known.write_text(json.dumps([[*one, *answer] for one, answer in zip(many, right, strict=True)]), "utf-8")
        before = done(made.d)
        wrong = [len(one) for one, answer in zip(many, right, strict=True)
                 if made.d.generate([one], ANSWER) != [answer]]
        assert not wrong, f"prompts of {wrong} tokens"
        assert done(made.d) == before + sum(len(one) > BLOCK for one in many)  # nobody asks P for less than a block
        together = made.d.generate(many[:24], ANSWER)
        assert sum(got != answer for got, answer in zip(together, right, strict=False)) <= 2, "rounding"
        figures = made.d.figures()
        drafted, accepted = (figures[f"vllm:spec_decode_num_{name}_tokens_total:"] for name in ("draft", "accepted"))
        assert 0.3 * drafted < accepted < 0.7 * drafted and accepted > 3 * len(many), (drafted, accepted)
        for engine in (made.p, made.d):
            wait_for(lambda engine=engine: not engine.used(), "blocks come back")
