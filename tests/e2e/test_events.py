# SPDX-License-Identifier: Apache-2.0
"""B60, B61 on real engines: what an index holds is what the engines' own tables say, over remote prefills and death."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
from _chaos.zygote import Zygote
from harness import BrokerProcess, EngineProcess, prompt

from tests.waiting import becomes
from vllm_pd.events.messages import EngineLoad
from vllm_pd.events.notice import EventsNotice
from vllm_pd.router.events.subscriber import Subscriber
from vllm_pd.router.index import PrefixIndex
from vllm_pd.rpc.ports import take_free

BLOCKS = 48  # few, so that blocks are evicted
PATIENCE_S = 100.0
POOL = "scheduler.block_manager.block_allocator._allocators[Device.GPU]"
HITS = f"[h for h, b in {POOL}._cached_blocks.items() if {POOL}.block_is_computed(b)]"


@dataclass
class Told:
    """An engine and where it tells."""
    engine: EngineProcess
    events: str
    side: str


def start(zygote: Zygote, role: str | None, index: int, broker: str, **pd) -> tuple[EngineProcess, str]:
    events = f"tcp://*:{take_free('127.0.0.1')}"
    engine = EngineProcess(zygote, role, index, broker, pd, num_gpu_blocks_override=BLOCKS,
                           max_num_seqs=4, max_model_len=512,
                           kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events})
    return engine, events


def told(engine: EngineProcess, events: str) -> Told:
    engine.ready()
    engine.execute("from vllm.utils import Device; from vllm_pd.events import notice; "
                   "found = notice.find(engine.vllm_config)")
    assert engine.evaluate("found.events") == events and engine.evaluate("found.block_size") == 16
    return Told(engine, events, engine.evaluate("found.side"))


@pytest.fixture(scope="module")
def engines(zygote, starting) -> Iterator[dict[str, Told]]:
    """P and D, both telling what they hold."""
    broker = BrokerProcess()
    starting.callback(broker.stop)
    p, p_events = start(zygote, "kv_producer", 0, broker.url)
    d, d_events = start(zygote, "kv_consumer", 1, broker.url, max_local_prefill_tokens=100)
    yield {"p": told(p, p_events), "d": told(d, d_events)}
    for process in (d, p, broker):
        process.stop()


async def until_right(told: Told, index: PrefixIndex, subscriber: Subscriber) -> float:
    """Seconds until what is said of the engine is what it holds."""
    began = time.monotonic()
    while True:
        held = set(index.engine_hashes(subscriber.worker)) if subscriber.worker in index.workers() else set()
        hits = set(await asyncio.to_thread(told.engine.evaluate, HITS))
        if subscriber.connected and held == hits:
            return time.monotonic() - began
        assert time.monotonic() - began < PATIENCE_S, (len(held - hits), len(hits - held), subscriber.counters)
        await asyncio.sleep(0.05)


async def until(look: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Until this is so. Blocks, pulses and gauges come from threads of the engine, each at its time."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := await look()) != wanted:
        assert time.monotonic() < deadline, (found, wanted)
        await asyncio.sleep(0.05)


async def gauges(engine: EngineProcess) -> tuple[float, float, float]:
    """Of blocks in all, requests that run, and blocks that were announced."""
    metrics = await asyncio.to_thread(engine.evaluate, "{s.name: s.value for f in __import__('prometheus_client')."
                                      "REGISTRY.collect() for s in f.samples if s.name.startswith('vllm:pd_')}")
    return tuple(metrics[f"vllm:pd_{name}"] for name in ("load_total_blocks", "load_running",
                                                         "events_announced_blocks"))


async def has_told(engine: EngineProcess, kind: str) -> bool:
    """Whether it has announced anything of that kind; a subscriber may have learned it from a snapshot."""
    return (await asyncio.to_thread(engine.counters))[f"events_total:{kind}"] > 0


async def load(subscriber: Subscriber) -> EngineLoad:
    return subscriber.load


async def test_b60_b61_the_index_is_the_union_of_the_engines_tables(engines):
    """Remote and local prompts, shared beginnings, an abort, eviction; then one engine dies."""
    index = PrefixIndex(16)
    subscribers = {name: Subscriber(f"http://{name}", index, None, configured=EventsNotice(
        one.events.replace("*", "127.0.0.1"), 0, side=one.side)) for name, one in engines.items()}
    d, shared = engines["d"].engine, prompt(150, "shared")
    await asyncio.to_thread(d.wait_for_peers)
    try:
        for subscriber in subscribers.values():
            subscriber.start()
        for number in range(6):
            long, short = shared + prompt(60, f"a{number}"), shared[:60] + prompt(20, f"b{number}")
            await asyncio.to_thread(d.generate, [long, short], max_tokens=20)
            aborted = await asyncio.to_thread(d.add, prompt(200, f"c{number}"))
            await asyncio.to_thread(d.abort, aborted)
            for name, one in engines.items():
                await until_right(one, index, subscribers[name])
            matches = index.matches(index.hashes(long))
            hit = await asyncio.to_thread(d.hit, long)
            assert matches["http://d"] == hit // 16 > 0  # B62, too
        await until(lambda: has_told(d, "removed_blocks"), True)
        assert index.engine_hashes("http://p")
        await asyncio.to_thread(d.at_rest)
        await until(lambda: load(subscribers["d"]), EngineLoad(total_blocks=BLOCKS))
        assert await asyncio.to_thread(d.evaluate, f"{POOL}.event_sink.dropped") == 0
        await until(lambda: gauges(d), (BLOCKS, 0, len(index.engine_hashes("http://d"))))

        assert await asyncio.to_thread(d.evaluate, "engine.reset_prefix_cache()")
        await until_right(engines["d"], index, subscribers["d"])
        assert index.matches(index.hashes(shared)).keys() <= {"http://p"}

        await asyncio.to_thread(engines["p"].engine.stop)
        await becomes(lambda: "http://p" not in index.workers())
    finally:
        for subscriber in subscribers.values():
            await subscriber.close()
