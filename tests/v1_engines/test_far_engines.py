# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines with a store each, which ask each other for blocks (B104): without peers, and as peers' engines.
By hand: `heavy`."""
from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1_engines.test_store_engines import BLOCK, MEMORY_GIB, prompt, whole_blocks
from vllm_pd.rpc.ports import take_free

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy]
WAIT_S = 5.0


def figure(engine: RealEngine, name: str) -> int:
    engine.generate([prompt(30, 5)])  # figures come with steps
    return int(engine.figures().get(f"vllm:pd_store_{name}", 0))


@pytest.fixture(scope="module", params=["alone", "with peers"])
def pair(request, logs) -> Iterator[list[RealEngine]]:
    """Two engines whose arenas are in two folders, as those of two hosts."""
    urls = [f"tcp://127.0.0.1:{take_free('127.0.0.1')}" for _ in range(2)]
    folders = [Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm")) for _ in range(2)]
    stores = [{"folder": str(folder), "memory_gib": 2 * MEMORY_GIB, "listen": url, "hosts": ",".join(urls),
               "wait_s": WAIT_S} for folder, url in zip(folders, urls, strict=True)]
    broker = BrokerProcess() if request.param == "with peers" else None
    engines = []
    for number, store in enumerate(stores):
        log = logs / f"far-{request.param}-{number}.log"
        engines.append(RealEngine(None, log, kv_transfer_config={
            "kv_connector": "PDStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": store}) if broker is None else
            RealEngine("kv_both", log, broker.url, {"store": store, "max_local_prefill_tokens": 100_000}))
    yield [engine.ready() for engine in engines]
    for engine in engines:
        engine.stop()
    if broker is not None:
        broker.stop()
    for folder in folders:
        shutil.rmtree(folder)


def ask(engine: RealEngine, *prompts: list[int], tokens: int = 8) -> tuple[list[list[int]], list[int]]:
    """(answers, tokens of each prompt that were not computed)."""
    engine.ask(list(prompts), tokens)
    answers = engine.answer()
    return [one for one, _ in answers], [cached for _, cached in answers]


def test_b104_what_one_host_computed_another_loads(mono, pair):
    """B104: without any other traffic, and with prompts beside each other."""
    prompts = [prompt(1, 100), prompt(2, 64), prompt(3, 65), prompt(4, 600), prompt(5, 20)]
    right = mono.generate(prompts)
    assert ask(pair[0], *prompts) == (right, [0] * 5)
    assert ask(pair[1], *prompts[:1]) == (right[:1], [96])
    assert ask(pair[1], *prompts[1:]) == (right[1:], [whole_blocks(len(one)) for one in prompts[1:]])
    assert figure(pair[1], "far_blocks_total:fetched") == sum(whole_blocks(len(one)) for one in prompts) // BLOCK
    assert figure(pair[0], "far_blocks_total:sent") == figure(pair[1], "far_blocks_total:fetched")


def test_b104_a_conversation_over_two_hosts(mono, pair):
    """B104: each turn goes to the other host, and computes its new tokens only."""
    chat, before = prompt(11, 150), 0
    for turn in range(4):
        answer, = mono.generate([chat], tokens=40)
        done = pair[turn % 2].computed_tokens()
        (given,), (cached,) = ask(pair[turn % 2], chat, tokens=40)
        assert given == answer
        assert turn == 0 or cached >= before // BLOCK * BLOCK - BLOCK, (turn, cached, before)
        assert pair[turn % 2].computed_tokens() - done <= len(chat) - cached + 40
        before = len(chat) + len(answer)
        chat = chat + answer + prompt(20 + turn, 30)


def test_b104_a_host_that_is_stopped_delays_a_prompt_by_no_more_than_wait_s(mono, pair):
    """B104: and the engine does not spin for it: another prompt is answered meanwhile."""
    asked = [prompt(31, 400), prompt(32, 300)]
    right = mono.generate(asked)
    assert ask(pair[0], asked[0])[0] == right[:1]
    stopped = pair[0].processes()
    with contextlib.ExitStack() as after:
        for process in stopped:
            after.callback(process.send_signal, signal.SIGCONT)
            process.send_signal(signal.SIGSTOP)
        assert ask(pair[1], *asked)[0] == right
    until_s = time.monotonic() + 60.0
    number = 40
    while True:
        number += 1
        right = mono.generate([prompt(number, 100)])
        assert ask(pair[0], prompt(number, 100))[0] == right
        answers, cached = ask(pair[1], prompt(number, 100))
        assert answers == right
        if cached == [96]:
            break
        assert time.monotonic() < until_s, "it is not asked again"


def test_b104_the_end_of_a_host(mono, pair):
    """B104: SIGKILL; the other answers as before."""
    asked = [prompt(61, 300), prompt(62, 100)]
    right = mono.generate(asked)
    assert ask(pair[0], asked[0])[0] == right[:1]
    pair[0].kill()
    assert ask(pair[1], *asked) == (right, [0, 0])
