# SPDX-License-Identifier: Apache-2.0
"""Real V0 engines with the torch transport: B1, B2, B22."""

from collections.abc import Iterator

import pytest
from harness import PATIENT, BrokerProcess, EngineProcess, Pair, lend, prompt
from test_states import granted
from test_tokens import test_b1_greedy_tokens_equal_those_of_one_engine as greedy


@pytest.fixture(scope="module")
def processes(zygote, starting) -> Iterator[Pair]:
    broker = BrokerProcess()
    starting.callback(broker.stop)
    settings = {**PATIENT, "transport": "torch"}
    p = EngineProcess(zygote, "kv_producer", 0, broker.url, settings)
    d = EngineProcess(zygote, "kv_consumer", 1, broker.url, {**settings, "max_local_prefill_tokens": 0})
    yield Pair(broker, p, d)
    for process in (d, p, broker):
        process.stop()


@pytest.fixture
def pair(processes) -> Iterator[Pair]:
    """A pair with this transport. At rest before and after each test (B20)."""
    yield from lend(processes)


def test_b1_with_torch(pair, mono):
    greedy(pair, mono)


def test_b22_a_stopped_p_keeps_no_block_of_d(pair, mono):
    """D's own rank brings the fence down while P is stopped."""
    tokens = prompt(90, 2200)
    before = pair.d.counters()
    granted(pair, "x", tokens)
    pair.p.freeze()
    pair.d.bring_forward("lease_until")
    [result] = pair.d.wait(["x"])
    assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]
    assert pair.d.counters().since(before)["attempts_total:expired"] == 1
    pair.d.wait_until("not scheduler.quarantined")
    pair.p.thaw()
    pair.p.do("hold", held=False)
    pair.at_rest()
    pair.d.wait_for_peers()
