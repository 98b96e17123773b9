# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines, real transfers, greedy tokens as one stock engine says them (B1, B2, B5, B21, B22, B94,
B109)."""
import random
import signal
import time

import pytest

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.waiting import wait_for
from vllm_pd.ops.listening import STOCK, Opener, look, promise_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SETTINGS = {"attempt_deadline_s": 200.0, "lease_s": 3.0, "heartbeat_s": 1.0}
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 100, 200, 511, 513, 1000, 1900)


def prompts(seed: int, lengths=LENGTHS) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100, 20000) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def broker():
    broker = BrokerProcess()
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def pair(logs, mono, broker):
    p = RealEngine("kv_producer", logs / "p.log", broker.url, SETTINGS).ready()
    d = RealEngine("kv_consumer", logs / "d.log", broker.url, SETTINGS).ready()
    warm = prompts(0, (300, ))
    wait_for(lambda: d.generate(warm) and done(d), "nothing goes remote")
    yield p, d
    d.stop()
    p.stop()


def done(engine: RealEngine) -> float:
    return engine.figures().get("vllm:pd_attempts_total:done", 0)


def remote(engine: RealEngine, kind: str = "remote:length") -> float:
    """How many prompts it has decided so about."""
    return engine.figures().get(f"vllm:pd_decisions_total:{kind}", 0)


def check_tokens(mono, pair) -> None:
    """D says what one stock engine says, to one prompt after the other and to many at once."""
    _, d = pair
    before = done(d)
    for one in prompts(1):
        assert d.generate([one]) == mono.generate([one]), len(one)
    assert done(d) >= before + 8
    many = prompts(2, [random.Random(3).randrange(20, 600) for _ in range(16)])
    assert d.generate(many) == mono.generate(many)


def test_b1_b2_tokens_are_those_of_one_stock_engine(mono, pair):
    check_tokens(mono, pair)


def beyond_bind(engine: RealEngine) -> list[Opener]:
    """What its processes have open beyond the loopback, as `vllm-pd doctor` finds and names it."""
    pids = [process.pid for process in engine.processes()]
    seen = look(pids)
    assert seen.sockets and not seen.hidden
    return sorted(seen.beyond(promise_of(pids, "127.0.0.1")).values())


def test_b109_no_process_listens_beyond_bind(mono, pair):
    """`bind` is on the loopback here. What a stock engine opens by itself is not ours."""
    for engine in pair:
        assert beyond_bind(engine) == beyond_bind(mono) and STOCK.issuperset(beyond_bind(engine))


def test_b5_b97_a_prefix_that_d_has_is_not_sent_again(mono, pair):
    _, d = pair
    first = prompts(4, (512, ))[0]
    second = first[:256] + prompts(5, (200, ))[0]
    right, before = mono.generate([first]) + mono.generate([second]), done(d)
    assert d.generate([first]) == right[:1]
    d.ask([second])
    (tokens, cached), = d.answer()
    assert [tokens] == right[1:] and cached == 256
    assert done(d) == before + 2


def repeating(seed: int, count: int) -> list[list[int]]:
    """Prompts of some repetitions each, which make guesses, every second one with half of the one before."""
    draw, found = random.Random(seed), []
    for number in range(count):
        part = [draw.randrange(100, 20000) for _ in range(draw.randrange(5, 40))]
        one = (part * 300)[:draw.choice((64, 65, 96, draw.randrange(41, 600), draw.randrange(513, 1200)))]
        found.append(found[-1][:len(found[-1]) // 2] + one if number % 2 else one)
    return found


@pytest.mark.parametrize("count", [16, pytest.param(50, marks=pytest.mark.heavy)])
def test_b1_b113_a_decode_engine_that_guesses_by_the_prompt(mono, pair, broker, logs, count):
    """Its prefill engine guesses nothing. One prompt after the other, and many at once, with aborts between."""
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    d = RealEngine("kv_consumer", logs / "ngram.log", broker.url, SETTINGS, speculative_config=ngram).ready()
    try:
        wait_for(lambda: d.generate(prompts(40, (300, ))) and done(d), "nothing goes remote")
        many, before = repeating(41, count), done(d)
        for first in (*range(8), *range(8, count, 8)):
            batch, tokens = many[first:first + (1 if first < 8 else 8)], 48 if first < 4 else 8
            assert d.generate(batch, tokens) == mono.generate(batch, tokens), first
            d.abort(prompts(50 + first, (300, 700)), 0.02)
        figures = d.figures()
        assert done(d) >= before + 0.6 * count and not failed(d)
        accepted = figures["vllm:spec_decode_num_accepted_tokens_total:"]
        assert 0 < accepted < figures["vllm:spec_decode_num_draft_tokens_total:"]
    finally:
        d.stop()


def test_b94_an_engine_that_waits_for_a_peer_rests(mono, pair):
    """Also B22: P stands still past its lease; D goes on, and P's late writes harm nobody."""
    p, d = pair
    one = prompts(6, (1900, ))
    right, sent_away = mono.generate(one), remote(d)
    p.signal(signal.SIGSTOP)
    try:
        d.ask(one)
        time.sleep(1.0)
        before = {process.pid: sum(process.cpu_times()[:2]) for process in d.processes()}
        time.sleep(2.0)
        used = {process.pid: sum(process.cpu_times()[:2]) - before[process.pid] for process in d.processes()}
        assert max(used.values()) <= 0.05 * 2.0, used
    finally:
        p.signal(signal.SIGCONT)
    assert [tokens for tokens, _ in d.answer()] == right
    assert remote(d) == sent_away + 1
    after = prompts(7, (400, 500))
    assert d.generate(after) == mono.generate(after)


def failed(engine: RealEngine) -> float:
    return engine.figures().get("vllm:pd_attempts_total:failed", 0)


def check_killed(mono, pair) -> None:
    """P is killed while it has jobs of D: D answers by itself, and its blocks come free."""
    p, d = pair
    many = prompts(8, (1900, 1800, 1700, 1600))
    right, before = mono.generate(many), failed(d)
    d.ask(many)
    time.sleep(0.1)
    p.kill()
    assert [tokens for tokens, _ in d.answer()] == right
    wait_for(lambda: d.generate(prompts(9, (50, ))) and not d.figures().get("vllm:pd_quarantined_blocks:"),
             "blocks of a dead P are never free")
    assert failed(d) > before, "it had no job"


def test_b21_p_is_killed_and_d_answers_by_itself(mono, pair):
    check_killed(mono, pair)
