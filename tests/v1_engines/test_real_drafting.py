# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines with an EAGLE head, an EAGLE3 head or a draft model, real transfers: tokens and each draft as one
stock engine with the same drafter has them (B1, B2, B113, B114), with all layers in one group of blocks, and, with
EAGLE, with windows in groups of their own. A drafter whose KV of a prompt is missing, or is another's, changes no
token: it drafts otherwise. Without KV, by the prompt's own tokens: tests/v1/test_real_engines.py.
"""
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts
from tests.v1_engines.drafters import make_drafter
from tests.v1_engines.test_real_shapes import WINDOWS
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
SETTINGS = {"attempt_deadline_s": 200.0, "lease_s": 10.0, "heartbeat_s": 2.0, "ttl_s": 20.0, "push_chunks": True,
            "prefill_step_s": 30.0}  # P's steps are as long as the stock engine's on a busy machine, too
TARGET = Path(os.environ["VLLM_PD_TINY_MODEL"])
HEAD = TARGET.with_name("tiny-eagle")
TINY = Path(__file__).parents[2] / "scripts" / "tiny_model.py"
BLOCK, STEP, TOKENS = 32, 256, 6
LENGTHS = (33, 63, 64, 65, 96, 97, 127, 128, 129, 255, 256, 257, 258, 300, 511, 512, 513, 600, 700, 900)


def make_narrow_head(folder: Path) -> Path:
    """An EAGLE head with half as many KV heads as the model."""
    subprocess.run([sys.executable, TINY, folder, "--tokenizer", os.environ["VLLM_PD_MODEL"], "--drafter", "--kv-heads",
                    "2"], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module", params=[
    *(pytest.param((method, {}, 0.1), marks=pytest.mark.heavy) for method in ("eagle", "eagle3", "draft_model")),
    pytest.param(("eagle", WINDOWS, 0.05), marks=pytest.mark.heavy), ("eagle", {**WINDOWS, "is_mixed": True}, 0.1)],
    ids=["one-group", "eagle3", "draft-model", "windows", "other-heads"])
def engines(logs, request, tmp_path_factory):
    """A stock engine and D, with a P, all with the same drafter; P drafts fewer tokens. And which share of drafts may
    differ. With windows the head's layer is in one of two groups with full attention, beside one of a window of 64
    tokens; of 78 drafts 8 differ there if P does not use the prompt's last token. Where the head has fewer KV heads
    than the model, all layers are in each block."""
    broker, (method, more, share) = BrokerProcess(), request.param
    model = HEAD
    if method != "eagle":
        model = make_drafter(method, TARGET, tmp_path_factory.mktemp(method) / "drafter")
    elif "is_mixed" in more:
        model = make_narrow_head(tmp_path_factory.mktemp("models") / "tiny-eagle")
    for name in ("stock", "p", "d"):
        (logs / f"{name}.drafts").write_text("", encoding="utf-8")
    made = [RealEngine(role, logs / f"{name}.log", broker.url, SETTINGS, drafts=str(logs / f"{name}.drafts"),
                       speculative_config={"method": method, "model": str(model), "num_speculative_tokens": tokens},
                       max_num_batched_tokens=STEP, max_model_len=1024, **more)
            for role, name, tokens in ((None, "stock", 3), ("kv_producer", "p", 2), ("kv_consumer", "d", 3))]
    for one in made:
        one.ready()
    stock, _, d = made
    wait_for(lambda: d.generate(prompts(0, (300, ))) and done(d), "nothing goes remote")
    yield stock, d, share
    for one in made:
        one.stop()
    broker.stop()


def drafts(logs: Path, name: str) -> dict[str, str]:
    """What this engine has drafted since the last call, by a digest of the tokens before."""
    file = logs / f"{name}.drafts"
    found = dict(line.split(" ", 1) for line in file.read_text(encoding="utf-8").splitlines())
    file.write_text("", encoding="utf-8")
    return found


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.heavy)])
def test_b113_tokens_and_drafts_are_those_of_one_stock_engine(engines, logs, every):
    """Prompts that mostly need several steps, then others with the beginning of these, and new ones, with aborts
    between. A stock engine alone drafts otherwise now and then if it computes a prompt in other steps (two of 72
    drafts seen); where the drafter's KV of prompts is missing, all drafts differ."""
    *both, share = engines
    d = both[-1]
    draw = random.Random(113)
    many = prompts(113, LENGTHS)
    many += [one[:draw.randrange(BLOCK, len(one))] + prompts(draw.random(), (draw.randrange(1, 300), ))[0]
             for one in many] + prompts(114, [draw.randrange(41, 400) for _ in range(12)])
    many, before = many[::every], done(d)
    theirs, ours = {}, {}
    for number, one in enumerate(many):  # in the same steps, so with the same rounding
        drafts(logs, "d")
        for engine in both:
            engine.ask([one], TOKENS)
        right, got = ([tokens for tokens, _ in engine.answer()] for engine in both)
        assert got == right, f"{number}: {len(one)} tokens"
        theirs |= drafts(logs, "stock")
        ours |= drafts(logs, "d")
        if number % 8 == 0:
            d.abort(prompts(-number, (draw.randrange(41, 900), )), draw.choice((0.0, 0.02, 0.1)))
    assert done(d) >= before + 0.7 * len(many)
    steps = theirs.keys() | ours.keys()  # where other drafts are accepted, other steps follow
    differ = sum(theirs.get(step) != ours.get(step) for step in steps)
    assert differ <= share * len(steps), f"{differ} of {len(steps)} drafts differ"
