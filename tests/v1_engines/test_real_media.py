# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines, real transfers, prompts with images (a tiny Idefics3): tokens as one stock engine has them (B1,
B115). Over simulated memory: tests/v1/test_media.py.
"""
import os
import random
from pathlib import Path

import pytest

from tests.v1.media_model import PIXELS, TOKENS, write_idefics
from tests.v1.real_engines import PREEMPTIONS
from tests.v1.test_real_engines import done, prompts
from tests.v1_engines.trio import stock_p_d

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
BLOCK, STEP, ANSWER = 32, 64, 6
BLOCK_BYTES = 128 << 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, the token id of an image)."""
    folder = tmp_path_factory.mktemp("idefics")
    return folder, write_idefics(Path(os.environ["VLLM_PD_TINY_MODEL"]), folder)


@pytest.fixture(scope="module")
def engines(logs, model):
    """A stock engine, P and D, whose steps end within images, and who have room for three longer prompts."""
    with stock_p_d(logs, model=str(model[0]), max_num_batched_tokens=STEP,
                   kv_cache_memory_bytes=40 * BLOCK_BYTES) as made:
        yield made


def picture(content: int):
    """A picture of noise."""
    from PIL import Image
    return Image.frombytes("RGB", (PIXELS, PIXELS), random.Random(content).randbytes(3 * PIXELS * PIXELS))


def with_pictures(tokens: list[int], at: dict[int, int], image_token: int) -> dict:
    """These tokens, with a picture after so many of them each, by its content."""
    ids: list[int] = []
    for index, token in enumerate(tokens):
        ids += [image_token, token] if index in at else [token]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": [picture(at[index]) for index in sorted(at)]}}


def one_by_one(engine, prompt: dict) -> tuple[list[int], int]:
    engine.ask([prompt], ANSWER)
    (found,) = engine.answer()
    return found


def many(model, count: int) -> list[dict]:
    """Prompts of a few beginnings, with a few pictures in several places."""
    draw, found = random.Random(115), []
    beginnings = prompts(115, (400, 400))
    for _ in range(count):
        tokens = draw.choice(beginnings)[:draw.randrange(40, 400)]
        places = sorted(draw.sample(range(0, min(90, len(tokens)), 3), draw.choice((1, 1, 2, 3))))
        found.append(with_pictures(tokens, {place: draw.randrange(3) for place in places}, model[1]))
    return found


@pytest.mark.parametrize("count", [16, pytest.param(80, marks=pytest.mark.heavy)])
def test_b115_tokens_are_those_of_one_stock_engine(engines, model, count):
    """With prefix hits on either side, and aborts between."""
    stock, _, d = engines
    before, cached, draw = done(d), [], random.Random(1)
    for number, one in enumerate(many(model, count)):
        (right, hit), (got, own) = one_by_one(stock, one), one_by_one(d, one)
        assert got == right, f"{number}: {one['prompt_token_ids']}"
        cached.append((hit, own))
        if number % 4 == 0:
            d.abort([with_pictures(prompts(-number, (draw.randrange(41, 300), ))[0], {3: number}, model[1])],
                    draw.choice((0.0, 0.02, 0.1)))
    assert all(hit == own for hit, own in cached), cached
    assert done(d) >= before + count // 2


def test_b115_other_pictures_in_the_same_tokens_are_other_prompts(engines, model):
    stock, p, d = engines
    (tokens,) = prompts(116, (100, ))
    answers = {}
    for content in (5, 6, 5):
        one, before = with_pictures(tokens, {10: content}, model[1]), p.computed_tokens()
        answers.setdefault(content, one_by_one(d, one)[0])
        assert answers[content] == one_by_one(stock, one)[0]
        d.forget_prefixes()
        computed = p.computed_tokens() - before
        assert computed < BLOCK + 3 if len(answers) == 2 and content == 5 else computed >= 100 + TOKENS
    assert answers[5] != answers[6]


def test_b115_b8_requests_with_pictures_that_are_preempted_on_d(engines, model):
    """Their images are encoded there then, which they had not been: P had computed them."""
    stock, _, d = engines
    asked = [with_pictures(one, {7: 100 + number}, model[1]) for number, one in enumerate(prompts(117, (200, ) * 5))]
    before, preempted = done(d), d.figures().get(f"{PREEMPTIONS}:", 0)
    right = [one_by_one(stock, one)[0] for one in asked]
    got = d.generate(asked, 150)
    assert [one[:ANSWER] for one in got] == right and all(len(one) == 150 for one in got)
    assert done(d) > before and d.figures()[f"{PREEMPTIONS}:"] > preempted
