# SPDX-License-Identifier: Apache-2.0
"""The router's index is the union of the engines' real block tables, at random moments under load, whatever is lost,
swapped, repeated or restarted on the way: V0's allocator, the announcer and the subscriber as they are."""
import asyncio
import contextlib
import itertools
import random
import socket
import time

import aiohttp
import msgspec
import pytest
import zmq
from aiohttp import web
from vllm.core.block.prefix_caching_block import PrefixCachingBlock, PrefixCachingBlockAllocator

from tests.fakes.event_engine import BLOCK_SIZE, FakeEngine
from vllm_pd.bench.simulation import hits
from vllm_pd.bench.simulation.trace import Arrival, TraceConfig, make
from vllm_pd.bench.simulation.workers import SimWorker
from vllm_pd.events.messages import BlockStored
from vllm_pd.router.events.followers import adapter_of
from vllm_pd.router.events.subscriber import Subscriber
from vllm_pd.router.index import PrefixIndex

ENGINES = 3
POOL_BLOCKS = 60
PATIENCE_S = 80.0  # B61 says one second; other work may run beside it
FAULTS = (0.1, 0.1, 0.1)  # shares of batches that are lost, swapped, sent twice
EXTRAS = (None, None, 7)  # what besides the tokens goes into the hashes

Prompt = tuple[tuple[int, ...], int | None]


def held(allocator: PrefixCachingBlockAllocator) -> set[int]:
    """The hashes of the blocks that are prefix hits there."""
    return {block_hash for block_hash, block_id in allocator._cached_blocks.items()
            if allocator.block_is_computed(block_id)}


def chain_of(prompt: Prompt) -> list[int]:
    """What V0 calls the prompt's full blocks."""
    token_ids, extra = prompt
    chain: list[int] = []
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        chain.append(PrefixCachingBlock.hash_block_tokens(not chain, chain[-1] if chain else None,
                                                          list(token_ids[start:start + BLOCK_SIZE]), extra))
    return chain


def adapter(extra: int | None) -> int | str | None:
    """What the subscriber tells the index of blocks with that extra hash."""
    return None if extra is None else adapter_of(BlockStored([], None, [], BLOCK_SIZE, extra_keys=[extra]))


