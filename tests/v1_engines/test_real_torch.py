# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines with the torch transport: B1, B2, B21, B22."""
import signal

import pytest

from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import (  # noqa: F401  a fixture
    broker,
    check_killed,
    check_tokens,
    done,
    prompts,
    remote,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
QUARANTINED = "vllm:pd_quarantined_blocks:"


@pytest.fixture(scope="module")
def pair(logs, mono, broker):  # noqa: F811
    settings = {"attempt_deadline_s": 200.0, "lease_s": 3.0, "heartbeat_s": 1.0, "transport": "torch"}
    p = RealEngine("kv_producer", logs / "p.log", broker.url, settings).ready()
    d = RealEngine("kv_consumer", logs / "d.log", broker.url, settings).ready()
    wait_for(lambda: d.generate(prompts(0, (300, ))) and done(d), "nothing goes remote")
    yield p, d
    d.stop()
    p.stop()


def test_b1_with_torch(mono, pair):
    check_tokens(mono, pair)


@pytest.mark.heavy
def test_b22_a_stopped_p_keeps_no_block_of_d(mono, pair):
    p, d = pair
    many = prompts(6, (1900, 1000))
    right, sent_away = mono.generate(many), remote(d)
    p.signal(signal.SIGSTOP)
    try:
        assert d.generate(many) == right
        assert remote(d) == sent_away + len(many)
        wait_for(lambda: d.generate(prompts(9, (10, ))) and not d.figures().get(QUARANTINED), "blocks wait for P", 60)
    finally:
        p.signal(signal.SIGCONT)
    after = prompts(7, (400, 500))
    assert d.generate(after) == mono.generate(after)


@pytest.mark.heavy
def test_b21_with_torch(mono, pair):
    check_killed(mono, pair)
