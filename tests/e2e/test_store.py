# SPDX-License-Identifier: Apache-2.0
"""B104 on V0: a prefill engine and two decode engines of one host share a store."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from harness import PATIENT, EngineProcess, Pair, prompt, start_pair

from tests.waiting import wait_for

BLOCK = 16
THRESHOLD = 40
COUNT_COMPUTED = """
driver.computed = 0
driver.original_execute = engine.model_executor.execute_model
def counted(execute_model_req):
    driver.computed += sum(m.token_chunk_size - len(m.computed_block_nums) * 16 if m.is_prompt else 1
                           for m in execute_model_req.seq_group_metadata_list)
    return driver.original_execute(execute_model_req)
engine.model_executor.execute_model = counted
"""
# Loads are kept from ending, as by a slow disk.
KEEP_LOADS = """
import threading
driver.gate, driver.loads = threading.Event(), disagg._stored._worker.loader
driver.load_block = driver.loads._load_block
driver.loads._load_block = lambda block, load: driver.gate.wait(60) and driver.load_block(block, load)
"""
GIVE_LOADS = "driver.gate.set(); driver.loads._load_block = driver.load_block"


class Fleet:
    """`engines`: P and two Ds."""

    def __init__(self, pair: Pair, other: EngineProcess) -> None:
        self.engines = (pair.p, pair.d, other)
        self.ds = self.engines[1:]

    def computed(self) -> int:
        return sum(engine.evaluate("driver.computed") for engine in self.engines)

    def loads(self, engine: EngineProcess) -> dict[str, int]:
        return engine.evaluate("dict(disagg._stored._worker.loader.counts)")

    def at_rest(self) -> None:
        for engine in self.engines:
            engine.at_rest()


@pytest.fixture(scope="module")
def started(zygote) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm")
        stack.callback(shutil.rmtree, folder)
        settings = {**PATIENT, "store": {"folder": folder, "memory_gib": 0.05}}
        pair = start_pair(zygote, stack, settings)
        other = EngineProcess(zygote, "kv_consumer", 0, pair.broker.url, settings)
        stack.callback(other.stop)
        fleet = Fleet(pair, other)
        for engine in fleet.engines:
            engine.ready().execute(COUNT_COMPUTED)
        for d in fleet.ds:
            d.execute("import msgspec; prefills = disagg.remote_prefills; prefills._policy = msgspec.structs.replace("
                      f"prefills._policy, max_local_prefill_tokens={THRESHOLD})")
        yield fleet


@pytest.fixture
def fleet(started) -> Iterator[Fleet]:
    """At rest before and after each test (B20)."""
    for d in started.ds:
        d.wait_for_peers()
    yield started
    started.at_rest()


def test_b104_a_turn_computes_its_new_tokens_only_whoever_serves_it(fleet, mono):
    """B104: each turn goes to the D that did not serve the last one, and where it is long to P. All engines together
    compute what no turn before has put."""
    chat, known = prompt(150, "chat"), 0
    for turn, (more, answer) in enumerate(((9, 24), (90, 24), (5, 3), (70, 24))):
        right = mono.tokens([chat], max_tokens=answer)[0]
        before = fleet.computed()
        [found] = fleet.ds[turn % 2].generate([chat], max_tokens=answer)
        assert found["outputs"][0]["token_ids"] == right
        stored = known // BLOCK * BLOCK
        assert found["cached_tokens"] == stored
        remote = len(chat) - stored > THRESHOLD  # then D computes the last token again
        wait_for(lambda: fleet.computed() - before == len(chat) - stored + answer - 1 + remote, f"turn {turn}")  # noqa: B023
        known = len(chat) + answer - 1
        chat = chat + right + prompt(more, f"more {turn}")
    assert sum(sum(fleet.loads(d).values()) for d in fleet.ds) == 3
    assert fleet.loads(fleet.engines[0]).get("failed", 0) == 0


def test_b104_a_prefill_engine_loads_what_a_decode_engine_computed(fleet, mono):
    """P loads the blocks of a job that the store has, computes the rest of the prompt, and writes all of it to D."""
    p, d, e = fleet.engines
    stem = prompt(THRESHOLD - 1, "stem")  # short enough for D to compute it itself
    d.tokens([stem])
    before = fleet.loads(p)
    text = stem + prompt(100, "p loads")
    e.execute("disagg._stored.choose = disagg._stored.waits = lambda *_: None")  # so it hands over all of it
    try:
        assert e.tokens([text]) == mono.tokens([text])
    finally:
        e.execute("del disagg._stored.choose, disagg._stored.waits")
    assert fleet.loads(p).get("loaded", 0) == before.get("loaded", 0) + 1


def test_b104_an_abort_in_a_load_keeps_the_blocks_until_its_end(fleet, mono):
    """And an equal beginning waits for the load, while others are served."""
    _, d, e = fleet.engines
    text = prompt(100, "abort")
    right = mono.tokens([text])[0]
    assert d.tokens([text]) == [right]
    before = fleet.loads(e)
    e.execute(KEEP_LOADS)
    first, second = e.add_all([text, text])
    e.wait_until("len(scheduler.remote_prefilling) == 1")
    assert e.tokens([prompt(20, "others")]) == mono.tokens([prompt(20, "others")])
    assert e.evaluate("len(scheduler.waiting)") == 1
    e.abort(first)
    e.wait_until("len(scheduler.quarantined) == 1 and len(scheduler.remote_prefilling) == 1")
    e.execute(GIVE_LOADS)
    assert e.wait([second])[0]["outputs"][0]["token_ids"] == right
    after = fleet.loads(e)
    assert {one: after[one] - before.get(one, 0) for one in after} == {**dict.fromkeys(after, 0), "failed": 1,
                                                                       "loaded": 1}


def test_b104_a_block_that_is_gone_is_computed(fleet, mono):
    _, d, e = fleet.engines
    text = prompt(100, "gone")
    right = mono.tokens([text])[0]
    assert d.tokens([text]) == [right]
    failed = fleet.loads(e).get("failed", 0)
    e.execute("driver.store_get = disagg._stored._worker.store.get; "
              "disagg._stored._worker.store.get = lambda *_: False")
    try:
        [found] = e.generate([text])
    finally:
        e.execute("disagg._stored._worker.store.get = driver.store_get")
    assert found["outputs"][0]["token_ids"] == right and found["cached_tokens"] == 0
    assert fleet.loads(e)["failed"] == failed + 1


def test_b104_a_reset_of_the_prefix_cache_ends_the_use_of_the_store(fleet, mono):
    """The last test of this module: this engine uses the store no more."""
    _, d, e = fleet.engines
    text = prompt(100, "reset")
    right = mono.tokens([text])[0]
    assert d.tokens([text]) == [right]
    assert e.do("reset_prefix_cache")
    [found] = e.generate([prompt(9, "step"), text])[1:]
    assert found["outputs"][0]["token_ids"] == right
    [found] = e.generate([prompt(100, "reset")])
    assert found["outputs"][0]["token_ids"] == right
    stock = "disagg._stored._worker.store.take_stock()['stored']"
    before = e.evaluate(stock)
    e.tokens([prompt(100, "after the reset")])
    assert e.evaluate(stock) == before
