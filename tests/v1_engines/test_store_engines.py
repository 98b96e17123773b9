# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines that share a store: PDStoreConnector, with the tiny model. What one computed the others load. Also
engines of two ranks, with PDStoreConnector and with PDConnector.
"""
import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine, kill
from tests.waiting import wait_for
from vllm_pd.store.arena import BlockArena

BLOCK = 32
MEMORY_GIB = 0.02
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The arena's folder."""
    memory = Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm"))
    yield memory
    shutil.rmtree(memory)


@pytest.fixture(scope="module")
def settings(folder, tmp_path_factory):
    """What a user writes."""
    return {"kv_connector": "PDStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"folder": str(folder), "memory_gib": MEMORY_GIB, "file_gib": 1,
                                          "file_folder": str(tmp_path_factory.mktemp("files"))}}


@pytest.fixture(scope="module")
def pair(settings, logs):
    """Two engines with one store."""
    engines = [RealEngine(None, logs / f"store{number}.log", kv_transfer_config=settings) for number in range(2)]
    yield [engine.ready() for engine in engines]
    for engine in engines:
        engine.stop()


def arena_of(folder: Path, memory_gib: float = MEMORY_GIB) -> BlockArena:
    """The arena that the engines have made."""
    path, = folder.iterdir()
    return BlockArena(folder, int(path.name.removeprefix("arena-")), int(memory_gib * 2**30))


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + place * 31) % 500 + 5 for place in range(tokens)]


def whole_blocks(tokens: int) -> int:
    """The tokens that a request of so many can load: its last one is always computed."""
    return (tokens - 1) // BLOCK * BLOCK


def ask(engine: RealEngine, *prompts: list[int], tokens: int = 8) -> tuple[list[list[int]], list[int]]:
    """(answers, tokens of each prompt that were not computed)."""
    engine.ask(list(prompts), tokens)
    answers = engine.answer()
    return [one for one, _ in answers], [cached for _, cached in answers]


def failed_loads(engine: RealEngine) -> float:
    engine.generate([prompt(30, 5)])  # figures come with steps
    return engine.figures().get("vllm:pd_store_loads_total:failed", 0)


def test_b104_what_one_engine_computed_another_loads(mono, pair):
    """B104: the second engine computes only what follows the last whole block, and answers as one stock engine does."""
    prompts = [prompt(1, 100), prompt(2, 64), prompt(3, 65), prompt(4, 600), prompt(5, 20)]
    right = mono.generate(prompts)
    assert ask(pair[0], *prompts) == (right, [0] * 5)
    assert ask(pair[1], *prompts) == (right, [whole_blocks(len(one)) for one in prompts])


def test_b104_a_conversation_over_both(mono, pair):
    """Each turn goes to the other engine, and computes its new tokens only: of the earlier turns all whole blocks are
    loaded, those that hold answers, too, but for the last."""
    chat = prompt(11, 150)
    for turn in range(4):
        answer, = mono.generate([chat], tokens=40)
        (given,), (cached,) = ask(pair[turn % 2], chat, tokens=40)
        assert given == answer
        assert turn == 0 or cached >= len(chat) - 30 - 2 * BLOCK, (turn, cached, len(chat))
        chat = chat + answer + prompt(20 + turn, 30)


def test_b104_a_damaged_block_is_computed_again(mono, pair, folder, settings):
    """B104: one byte of one block is another, in memory, and its file is cut: the whole load fails, the prompt is
    computed, and the answer is right."""
    asked = prompt(31, 200)
    right = mono.generate([asked])
    arena = arena_of(folder)
    before = {slot for slot in range(arena.shape.slots) if arena.record(slot).header is not None}
    assert ask(pair[0], asked) == (right, [0])
    fresh = [slot for slot in range(arena.shape.slots) if arena.record(slot).header is not None and slot not in before]
    assert len(fresh) >= 6
    for slot in fresh:
        arena.payload(slot, arena.shape.slot_bytes)[7] ^= 1
    arena.close()
    shutil.rmtree(settings["kv_connector_extra_config"]["file_folder"])
    Path(settings["kv_connector_extra_config"]["file_folder"]).mkdir()
    failed = failed_loads(pair[1])
    assert ask(pair[1], asked) == (right, [0])
    assert failed_loads(pair[1]) == failed + 1
    assert ask(pair[1], asked)[0] == right


def test_b104_an_engine_is_killed_while_it_works(mono, pair, folder, settings, logs):
    """B104: SIGKILL of all processes of one engine in the middle of long prompts; the other answers as before, and one
    that starts anew loads what both have put."""
    prompts = [prompt(40 + number, 700) for number in range(4)]
    right = mono.generate(prompts)
    with contextlib.closing(arena_of(folder)) as arena:
        before = arena.blocks()
        pair[0].ask(prompts, 8)
        wait_for(lambda: arena.blocks() > before, "nothing is put")
    pair[0].kill()
    assert ask(pair[1], *prompts)[0] == right
    again = RealEngine(None, logs / "store2.log", kv_transfer_config=settings).ready()
    try:
        answers, cached = ask(again, *prompts)
        assert answers == right and cached == [whole_blocks(700)] * 4
    finally:
        again.stop()


@pytest.fixture(params=["alone", "with peers"])
def two_ranks(request, settings, logs):
    """(what starts one life after the other of an engine of two ranks, the folder of its store)"""
    memory, lives = Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm")), []
    store = {"folder": str(memory), "memory_gib": 2 * MEMORY_GIB}
    broker = BrokerProcess() if request.param == "with peers" else None

    def start() -> RealEngine:
        log = logs / f"{request.node.name}{len(lives)}.log"
        lives.append(RealEngine(None, log, tensor_parallel_size=2, kv_transfer_config={
            **settings, "kv_connector_extra_config": store}) if broker is None else
            RealEngine("kv_both", log, broker.url, {"store": store}, tensor_parallel_size=2))
        return lives[-1].ready()

    yield start, memory
    for engine in lives:
        engine.stop()
    if broker is not None:
        broker.stop()
    shutil.rmtree(memory)


@pytest.mark.heavy
def test_b104_two_ranks_load_what_those_of_an_earlier_life_have_put(mono, two_ranks):
    """B104: as one stock engine answers. One rank is ended by SIGKILL while it computes and puts, and with it the
    engine: what it had put is right, and what is not whole on both ranks is computed."""
    prompts = [prompt(51, 100), prompt(52, 64), prompt(53, 65), prompt(54, 600), prompt(55, 20)]
    more = [prompt(60 + number, 700) for number in range(4)]
    right, right_more = mono.generate(prompts), mono.generate(more)
    start, memory = two_ranks
    first = start()
    assert ask(first, *prompts) == (right, [0] * 5)
    processes, arena = first.processes(), arena_of(memory, 2 * MEMORY_GIB)
    _, rank = (one for one in processes if one.parent() in processes
               and str(arena.path) in Path(f"/proc/{one.pid}/maps").read_text(encoding="utf-8"))
    before = arena.blocks()
    first.ask(more, 8)
    wait_for(lambda: arena.blocks() > before, "nothing is put")
    os.kill(rank.pid, signal.SIGKILL)
    kill(psutil.wait_procs(processes, 60)[1])
    arena.close()
    second = start()
    assert ask(second, *prompts) == (right, [whole_blocks(len(one)) for one in prompts])
    assert ask(second, *more)[0] == right_more
    second.stop()
    assert ask(start(), *more) == (right_more, [whole_blocks(700)] * 4)