def depth(allocator: PrefixCachingBlockAllocator, prompt: Prompt) -> int:
    """How many blocks from the prompt's start are prefix hits there."""
    table = held(allocator)
    return next((number for number, block_hash in enumerate(chain_of(prompt)) if block_hash not in table),
                len(prompt[0]) // BLOCK_SIZE)


class AllocatorEngine(FakeEngine):
    """One life of an engine whose blocks are those of a real allocator."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.allocator = PrefixCachingBlockAllocator(POOL_BLOCKS, BLOCK_SIZE)
        self.allocator.event_sink = self.sink
        self._running: list[list] = []
        self._now = itertools.count(1)

    def serve(self, prompt: Prompt) -> None:
        """Compute a prompt; it runs on until `finish`. Where there is no room, the oldest ends first."""
        token_ids, extra = prompt
        count = len(token_ids) // BLOCK_SIZE
        while self.allocator.get_num_free_blocks() < count:
            self.finish()
        blocks: list = []
        for start in range(0, count * BLOCK_SIZE, BLOCK_SIZE):
            blocks.append(self.allocator.allocate_immutable_block(
                blocks[-1] if blocks else None, list(token_ids[start:start + BLOCK_SIZE]), extra))
        self.allocator.mark_blocks_as_accessed([block.block_id for block in blocks], next(self._now))
        self.allocator.mark_blocks_as_computed([])
        self._running.append(blocks)
        self.sink.begin_step()

    def finish(self) -> None:
        for block in self._running.pop(0) if self._running else ():
            self.allocator.free(block)
        self.sink.begin_step()

    def reset(self) -> None:
        while self._running:
            self.finish()
        assert self.allocator.reset_prefix_cache()
        self.sink.begin_step()


class Fleet:
    """Engines that live and die behind front ends that stay."""

    def __init__(self) -> None:
        self.engines: list[AllocatorEngine | None] = [None] * ENGINES
        self.prompts: list[Prompt] = []
        self.rng = random.Random(5)
        self._lives = itertools.count(1)

    def start(self, number: int) -> None:
        """At a port of its own: another socket may have the one that a former life had."""
        for _ in range(5):
            with contextlib.suppress(zmq.ZMQError), socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
                probe.close()
                self.engines[number] = AllocatorEngine(f"tcp://127.0.0.1:{port}", faults=FAULTS,
                                                       seed=next(self._lives))
                return
        raise RuntimeError("no free port in five tries")

    def stop(self, number: int) -> None:
        self.engines[number].close()
        self.engines[number] = None

    @contextlib.asynccontextmanager
    async def serving(self):
        """The front ends' URLs."""
        runners, urls = [], []
        for number in range(ENGINES):
            async def events(request, number=number):
                engine = self.engines[number]
                if engine is None:
                    request.transport.abort()  # nobody is there
                    return web.Response()
                return web.Response(body=msgspec.json.encode(engine.notice), content_type="application/json")

            app = web.Application()
            app.router.add_get("/pd/events", events)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            yield urls
        finally:
            for engine in self.engines:
                if engine is not None:
                    engine.close()
            for runner in runners:
                await runner.cleanup()

    def prompt(self) -> Prompt:
        """One that goes on where another one stopped, or leaves it somewhere."""
        token_ids, extra = self.rng.choice(self.prompts[-30:]) if self.prompts else ((), None)
        kept = self.rng.randint(0, len(token_ids))
        if not kept:
            extra = self.rng.choice(EXTRAS)
        new = self.rng.choices(range(50), k=self.rng.randint(1, 5 * BLOCK_SIZE))
        prompt = (token_ids[:kept] + tuple(new))[:POOL_BLOCKS // 2 * BLOCK_SIZE], extra
        self.prompts.append(prompt)
        return prompt

    def load(self, operations: int) -> None:
        for _ in range(operations):
            engine = self.rng.choice(self.engines)
            if engine is None:
                continue
            what = self.rng.random()
            if what < 0.6:
                engine.serve(self.prompt())
            elif what < 0.995:
                engine.finish()
            else:
                engine.reset()

    def differences(self, index: PrefixIndex, urls: list[str]) -> list[str]:
        """Where index and block tables are not the same."""
        found = []
        for url, engine in zip(urls, self.engines, strict=True):
            table = held(engine.allocator) if engine is not None else set()
            if extra := set(index.engine_hashes(url)) - table:
                found.append(f"{len(extra)} blocks of {url} that it does not hold")
            if engine is None:
                continue
            for prompt in self.prompts:
                ours = index.matches(index.hashes(prompt[0], adapter(prompt[1]))).get(url, 0)
                if ours != (theirs := depth(engine.allocator, prompt)):
                    found.append(f"{ours} blocks of a prompt on {url}, really {theirs}")
        return found


async def test_b61_b62_the_index_is_what_the_engines_hold():
    fleet = Fleet()
    index = PrefixIndex(BLOCK_SIZE)
    slowest_s = 0.0
    async with fleet.serving() as urls, aiohttp.ClientSession() as session:
        for number in range(ENGINES):
            fleet.start(number)
        fleet.load(30)  # before anybody listens
        subscribers = [Subscriber(url, index, session) for url in urls]
        for subscriber in subscribers:
            subscriber.start()
        try:
            deadline = time.monotonic() + PATIENCE_S
            for moment in itertools.count():
                seen = sum((subscriber.counters for subscriber in subscribers), type(subscribers[0].counters)())
                if moment >= 12 and seen["gaps"] and seen["duplicates"] and seen["early"]:
                    break
                assert moment < 12 or time.monotonic() < deadline, f"nothing was put to the test: {dict(seen)}"
                for _ in range(fleet.rng.randint(3, 12)):
                    fleet.load(fleet.rng.randint(1, 12))
                    await asyncio.sleep(fleet.rng.random() * 0.02)
                if moment % 3 == 1:  # one dies, and is started anew in some other moment
                    fleet.stop(fleet.rng.choice([n for n, engine in enumerate(fleet.engines) if engine is not None]))
                elif moment % 3 == 2:
                    fleet.start(fleet.engines.index(None))
                    fleet.load(10)
                begin = time.monotonic()
                while differences := fleet.differences(index, urls):
                    assert time.monotonic() - begin < PATIENCE_S, differences
                    await asyncio.sleep(0.02)
                if None not in fleet.engines:
                    slowest_s = max(slowest_s, time.monotonic() - begin)
        finally:
            for subscriber in subscribers:
                await subscriber.close()
    print(f"slowest to be right again {slowest_s:.2f} s; {dict(seen)}")
    assert index.workers() == [] and index.counts.unknown_removed == 0
    index.sweep(1 << 30)
    assert not any(index.sizes().values())


def test_b60_b62_at_every_moment_without_faults(monkeypatch):
    """As events come without delay, there is no moment at which the index says anything else than the tables."""
    trace = make(TraceConfig(conversations=30, conversations_per_s=3, system_tokens=60, document_tokens=150,
                             longest_tokens=600, system_prompts=3, documents=3, answer_tokens=30, pause_s=3, seed=3))
    index = PrefixIndex(BLOCK_SIZE)
    workers = [SimWorker(f"w{number}", 200, BLOCK_SIZE, hits.SimSpeed(prefill_tokens_per_s=2000),
                      lambda worker, *what: index.stored(worker.name, *what[:-1], BLOCK_SIZE),
                      lambda worker, hashes, _: index.removed(worker.name, hashes)) for number in range(2)]
    rng = random.Random(1)
    for number, arrival in enumerate(trace):
        for worker in workers:
            worker.advance(arrival.at_s)
            assert set(index.engine_hashes(worker.name)) == held(worker.allocator)
        for old in rng.sample(trace[:number + 1], min(number + 1, 5)):
            matched = index.matches(index.hashes(old.prompt))
            assert matched == {worker.name: blocks for worker in workers
                               if (blocks := depth(worker.allocator, (old.prompt, None)))}
        rng.choice(workers).submit(arrival, arrival.at_s)
    assert index.counts.removed > 500 and index.counts.unknown_removed == 0


@pytest.mark.parametrize("kept, hit_blocks", [(0, 0), (1, 0), (BLOCK_SIZE, 1), (5 * BLOCK_SIZE + 1, 5)])
def test_a_simulated_worker_hits_what_its_allocator_holds(kept, hit_blocks):
    worker = SimWorker("w", 50, BLOCK_SIZE, hits.SimSpeed(), lambda *_: None, lambda *_: None)
    rng = random.Random(0)
    first = Arrival(0.0, 0, 0, tuple(rng.choices(range(1000), k=40)), (1,) * 8)
    second = Arrival(1000.0, 1, 0, first.prompt[:kept] + tuple(token + 1 for token in first.prompt[kept:]), (2,) * 8)
    worker.submit(first, 0.0)
    worker.submit(second, 1000.0)
    worker.advance(2000.0)
    assert [run.hit_tokens // BLOCK_SIZE for run in worker.done] == [0, hit_blocks]
    assert worker.allocator.get_num_free_blocks() == 50 and worker.load().queued_prefill_tokens == 0
