# SPDX-License-Identifier: Apache-2.0
"""Real engines whose queue is on a NATS server and whose own sockets want the cluster's key."""

from collections.abc import Iterator

import pytest
from harness import PATIENT, EngineProcess, Pair, lend, prompt

from tests.fakes.brokers import NatsServer
from vllm_pd.rpc.keys import Keys


@pytest.fixture(scope="module")
def guarded_processes(zygote, starting, tmp_path_factory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nats")
    server = NatsServer(folder)
    starting.callback(server.kill)
    settings = {"keys": str(Keys.make(folder / "cluster.keys")), **PATIENT}
    p = EngineProcess(zygote, "kv_producer", 0, server.url, settings)
    d = EngineProcess(zygote, "kv_consumer", 1, server.url, {**settings, "max_local_prefill_tokens": 0})
    yield Pair(server, p, d)
    for engine in (d, p):
        engine.stop()
    server.kill()


@pytest.fixture
def guarded(guarded_processes):
    yield from lend(guarded_processes)


def test_b1_tokens_over_nats_with_keys(guarded, mono):
    prompts = [prompt(20 + 37 * number, 8200 + number) for number in range(8)]
    before = guarded.d.counters()
    assert guarded.d.tokens(prompts) == mono.tokens(prompts)
    assert guarded.d.counters().since(before)["attempts_total:done"] == 8


def test_b26_nats_killed_and_started_again(guarded, mono):
    prompts = [prompt(60, 8300 + number) for number in range(2)]
    expected = mono.tokens(prompts)
    guarded.broker.kill()
    try:
        guarded.d.wait_until("not disagg.protocol.decode.view().broker_up")
        before = guarded.d.counters()
        assert guarded.d.tokens(prompts[:1]) == expected[:1]
        assert guarded.d.counters().since(before)["decisions_total:local,broker"] == 1
    finally:
        guarded.broker.start()
    guarded.d.wait_for_peers()
    before = guarded.d.counters()
    assert guarded.d.tokens(prompts[1:]) == expected[1:]
    assert guarded.d.counters().since(before)["attempts_total:done"] == 1
