# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines that hand prompts over and share a store: two prefill and two decode engines of the tiny model, and
engines of two ranks each (B104). By hand: `heavy`.
"""
import json
import random
import shutil
import tempfile
from collections import Counter

import pytest

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts
from tests.waiting import wait_for
from vllm_pd.bench.share.measure import measure
from vllm_pd.bench.share.options import ShareBench

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1500)]
BLOCK = 32
THRESHOLD = 40
ANSWER = 24


def settings_of(folder: str) -> dict:
    """Those of all engines with a store in that folder."""
    return {"attempt_deadline_s": 200.0, "lease_s": 10.0, "heartbeat_s": 2.0, "ttl_s": 20.0,
            "max_local_prefill_tokens": THRESHOLD, "store": {"folder": folder, "memory_gib": 0.05}}


@pytest.fixture(scope="module")
def fleet(logs):
    """([two prefill engines], [two decode engines])"""
    broker, folder = BrokerProcess(), tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm")
    settings = settings_of(folder)
    engines = [RealEngine(role, logs / f"{role}{number}.log", broker.url, settings).ready()
               for role in ("kv_producer", "kv_consumer") for number in range(2)]
    for d in engines[2:]:
        wait_for(lambda d=d: d.generate(prompts(random.randrange(10**6), (300, ))) and done(d), "nothing goes remote")
    yield engines[:2], engines[2:]
    for engine in engines:
        engine.stop()
    broker.stop()
    shutil.rmtree(folder)


def test_b104_a_turn_computes_its_new_tokens_only_whoever_serves_it(mono, fleet, tmp_path):
    """B104: two conversations at a time. Each turn goes to the D that did not serve the last one, and, where it is
    long, to some P. All engines together compute what no turn before has put, at most a block more than what is new."""
    ps, ds = fleet
    chats = prompts(900, (400, 230))
    whole, trace, hits, total, handed_over = [0, 0], [], 0, 0, 0
    jobs = [p.computed_tokens() for p in ps]
    for turn in range(6):
        right = [mono.generate([chat], ANSWER)[0] for chat in chats]
        before = sum(engine.computed_tokens() for engine in (*ps, *ds))
        asked = [ds[(turn + number) % 2] for number in range(2)]
        for d, chat in zip(asked, chats, strict=True):
            d.ask([chat], ANSWER)
        found = [d.answer()[0] for d in asked]
        computed = sum(engine.computed_tokens() for engine in (*ps, *ds)) - before
        assert [tokens for tokens, _ in found] == right
        assert [cached for _, cached in found] == whole, turn
        new = [len(chat) - known for chat, known in zip(chats, whole, strict=True)]
        remote = sum(count > THRESHOLD for count in new)
        assert computed == sum(new) + 2 * (ANSWER - 1) + remote, (turn, new)
        hits, total, handed_over = hits + sum(whole), total + sum(map(len, chats)), handed_over + remote
        lines = [{"prompt": chat, "answer": answer} for chat, answer in zip(chats, right, strict=True)]
        trace += lines[::(-1)**turn]  # in the order of the decode engines
        chats = [chat + answer for chat, answer in zip(chats, right, strict=True)]
        whole = [(len(chat) - 1) // BLOCK * BLOCK for chat in chats]
        chats = [chat + more for chat, more in zip(chats, prompts(910 + turn, (8, 90)[::(-1)**turn]), strict=True)]
    by_p = [p.computed_tokens() - one for p, one in zip(ps, jobs, strict=True)]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in trace))
    oracle = measure(ShareBench(file, block_size=BLOCK, cache_blocks=(10_000, )), lambda line: None)["caches"][0]
    print(f"\n{len(trace)} prompts, {total} tokens, {handed_over} handed over, computed by the prefill engines {by_p}; "
          f"hit rate {hits / total:.4f}; of any cache at most {oracle['bound']:.4f}; of two decode engines by turns "
          f"{oracle['round_robin']['d']:.4f} without a store, by prefix {oracle['prefix']['d']:.4f}")
    assert handed_over >= 6
    assert hits / total == pytest.approx(oracle["bound"], abs=1e-9) and hits / total > oracle["round_robin"]["d"]


def test_b104_what_the_engines_count(fleet):
    """The figures of the store of all four, in the front end. Which P has how many jobs is the broker's choice."""
    ps, ds = fleet
    every = Counter()
    for engine in (*ps, *ds):
        engine.generate(prompts(920, (5, )))  # a front end takes figures while it serves
        figures = {name: value for name, value in engine.figures().items() if "pd_store" in name and "_total:" in name}
        print({name: value for name, value in figures.items() if value})
        assert engine in ps or figures["vllm:pd_store_loads_total:loaded"]
        every.update(figures)
    assert every["vllm:pd_store_blocks_total:stored"] and every["vllm:pd_store_blocks_total:present"]
    assert not every["vllm:pd_store_loads_total:failed"] and not every["vllm:pd_store_loads_total:overdue"]


