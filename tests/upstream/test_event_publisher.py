# SPDX-License-Identifier: Apache-2.0
"""The events on the wire: through vLLM's own publisher, to its own example of a subscriber and to ours.

B61 with nothing but what a V1 engine has: the events and their replay.
"""

import asyncio
import contextlib
import random
import re
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import zmq
from _wheel import cache, source
from vllm.config import KVEventsConfig
from vllm.distributed import kv_events as upstream

from tests.fakes.simulated_engine import SimulatedEngine
from tests.waiting import becomes
from vllm_pd.events.announcer import EventAnnouncer
from vllm_pd.events.notice import EventsNotice
from vllm_pd.events.side import SidePort
from vllm_pd.events.sink import BlockSink
from vllm_pd.router.events.subscriber import Subscriber
from vllm_pd.router.index import PrefixIndex
from vllm_pd.rpc.ports import take_free
from vllm_pd.v0.events import _publish_to, bind_sink, load_reader

EXAMPLE = "examples/online_serving/kv_events_subscriber.py"
TOPIC = "kv-events"
BLOCK_SIZE = 4
PATIENCE_S = 80.0


def publisher_at(events: str, replay: str | None, **options) -> upstream.ZmqEventPublisher:
    """As `--kv-events-config` makes it. A socket that was closed at the address a moment ago may still be there: libzmq
    closes in a thread of its own."""
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=events, replay_endpoint=replay,
                            topic=TOPIC, **options)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return upstream.EventPublisherFactory.create(config)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@pytest.fixture
def ports() -> tuple[int, int]:
    return take_free("127.0.0.1"), take_free("127.0.0.1")


