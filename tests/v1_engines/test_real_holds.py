# SPDX-License-Identifier: Apache-2.0
"""B102 with real V1 engines over NIXL, asked as upstream's toy proxy server asks: P first, then D with P's answer.
Several ranks or stages: by hand, `heavy`.
"""
import random
import signal
import time

import pytest

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts
from tests.waiting import wait_for
from vllm_pd.bench.prefill_first import REMOTE_DECODE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LENGTHS = (33, 64, 65, 200, 511, 513, 1000, 1900)
SETTINGS = {"attempt_deadline_s": 60.0, "lease_s": 3.0, "heartbeat_s": 0.5, "ttl_s": 3.0, "hold_s": 4.0,
            "max_local_prefill_tokens": 4000}
TOKENS = 8


@pytest.fixture(scope="module")
def broker():
    broker = BrokerProcess()
    yield broker
    broker.stop()


def shape(stages: int, ranks: int) -> dict[str, int]:
    """The arguments of an engine of so many stages, and ranks in each."""
    return {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks, "kv_cache_memory_bytes": 128 << 20}


ALIKE = ({}, {})
UNEQUAL = {"2to1": (shape(1, 2), shape(1, 1)), "1to2": (shape(1, 1), shape(1, 2)), "2to2": (shape(1, 2), shape(1, 2)),
           "2x2to1": (shape(2, 2), shape(1, 1)), "1to2x1": (shape(1, 1), shape(2, 1))}


@pytest.fixture
def pair(logs, mono, broker, request):
    """P and D. `request.param`: their arguments. With those, a hold lasts until it is claimed, however slow the machine
    is."""
    ours, theirs = getattr(request, "param", ALIKE)
    settings = {**SETTINGS, "hold_s": 60.0} if hasattr(request, "param") else SETTINGS
    p = RealEngine("kv_producer", logs / "holds_p.log", broker.url, settings, **ours)
    d = RealEngine("kv_consumer", logs / "holds_d.log", broker.url, settings, **theirs)
    p.ready()
    d.ready()
    warm = prompts(0, (300, ))
    wait_for(lambda: through(p, d, warm) and done(d), "nothing is read")
    yield p, d
    d.stop()
    p.stop()


def extra(params):
    return {"extra_args": {"kv_transfer_params": params}}


def hold(p, many):
    """P's leg: what its answers say."""
    p.ask(many, 1, [extra(REMOTE_DECODE)] * len(many))
    p.answer()
    return p.params()


def through(p, d, many):
    """Both legs. The answers."""
    return d.generate(many, TOKENS, [extra(params) for params in hold(p, many)])


def held(p):
    p.generate(prompts(99, (2, )), 1)  # figures come with steps
    return p.figures().get("vllm:pd_held_blocks:", 0)


def at_rest(p, d):
    wait_for(lambda: not held(p), "P keeps blocks")
    wait_for(lambda: not d.generate(prompts(98, (2, )), 1) or not (
        d.figures().get("vllm:pd_quarantined_blocks:") or d.figures().get("vllm:pd_parked_blocks:")), "D keeps blocks")


def events(engine, name):
    return engine.figures().get(f"vllm:pd_holds_total:{name}", 0)


@pytest.mark.parametrize("pair", [ALIKE], ids=["alike"], indirect=True)
def test_b102_tokens_are_those_of_one_stock_engine(mono, pair):
    p, d = pair
    before = done(d)
    for one in prompts(1, LENGTHS):
        assert through(p, d, [one]) == mono.generate([one], TOKENS), len(one)
    assert done(d) == before + len(LENGTHS), "some were not read"
    many = prompts(2, [random.Random(3).randrange(100, 600) for _ in range(12)])
    assert through(p, d, many) == mono.generate(many, TOKENS)
    first = prompts(4, (512, ))[0]  # D has the beginning of the next one
    second = first[:256] + prompts(5, (200, ))[0]
    for one in (first, second, second):
        assert through(p, d, [one]) == mono.generate([one], TOKENS)
    at_rest(p, d)
    ended = {name: events(p, name) for name in ("done", "dropped", "expired")}  # expired: on a machine that is too busy
    assert events(p, "made") == sum(ended.values()) and ended["done"] >= len(LENGTHS) and not events(p, "lost"), ended
    other_prompts_are_denied(mono, p, d)


def other_prompts_are_denied(mono, p, d):
    """A hold is for its own prompt alone, and stays for that one."""
    one, other = prompts(6, (700, 700))
    right = mono.generate([one, other], TOKENS)
    (params,) = hold(p, [one])
    before = done(d)
    assert d.generate([other], TOKENS, [extra(params)]) == right[1:]
    assert d.generate([one], TOKENS, [extra(params)]) == right[:1], "its own prompt may still have it"
    assert done(d) == before + 1
    at_rest(p, d)