def test_b104_b96_engines_whose_weights_are_loaded_anew_work_with_nobody(mono, fleet):
    """B96: the other two go on. The weights are the same here, so wrong ones would not show."""
    ps, ds = fleet
    asked = prompts(930, (300, 200, 310, 210))
    right = mono.generate(asked, ANSWER)
    for engine in (ps[0], ds[0]):
        engine.rpc("reload_weights")
        engine.generate(prompts(931, (5, )))
        assert engine.figures()["vllm:pd_degraded:weights"] == 1
    computed = [engine.computed_tokens() for engine in (*ps, *ds)]
    for d, each in zip(ds, ((0, 1), (2, 3)), strict=True):
        assert d.generate([asked[number] for number in each], ANSWER) == [right[number] for number in each]
    found = [engine.computed_tokens() - before for engine, before in zip((*ps, *ds), computed, strict=True)]
    print(f"computed by each engine, the first of each role with other weights: {found}")
    assert found[0] == 0 and found[1] == 310 + 210 and found[2] == 300 + 200 + 2 * (ANSWER - 1)
    assert ds[0].generate(asked[2:], ANSWER) == right[2:], "what the others have put is not for it"
    assert ds[0].computed_tokens() - computed[2] - found[2] == 310 + 210 + 2 * (ANSWER - 1)


@pytest.fixture
def start_wide(logs):
    """What starts an engine of two ranks. All have one broker and one store."""
    broker, folder, engines = BrokerProcess(), tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm"), []

    def start(role: str) -> RealEngine:
        engines.append(RealEngine(role, logs / f"wide{len(engines)}.log", broker.url, settings_of(folder),
                                  tensor_parallel_size=2))
        return engines[-1].ready()

    yield start
    for engine in engines:
        engine.stop()
    broker.stop()
    shutil.rmtree(folder)


def hand_over(d: RealEngine) -> None:
    """Until one more prompt of it was prefilled by a peer."""
    before = done(d)
    wait_for(lambda: d.generate(prompts(random.randrange(10**6), (300, ))) and done(d) > before, "nothing goes remote")


def test_b104_two_ranks_at_p_and_at_d_with_one_store(mono, start_wide):
    """B104: a conversation of three turns, all of them handed over. Before the second one D is replaced by a new
    engine, and before the third one P, by SIGKILL of all its processes. Each turn computes its new tokens only."""
    p, d = start_wide("kv_producer"), start_wide("kv_consumer")
    hand_over(d)
    (chat, ), whole = prompts(940, (400, )), 0
    for turn in range(3):
        if turn == 1:
            d.stop()
            d = start_wide("kv_consumer")
        elif turn == 2:
            p.kill()
            p = start_wide("kv_producer")
        hand_over(d)
        handed_over, before = done(d), (p.computed_tokens(), d.computed_tokens())
        right, = mono.generate([chat], ANSWER)
        d.ask([chat], ANSWER)
        (answer, cached), = d.answer()
        at_p, at_d = p.computed_tokens() - before[0], d.computed_tokens() - before[1]
        assert answer == right
        assert cached == whole and done(d) == handed_over + 1, turn
        assert (at_p, at_d) == (len(chat) - whole, ANSWER), turn
        whole = (len(chat + answer) - 1) // BLOCK * BLOCK
        chat = chat + answer + prompts(950 + turn, (90, ))[0]
        d.generate(prompts(960 + turn, (5, )))  # steps in which the rest is put