def test_upstreams_example_reads_a_v0_engine(ports, tmp_path):
    """The example of the pinned release, as it is but for its two ports."""
    with cache.lock():
        example = (source.upstream(sys.executable) / EXAMPLE).read_text()
    for default, port in zip((5557, 5558), ports, strict=True):
        assert example.count(f"localhost:{default}") == 1
        example = example.replace(f"localhost:{default}", f"127.0.0.1:{port}")
    program = tmp_path / "subscriber.py"
    program.write_text(example)

    publisher = publisher_at(f"tcp://*:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
    engine = SimulatedEngine(wants_remote=lambda group: False)
    side = SidePort("tcp://127.0.0.1:0")
    sink = BlockSink(side.waker.set)
    bind_sink(engine.scheduler, sink)
    announcer = EventAnnouncer(sink, BLOCK_SIZE, _publish_to(publisher), load_reader(engine.scheduler),
                               lambda: not engine.scheduler.running, side)
    announcer.start()
    reader = subprocess.Popen([sys.executable, "-u", str(program)], stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(iter(reader.stdout.readline, "")), daemon=True).start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not all(any(word in line for line in lines) for word in ("BlockStored", "AllBlocksCleared")):
            assert time.monotonic() < deadline, lines
            engine.add("a", list(range(100, 117)), max_tokens=2)
            engine.run()
            time.sleep(0.15)  # what was computed is told while the engine rests
            engine.scheduler.reset_prefix_cache()
            sink.begin_step()
            time.sleep(0.15)
    finally:
        reader.kill()
        reader.wait()
        announcer.close()
        publisher.shutdown()
    [stored, *_] = [line for line in lines if "BlockStored" in line]
    assert "parent_block_hash=None" in stored and f"block_size={BLOCK_SIZE}" in stored
    assert [int(word) for word in re.search(r"token_ids=\[(.*?)\]", stored)[1].split(",")] == list(range(100, 116))
    assert not [line for line in lines if "rror" in line]


class V1Engine:
    """What a V1 engine publishes, one batch a step; it removes in any order. `truth` is what it holds."""

    def __init__(self, events: str, replay: str | None, seed: int, **options) -> None:
        self.truth: dict[int, tuple[int | None, list[int]]] = {}
        self.publisher = publisher_at(events, replay, **options)
        self._rng = random.Random(seed)

    def step(self) -> None:
        rng, events = self._rng, []
        if len(self.truth) > 20 or self.truth and rng.random() < 0.3:
            gone = rng.choice(sorted(self.truth))
            parents = {parent for parent, _ in self.truth.values()}
            if gone not in parents:
                del self.truth[gone]
                events.append(upstream.BlockRemoved([gone]))
        if rng.random() < 0.01:
            self.truth.clear()
            events = [upstream.AllBlocksCleared()]
        parent = rng.choice([None, *sorted(self.truth)])
        hashes, tokens = [rng.getrandbits(62) for _ in range(rng.randrange(1, 4))], []
        for number, block_hash in enumerate(hashes):
            chunk = [rng.randrange(1000) for _ in range(BLOCK_SIZE)]
            self.truth[block_hash] = (hashes[number - 1] if number else parent, chunk)
            tokens += chunk
        events.append(upstream.BlockStored(hashes, parent, tokens, BLOCK_SIZE, None))
        self.publisher.publish(upstream.KVEventBatch(time.time(), events))

    def close(self) -> None:
        self.publisher.shutdown()


class Wire:
    """Between publisher and subscriber: loses and swaps batches while `faulty`."""

    def __init__(self, source_address: str, address: str, seed: int) -> None:
        self.faulty = 0.0
        self.kept_back = 0  # batches that were lost, or held up
        self._rng = random.Random(seed)
        self._context = zmq.Context()
        self._from = self._context.socket(zmq.SUB)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.setsockopt(zmq.RECONNECT_IVL, 20)
        self._from.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        self._from.connect(source_address)
        self._to = self._context.socket(zmq.PUB)
        self._to.setsockopt(zmq.LINGER, 0)
        self._to.bind(address)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        late: list[list[bytes]] = []
        while not self._stopping.is_set():
            if not self._from.poll(20):
                continue
            frames = self._from.recv_multipart()
            draw = self._rng.random() / self.faulty if self.faulty else 2.0
            self.kept_back += draw < 1.0
            if draw < 0.5:
                continue
            if draw < 1.0:
                late.append(frames)
                continue
            self._to.send_multipart(frames)
            for one in late:
                self._to.send_multipart(one)
            late.clear()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._from.close(linger=0)
        self._to.close()
        self._context.term()


@contextlib.asynccontextmanager
async def watched(events: str, replay: str | None):
    index = PrefixIndex(BLOCK_SIZE)
    subscriber = Subscriber("http://127.0.0.1:1", index, None, configured=EventsNotice(events, 0, replay, TOPIC))
    subscriber.start()
    try:
        yield index, subscriber
    finally:
        await subscriber.close()


def held(index: PrefixIndex, subscriber: Subscriber) -> set[int]:
    return set(index.engine_hashes(subscriber.worker)) if subscriber.worker in index.workers() else set()


async def until_right(engine: V1Engine, index: PrefixIndex, subscriber: Subscriber) -> None:
    await becomes(lambda: subscriber.connected and held(index, subscriber) == set(engine.truth),
                  lambda: (subscriber.state, subscriber.counters))


@pytest.mark.parametrize("seed", range(2))
async def test_b61_a_v1_engine_with_replay_is_followed_over_a_bad_wire_and_a_restart(ports, tmp_path, seed):
    """B61 where there are no snapshots: late start, losses, swaps, a restart at the same address."""
    addresses = f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"
    engine = V1Engine(f"tcp://*:{ports[0]}", addresses[1], seed)
    for _ in range(20):
        engine.step()  # before anybody listens
    wire = Wire(addresses[0], f"ipc://{tmp_path}/wire", seed)
    try:
        async with watched(f"ipc://{tmp_path}/wire", addresses[1]) as (index, subscriber):
            await until_right(engine, index, subscriber)
            deadline = time.monotonic() + PATIENCE_S
            for life in range(2):
                rounds = 0
                while rounds < 3 or not subscriber.counters["gaps"]:  # the wire's thread may have been late
                    assert time.monotonic() < deadline, subscriber.counters
                    rounds += 1
                    wire.faulty = 0.4
                    for _ in range(rng_steps(seed)):
                        engine.step()
                        await asyncio.sleep(0.004)
                    wire.faulty = 0.0
                    await until_right(engine, index, subscriber)
                if not life:
                    engine.close()
                    engine = V1Engine(f"tcp://*:{ports[0]}", addresses[1], seed + 50)
                    engine.step()
                    await until_right(engine, index, subscriber)
                    assert has_begun_anew(subscriber)
            assert not subscriber.counters["errors"]
    finally:
        wire.close()
        engine.close()


def has_begun_anew(subscriber: Subscriber) -> bool:
    """As it has seen another life of the engine, or has given up what it knew as twice nobody answered."""
    return bool(subscriber.counters["restarts"]) or subscriber.counters["replays_unanswered"] >= 2


def rng_steps(seed: int) -> int:
    return 20 + 7 * seed


async def test_b61_a_restart_is_noticed_though_nothing_is_published(ports):
    addresses = f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"
    engine = V1Engine(f"tcp://*:{ports[0]}", addresses[1], 0)
    async with watched(*addresses) as (index, subscriber):
        for _ in range(5):
            engine.step()
        await until_right(engine, index, subscriber)
        engine.close()
        engine = V1Engine(f"tcp://*:{ports[0]}", addresses[1], 1)
        await until_right(engine, index, subscriber)
        assert not engine.truth
    engine.close()


async def test_b61_what_a_short_replay_no_longer_holds_is_not_claimed(ports, tmp_path):
    """Only what is surely there is matched: the index may know too little of the engine, never too much."""
    addresses = f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"
    engine = V1Engine(f"tcp://*:{ports[0]}", addresses[1], 0, buffer_steps=3)
    wire = Wire(addresses[0], f"ipc://{tmp_path}/wire", 1)
    try:
        async with watched(f"ipc://{tmp_path}/wire", addresses[1]) as (index, subscriber):
            for _ in range(20):
                engine.step()
            wire.faulty = 1.0
            deadline = time.monotonic() + PATIENCE_S
            while wire.kept_back < 10:
                assert time.monotonic() < deadline
                engine.step()
                await asyncio.sleep(0.03)
            wire.faulty = 0.0
            deadline = time.monotonic() + PATIENCE_S
            before = subscriber.counters["batches"]
            while subscriber.counters["batches"] < before + 20:
                engine.step()
                await asyncio.sleep(0.05)
                assert time.monotonic() < deadline, subscriber.counters
            deadline = time.monotonic() + PATIENCE_S
            next_step = time.monotonic() + 1.0
            while not (set() < held(index, subscriber) <= set(engine.truth) and subscriber.counters["incomplete"]):
                assert time.monotonic() < deadline, subscriber.counters
                if time.monotonic() > next_step:  # all that the replay has may hang on what it no longer has
                    engine.step()
                    next_step = time.monotonic() + 1.0
                await asyncio.sleep(0.05)
            unanswered = subscriber.counters["replays_unanswered"]
            until = time.monotonic() + 1.2
            while time.monotonic() < until:
                await asyncio.sleep(0.05)
                assert held(index, subscriber) <= set(engine.truth)
            assert held(index, subscriber) or subscriber.counters["replays_unanswered"] > unanswered
    finally:
        wire.close()
        engine.close()


async def test_b61_without_a_replay_only_what_follows_a_gap_counts(tmp_path):
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind(f"ipc://{tmp_path}/events")

    def send(seq: int, *events) -> None:
        socket.send_multipart([TOPIC.encode(), seq.to_bytes(8, "big"), msgspec.msgpack.encode(
            upstream.KVEventBatch(float(seq), list(events)))])

    def stored(block_hash: int) -> upstream.BlockStored:
        return upstream.BlockStored([block_hash], None, [block_hash] * BLOCK_SIZE, BLOCK_SIZE, None)

    async with watched(f"ipc://{tmp_path}/events", None) as (index, subscriber):
        async def until(wanted: set[int], *again) -> None:
            deadline = time.monotonic() + PATIENCE_S
            while held(index, subscriber) != wanted:
                assert time.monotonic() < deadline, (held(index, subscriber), subscriber.counters)
                if again:
                    send(*again)
                await asyncio.sleep(0.02)

        await until({1}, 0, stored(1))  # it may not be heard at once
        send(1, stored(2))
        await until({1, 2})
        send(3, stored(4))  # number 2 may have removed anything
        await until({4})
        assert subscriber.counters["gaps"] == 2  # the first one is the beginning
        send(0, stored(9))
        await until({9})
        assert subscriber.counters["restarts"] == 1
    socket.close(linger=0)
    context.term()
