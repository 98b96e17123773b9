# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines, real transfers, prompts with LoRA adapters: tokens as one stock engine has them (B1, B115). Over
simulated memory: tests/v1/test_adapters.py.

The stock engine's batches have no prompts of the base model beside others: vLLM's CPU build computes them wrongly then
(docs/upstreaming.md). Ours may (`vllm_pd.v1.cpu_adapters`).
"""
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.adapters import write_lora
from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts, remote
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
SETTINGS = {"attempt_deadline_s": 200.0, "lease_s": 10.0, "heartbeat_s": 2.0, "ttl_s": 20.0}
BLOCK, STEP, TOKENS = 32, 256, 6
LENGTHS = (65, 96, 128, 129, 256, 257, 300, 513, 700, 900)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4,
        "kv_cache_memory_bytes": 192 << 20}


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """Of four adapters: (name, number, path)."""
    folder, model = tmp_path_factory.mktemp("loras"), Path(os.environ["VLLM_PD_TINY_MODEL"])
    return [(name, number, str(write_lora(folder / name, model, 40 + number)))
            for number, name in enumerate(("one", "two", "three", "four"), 1)]


def of_p(lora: tuple) -> tuple:
    """The copy that P has under another name and number. It has no copy of the fourth."""
    name, number, path = lora
    return f"{name} of p", 7 + number, f"{path} of p"


@pytest.fixture(scope="module")
def engines(logs, loras):
    """A stock engine, P and D. P has one adapter in a batch."""
    broker = BrokerProcess()
    made = [RealEngine(role, logs / f"{name}.log", broker.url, SETTINGS, max_num_batched_tokens=STEP,
                       max_model_len=1024, **{**LORA, "max_loras": most})
            for role, name, most in ((None, "stock", 2), ("kv_producer", "p", 1), ("kv_consumer", "d", 2))]
    for one in made:
        one.ready()
    stock, p, d = made
    for lora in loras:
        d.load(lora)
    for lora in loras[:3]:
        shutil.copytree(lora[2], of_p(lora)[2])
        p.load(of_p(lora))
    wait_for(lambda: d.generate(prompts(0, (300, ))) and done(d), "nothing goes remote")
    for lora in loras[:3]:
        wait_for(lambda lora=lora: goes_remote(d, lora), "its digest is not in the registry")
    yield stock, p, d
    for one in made:
        one.stop()
    broker.stop()


def answer(engine: RealEngine, prompt: list[int], lora: tuple | None) -> tuple[list[int], int]:
    """Its tokens, and how many of the prompt were cached."""
    engine.ask([prompt], TOKENS, loras=[lora])
    (found,) = engine.answer()
    return found


def goes_remote(d: RealEngine, lora: tuple) -> bool:
    before = done(d)
    answer(d, prompts(random.random(), (200, ))[0], lora)
    return done(d) > before


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.heavy)])
def test_b115_tokens_are_those_of_one_stock_engine(engines, loras, every):
    """The same prompts with no adapter and two, then with the beginning of these, with aborts between."""
    stock, _, d = engines
    draw = random.Random(115)
    many = [(one, lora) for one in prompts(117, LENGTHS)[::every] for lora in (None, *loras[:2])]
    many += [(one[:draw.randrange(BLOCK, min(700, len(one)))]
              + prompts(draw.random(), (draw.randrange(33, 300), ))[0], lora) for one, lora in many]
    before, tokens = done(d), []
    for number, (one, lora) in enumerate(many):  # in the same steps, so with the same rounding
        right, got = answer(stock, one, lora), answer(d, one, lora)
        assert got == right, f"{number}: {len(one)} tokens with adapter {lora}, cached ones too"
        tokens.append(tuple(got[0]))
        if number % 8 == 0:
            d.abort(prompts(-number, (draw.randrange(41, 900), )), draw.choice((0.0, 0.02, 0.1)))
    assert done(d) >= before + 0.7 * len(many)
    first = tokens[:len(many) // 2]
    assert len(set(first)) > 0.9 * len(first), "adapters change the answers"


def test_b115_a_batch_of_two_adapters(engines, loras):
    """P computes one adapter after the other, and those that wait too long D does."""
    stock, _, d = engines
    many, each = prompts(119, (300, 200, 257, 400, 129, 500)), [loras[number % 2] for number in range(6)]
    before = done(d)
    for engine in (stock, d):
        engine.ask(many, TOKENS, loras=each)
    assert [tokens for tokens, _ in d.answer()] == [tokens for tokens, _ in stock.answer()]
    assert done(d) >= before + 2, "a job that waits for 2 s is given back"


def test_b115_a_batch_with_prompts_of_the_base_model(engines, loras):
    """On D and on P, which may have both in a batch; then each alone, with what P's prefix cache has of that."""
    stock, _, d = engines
    many, each = prompts(121, (300, 200, 257, 400, 129, 500)), [(loras[0], None)[number % 2] for number in range(6)]
    before = done(d)
    right = [answer(stock, one, lora)[0] for one, lora in zip(many, each, strict=True)]
    d.ask(many, TOKENS, loras=each)
    assert [tokens for tokens, _ in d.answer()] == right
    longer = [one + prompts(122, (150, ))[0] for one in many]
    right = [answer(stock, one, lora)[0] for one, lora in zip(longer, each, strict=True)]
    assert [answer(d, one, lora)[0] for one, lora in zip(longer, each, strict=True)] == right
    assert done(d) >= before + 6


def test_b115_one_that_p_does_not_have_stays_on_d(engines, loras):
    stock, _, d = engines
    before, stays = done(d), remote(d, "local:peer")
    one = prompts(118, (300, ))[0]
    assert answer(d, one, loras[3]) == answer(stock, one, loras[3])
    assert (done(d), remote(d, "local:peer")) == (before, stays + 1)


def test_b115_changed_files_are_not_mixed(engines, loras):
    """Those of P's third adapter change, and those of D's second one. All engines answer with what they have loaded."""
    stock, _, d = engines
    model = Path(os.environ["VLLM_PD_TINY_MODEL"])
    for lora, path, reason in ((loras[2], of_p(loras[2])[2], "local:peer"), (loras[1], loras[1][2], "local:feature")):
        assert goes_remote(d, lora)
        answer(stock, prompts(120, (300, ))[0], lora)  # it reads them before they change
        write_lora(Path(path), model, 77)
        wait_for(lambda lora=lora: not goes_remote(d, lora), "it goes on with changed files")
        before, stays = done(d), remote(d, reason)
        one = prompts(reason, (300, ))[0]
        assert answer(d, one, lora) == answer(stock, one, lora)
        assert (done(d), remote(d, reason)) == (before, stays + 1)
    assert goes_remote(d, loras[0]), "others go on"