def nobody_reads_what_is_not_held(mono, p, d):
    """A hold that nobody claims ends, and one that is made up is nobody's."""
    before, expired = done(d), events(p, "expired")
    late = prompts(7, (700, ))
    (params,) = hold(p, late)
    wait_for(lambda: not held(p) and events(p, "expired") > expired, "an unclaimed hold stays")
    for changed in (params, {**params, "remote_engine_id": "made-up", "remote_host": "192.0.2.1", "remote_port": 9}):
        assert d.generate(late, TOKENS, [extra(changed)]) == mono.generate(late, TOKENS)
    assert done(d) == before
    at_rest(p, d)


def test_b102_b22_b21_p_stands_still_then_dies_while_d_reads(mono, pair):
    p, d = pair
    nobody_reads_what_is_not_held(mono, p, d)
    several = prompts(8, (900, 1000, 1100))
    right = mono.generate(several, TOKENS)
    params = hold(p, several)
    p.signal(signal.SIGSTOP)
    before = done(d)
    d.ask(several, TOKENS, [extra(one) for one in params])
    assert [tokens for tokens, _ in d.answer()] == right
    assert done(d) == before
    p.signal(signal.SIGCONT)
    at_rest(p, d)
    params = hold(p, several[:1])
    d.ask(several[:1], TOKENS, [extra(one) for one in params])
    p.kill()
    assert [tokens for tokens, _ in d.answer()] == right[:1]
    wait_for(lambda: d.generate(prompts(9, (50, ))) and not d.figures().get("vllm:pd_quarantined_blocks:"),
             "blocks of a read from a dead P are never free")


def test_b102_b23_d_stands_still_then_dies_with_a_claim(mono, pair):
    """P keeps what is claimed for as long as D may read it: longer than any of its times."""
    p, d = pair
    pids = {process.pid for process in d.processes()}
    ranks = [process for process in d.processes() if process.ppid() in pids]
    for number in range(5):  # on a busy machine D may ask when the holds have expired
        long = prompts(10 + 100 * number, (1900, ) * 3)
        params = hold(p, long)
        blocks = held(p)
        for rank in ranks:  # it neither computes nor reads, and the engine waits for it
            rank.suspend()
        d.ask(long, TOKENS, [extra(one) for one in params])
        time.sleep(SETTINGS["hold_s"] + 2.0)
        if claimed := held(p):
            break
        for rank in ranks:
            rank.resume()
        d.answer()
    assert 0 < claimed <= blocks and not events(p, "lost"), "nothing is claimed"
    d.signal(signal.SIGSTOP)
    time.sleep(2 * SETTINGS["ttl_s"] + SETTINGS["lease_s"])
    assert held(p) == claimed
    d.kill()
    wait_for(lambda: not held(p) and events(p, "lost"), "P keeps blocks for a dead D")
    assert p.generate(long, TOKENS) == mono.generate(long, TOKENS)


@pytest.mark.heavy
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("pair", UNEQUAL.values(), ids=UNEQUAL, indirect=True)
def test_b102_b44_b101_a_hold_between_engines_of_other_ranks(mono, pair):
    """Each prompt is read, also one whose beginning D has. Then P is killed while D reads. B20: all blocks are back."""
    p, d = pair
    before = done(d)
    for one in prompts(20, LENGTHS):
        assert through(p, d, [one]) == mono.generate([one], TOKENS), len(one)
    many = prompts(21, (300, 500, 700, 900))
    assert through(p, d, many) == mono.generate(many, TOKENS)
    first = prompts(22, (512, ))[0]
    second = first[:256] + prompts(23, (200, ))[0]
    for one in (first, second):
        assert through(p, d, [one]) == mono.generate([one], TOKENS)
    read = len(LENGTHS) + len(many) + 2
    assert done(d) == before + read, "some were not read"
    at_rest(p, d)
    assert events(p, "done") >= read and not events(p, "lost")
    for engine in pair:
        wait_for(lambda engine=engine: not engine.used(), "blocks are left over")
    last = prompts(24, (1900, 1800, 1700))
    right, params = mono.generate(last, TOKENS), hold(p, last)
    d.ask(last, TOKENS, [extra(one) for one in params])
    p.kill()
    assert [tokens for tokens, _ in d.answer()] == right
    wait_for(lambda: not d.used(), "blocks of reads from a dead P are never free")
