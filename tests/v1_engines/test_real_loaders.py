# SPDX-License-Identifier: Apache-2.0
"""B42 with real V1 engines whose weights are no files of the model: the operator vouches for them (`weights_digest`).
By hand: `heavy`, for its engines take minutes."""
import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts
from tests.v1_engines.trio import SETTINGS
from tests.waiting import wait_for
from vllm_pd.model.weights import digest_weights

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1500)]
LENGTHS = (41, 64, 65, 300, 511, 513, 1000, 1900)
TOKENS = 8


@pytest.fixture
def engines(mono, logs, tmp_path):
    """P, which loads a folder's files; two Ds, which have no such files and load them by a loader of their own. The
    second one's digest is that of other weights."""
    model = Path(os.environ["VLLM_PD_TINY_MODEL"])
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    right = digest_weights(model).hex()
    broker, made = BrokerProcess(), []
    try:
        made.append(RealEngine("kv_producer", logs / "p.log", broker.url, SETTINGS))
        for number, digest in enumerate((right, right[::-1])):
            made.append(RealEngine("kv_consumer", logs / f"d{number}.log", broker.url,
                                   SETTINGS | {"weights_digest": digest}, model=str(bare), weights=str(model)))
        yield [one.ready() for one in made]
    finally:
        for one in made:
            one.stop()
        broker.stop()


def test_b42_weights_that_a_loader_brings_fit_the_files_of_the_same_digest_and_no_others(mono, engines):
    _, d, other = engines
    wait_for(lambda: d.generate(prompts(0, (300, ))) and done(d), "nothing goes remote")
    before = done(d)
    for one in prompts(80, LENGTHS):
        right = mono.generate([one], TOKENS)
        assert d.generate([one], TOKENS) == right, len(one)
        assert other.generate([one], TOKENS) == right, len(one)
    wait_for(lambda: d.generate([[7, 8, 9]], 1) and done(d) == before + len(LENGTHS), lambda: done(d))
    assert not done(other)
    wait_for(lambda: other.generate([[7, 8, 9]], 1) and other.figures()["vllm:pd_degraded:mismatch"] == 1,
             lambda: other.figures())
