# SPDX-License-Identifier: Apache-2.0
"""B61: whatever is lost, swapped, repeated or restarted, the subscriber is right about an engine soon after."""

import asyncio
import contextlib
import math
import random
import time

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from tests.fakes.event_engine import BLOCK_SIZE, TOPIC, FakeEngine
from tests.waiting import becomes
from vllm_pd.events import messages as m
from vllm_pd.events import reach
from vllm_pd.events.notice import EventsNotice
from vllm_pd.router.events import followers
from vllm_pd.router.events.subscriber import POLLED_S, Subscriber, SubscriberState
from vllm_pd.router.index import PrefixIndex
from vllm_pd.router.subscriptions import load_of
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import is_free, take_free

PATIENCE_S = 60.0  # B61 says one second; other work may run beside it


class Front:
    """The engine's HTTP server, as far as the subscriber knows it. It outlives the engine's lives."""

    def __init__(self) -> None:
        self.engine: FakeEngine | None = None

    async def events(self, request: web.Request) -> web.Response:
        if self.engine is None:
            return web.Response(status=404)
        return web.Response(body=msgspec.json.encode(self.engine.notice), content_type="application/json")


@contextlib.asynccontextmanager
async def watched(front: Front, **options):
    """(index, subscriber) with the front end served."""
    app = web.Application()
    app.router.add_get("/pd/events", front.events)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    index = PrefixIndex(BLOCK_SIZE)
    async with aiohttp.ClientSession() as session:
        subscriber = Subscriber(url, index, session, **options)
        subscriber.start()
        try:
            yield index, subscriber
        finally:
            await subscriber.close()
            assert index.workers() == []
            await runner.cleanup()
            if front.engine is not None:
                front.engine.close()


def is_right(front: Front, index: PrefixIndex, subscriber: Subscriber) -> bool:
    held = set(index.engine_hashes(subscriber.worker)) if subscriber.worker in index.workers() else set()
    return subscriber.connected and held == set(front.engine.truth)


async def until_right(front: Front, index: PrefixIndex, subscriber: Subscriber) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not is_right(front, index, subscriber):
        assert time.monotonic() - began < PATIENCE_S, (
            subscriber.state, subscriber.counters, len(front.engine.truth),
            len(index.engine_hashes(subscriber.worker)) if subscriber.worker in index.workers() else None)
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def until_subscribed(front: Front, subscriber: Subscriber) -> None:
    """A snapshot may come before the subscription stands; what is published until then is lost."""
    before, deadline = subscriber.counters["batches"], time.monotonic() + PATIENCE_S
    while subscriber.counters["batches"] == before:
        assert time.monotonic() < deadline, subscriber.counters
        front.engine.store(1)
        await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Who stands still for some seconds, the engine or the subscriber, is not lost for that."""
    monkeypatch.setattr(followers, "LOST_S", PATIENCE_S / 3)


@pytest.fixture
def endpoint(tmp_path) -> str:
    return f"ipc://{tmp_path}/events"


async def test_b61_a_late_subscriber_gets_what_was_before_and_then_what_is_new(endpoint):
    front = Front()
    front.engine = FakeEngine(endpoint)
    old = front.engine.store(10)
    async with watched(front) as (index, subscriber):
        await until_right(front, index, subscriber)
        for _ in range(20):  # a subscription may take longer than a snapshot, and a batch longer than a pulse
            asked = subscriber.counters["snapshots"]
            new = front.engine.store(3, old[-1])
            front.engine.remove(new[-1])
            await until_right(front, index, subscriber)
            if subscriber.counters["snapshots"] == asked:
                break
        else:
            pytest.fail(f"never without a snapshot: {subscriber.counters}")
        tokens = [token for block in old for token in block.token_ids]
        assert index.matches(index.hashes(tokens)) == {subscriber.worker: 10}
        front.engine.clear()
        await until_right(front, index, subscriber)


async def test_b61_a_lost_last_batch_is_noticed_though_nothing_follows(endpoint):
    front = Front()
    front.engine = FakeEngine(endpoint)
    async with watched(front) as (index, subscriber):
        front.engine.store(2)
        await until_right(front, index, subscriber)
        front.engine.publisher.lose_next = 1
        front.engine.store(5)
        await until_right(front, index, subscriber)
        assert subscriber.counters["gaps"] == 1


async def test_b61_swapped_and_doubled_batches_do_no_harm(endpoint):
    front = Front()
    front.engine = FakeEngine(endpoint, faults=(0, 0.4, 0.4), seed=3)
    async with watched(front) as (index, subscriber):
        front.engine.store(1)
        await until_right(front, index, subscriber)
        deadline = time.monotonic() + PATIENCE_S
        while not (subscriber.counters["early"] and subscriber.counters["duplicates"]):
            assert time.monotonic() < deadline, subscriber.counters
            front.engine.store(2)
            await asyncio.sleep(0.005)
        await until_right(front, index, subscriber)


@pytest.mark.parametrize("seed", range(3))
async def test_b61_right_again_after_losses_of_every_kind(endpoint, seed):
    """Batches vanish, are swapped and doubled, the queue inside the engine overflows, the engine restarts; each time
    that it ends, everything is right soon after."""
    front = Front()
    front.engine = FakeEngine(endpoint, faults=(0.2, 0.2, 0.2), seed=seed, max_queued=8)
    rng = random.Random(seed)
    async with watched(front) as (index, subscriber):
        for life in range(2):
            for _ in range(3):
                for _ in range(rng.randrange(5, 40)):
                    choice = rng.random()
                    leaf = front.engine.leaf()
                    if choice < 0.5 or leaf is None:
                        front.engine.store(rng.randrange(1, 6), leaf if rng.random() < 0.5 else None)
                    elif choice < 0.98:
                        front.engine.remove(leaf)
                    else:
                        front.engine.clear()
                    if rng.random() < 0.3:
                        await asyncio.sleep(0.005)
                await until_right(front, index, subscriber)
            if not life:
                front.engine.close()
                front.engine = FakeEngine(endpoint, faults=(0.2, 0.2, 0.2), seed=seed + 100)
        deadline = time.monotonic() + PATIENCE_S
        while not subscriber.counters["gaps"]:  # where all came in a few batches, none of them may have been lost
            assert time.monotonic() < deadline
            front.engine.publisher.lose_next = 1
            front.engine.store(1)
            await until_right(front, index, subscriber)


@pytest.mark.parametrize("same_port", [True, False])
async def test_b61_a_restarted_engine_is_another_one(endpoint, same_port, tmp_path, monkeypatch):
    if same_port:  # it may take long to connect again
        monkeypatch.setattr(followers, "HUNG_UP_S", PATIENCE_S / 3)
    side = f"ipc://{tmp_path}/side" if same_port else "tcp://127.0.0.1:0"
    front = Front()
    front.engine = FakeEngine(endpoint, side)
    async with watched(front) as (index, subscriber):
        for _ in range(4):
            front.engine.store(3)
        await until_right(front, index, subscriber)
        front.engine.close()
        front.engine = FakeEngine(endpoint, side, seed=1)
        front.engine.store(2)
        await until_right(front, index, subscriber)
        assert subscriber.epoch == front.engine.announcer.epoch
        assert bool(subscriber.counters["restarts"]) is same_port


async def test_b61_what_an_engine_held_that_is_gone_is_forgotten(endpoint):
    front = Front()
    engine = front.engine = FakeEngine(endpoint)
    async with watched(front) as (index, subscriber):
        front.engine.store(3)
        await until_right(front, index, subscriber)
        front.engine = None
        engine.close()
        await becomes(lambda: not index.workers())
        assert not subscriber.connected and subscriber.load is None


async def test_a_snapshot_of_many_parts(endpoint):
    front = Front()
    front.engine = FakeEngine(endpoint)
    for _ in range(5):
        front.engine.store(m.PART_BLOCKS)
    async with watched(front) as (index, subscriber):
        await until_right(front, index, subscriber)
        assert 1 <= subscriber.counters["snapshots"] <= subscriber.counters["snapshots_asked"]


async def test_load_comes_on_change_and_not_more_often_than_promised(endpoint):
    front = Front()
    front.engine = FakeEngine(endpoint)
    told: list[m.EngineLoad] = []
    async with watched(front, on_load=lambda worker, load: told.append(load)) as (_, subscriber):
        while subscriber.load is None:
            await asyncio.sleep(0.01)
        del told[:]
        began = time.monotonic()
        for number in range(100):
            front.engine.load = m.EngineLoad(running=number + 1, total_blocks=1000)
            front.engine.sink.begin_step()
            await asyncio.sleep(0.005)
        while subscriber.load.running < 100:
            await asyncio.sleep(0.01)
        assert len(told) <= (time.monotonic() - began) / m.REPORT_MIN_S + 3
        assert subscriber.load_age_s < PATIENCE_S


async def test_b81_noise_on_the_side_socket_is_counted_and_dropped(endpoint):
    front = Front()
    front.engine = FakeEngine(endpoint)
    context = zmq.Context()
    noise = context.socket(zmq.DEALER)
    noise.setsockopt(zmq.LINGER, 0)
    noise.connect(front.engine.announcer.address)
    rng = random.Random(5)
    for _ in range(50):
        noise.send_multipart([rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 4))])
    noise.send(b"PE" + bytes((m.PROTOCOL + 1,)) + b"\x80")
    noise.send(m.encode(m.Subscribe())[:-1])
    async with watched(front) as (index, subscriber):
        front.engine.store(2)
        await until_right(front, index, subscriber)
        while sum(front.engine.announcer._side.counters.values()) < 52:
            await asyncio.sleep(0.01)
        assert not front.engine.announcer.counters["errors"]
    noise.close()
    context.term()


async def test_b81_noise_in_the_events_is_counted_and_dropped(endpoint):
    front = Front()
    front.engine = FakeEngine(endpoint)
    async with watched(front) as (index, subscriber):
        await until_subscribed(front, subscriber)
        await until_right(front, index, subscriber)
        socket = front.engine.publisher._socket
        for frames in ([b"", b"x"], [b"", bytes(8), b"\xff"], [b"", bytes(8), msgspec.msgpack.encode([1.0, [["No"]]])],
                       [b"", bytes(8), msgspec.msgpack.encode([1.0, [["BlockStored", [1, 2], None, [1], 4, None]]])]):
            socket.send_multipart([TOPIC.encode() + frames[0], *frames[1:]])
        while subscriber.counters["malformed"] < 2 or len(subscriber.unread) < 4:
            await asyncio.sleep(0.01)
        front.engine.store(2)
        await until_right(front, index, subscriber)
        assert not subscriber.counters["errors"]


async def test_b82_a_side_socket_with_a_key_tells_a_stranger_nothing(endpoint):
    public, secret = zmq.curve_keypair()
    front = Front()
    front.engine = FakeEngine(endpoint, keys=Keys(public, secret))
    front.engine.store(2)
    async with watched(front, keys=Keys(*zmq.curve_keypair())) as (index, stranger):
        await asyncio.sleep(0.7)
        assert stranger.state is not SubscriberState.LIVE and stranger.load is None and index.workers() == []
        async with aiohttp.ClientSession() as session:
            member = Subscriber(stranger.worker, index, session, keys=Keys(public, secret))
            await stranger.close()
            member.start()
            await until_right(front, index, member)
            await member.close()


async def test_an_engine_of_another_block_size_is_refused_and_the_reason_said(endpoint, caplog):
    front = Front()
    front.engine = FakeEngine(endpoint)
    front.engine.store(2)
    async with watched(front) as (index, subscriber):
        await until_right(front, index, subscriber)
        subscriber._index = subscriber.holdings._index = PrefixIndex(16)
        front.engine.store(1)
        while subscriber.state is not SubscriberState.SEARCHING:
            await asyncio.sleep(0.01)
        assert "block_size" in caplog.text and not subscriber.counters["errors"]
        subscriber._index = subscriber.holdings._index = index


@pytest.mark.parametrize("where", ["events", "side", "replay"])
async def test_b80_an_address_that_is_none_is_said(endpoint, caplog, where):
    index = PrefixIndex(BLOCK_SIZE)
    notice = EventsNotice(**{"events": endpoint, "block_size": 0, where: "nonsense"})
    subscriber = Subscriber("http://127.0.0.1:1", index, None, configured=notice)
    subscriber.start()
    await becomes(lambda: "nonsense" in caplog.text)
    await subscriber.close()
    assert not subscriber.counters["errors"]


@pytest.mark.skipif(not is_free("::1", 0), reason="no IPv6 here")
async def test_an_engine_on_ipv6():
    front = Front()
    front.engine = FakeEngine(f"tcp://[::1]:{take_free('127.0.0.1')}", "tcp://[::1]:0")
    async with watched(front) as (index, subscriber):
        front.engine.store(2)
        await until_right(front, index, subscriber)
        await until_subscribed(front, subscriber)


def test_wildcards_stand_for_the_host_that_was_asked():
    assert reach.seen_from("10.1.2.3", "tcp://*:5557") == "tcp://10.1.2.3:5557"
    assert reach.seen_from("10.1.2.3", "tcp://0.0.0.0:5557") == "tcp://10.1.2.3:5557"
    assert reach.seen_from("10.1.2.3", "tcp://127.0.0.1:1") == "tcp://127.0.0.1:1"
    assert reach.seen_from("10.1.2.3", "ipc:///tmp/x") == "ipc:///tmp/x"
    assert reach.seen_from("::1", "tcp://[::]:5") == "tcp://[::1]:5"


async def test_this_machine_is_told_from_others():
    assert await reach.is_here("127.0.0.1", 50) and await reach.is_here("localhost", 50)
    assert not await reach.is_here("192.0.2.1", 2) and not await reach.is_here("nonesuch.invalid", 2)


class Elsewhere(Subscriber):
    """Of an engine on another machine that says what one on this machine says."""

    async def _find(self) -> EventsNotice:
        return self.told


async def test_what_an_engine_elsewhere_keeps_to_its_machine_is_not_looked_for_on_this_one(endpoint, caplog):
    """Its side socket and its replay are at addresses that here are another engine's, or nobody's."""
    ours = FakeEngine(endpoint)
    ours.store(3)
    index = PrefixIndex(BLOCK_SIZE)
    subscriber = Elsewhere("http://192.0.2.1:8000", index, None)
    subscriber.told = EventsNotice(endpoint, BLOCK_SIZE, "tcp://127.0.0.1:1", TOPIC, ours.announcer.address, "e")
    try:
        for events in (endpoint, "tcp://192.0.2.1:5557"):
            subscriber.told = msgspec.structs.replace(subscriber.told, events=events)
            caplog.clear()
            subscriber.start()
            await becomes(lambda: "own machine only" in caplog.text)
            await asyncio.sleep(0.3)
            assert subscriber.load is None and not index.workers() and not subscriber.counters["snapshots_asked"]
            await subscriber.close()
        assert not subscriber.counters["errors"] and not subscriber.counters["strangers"]
    finally:
        ours.close()


async def test_another_engine_at_the_same_port_is_not_taken_for_this_one(endpoint, caplog):
    """The engine whose front end was asked is gone, and its port is somebody else's by now."""
    front = Front()
    other = FakeEngine(endpoint)
    other.store(3)
    front.engine = FakeEngine(endpoint + "2")
    ours, side = front.engine.notice, front.engine.announcer.address
    front.engine.notice = msgspec.structs.replace(ours, side=other.announcer.address)
    try:
        async with watched(front) as (index, subscriber):
            while not subscriber.counters["strangers"]:
                await asyncio.sleep(0.01)
            assert subscriber.load is None and not index.workers()
            front.engine.store(2)
            front.engine.notice = msgspec.structs.replace(ours, side=side)
            await until_right(front, index, subscriber)
    finally:
        other.close()


async def test_b61_an_engine_that_had_an_error_is_still_the_same(endpoint, monkeypatch):
    monkeypatch.setattr(followers, "LOST_S", PATIENCE_S)
    front = Front()
    engine = front.engine = FakeEngine(endpoint)
    async with watched(front) as (index, subscriber):
        engine.store(3)
        await until_right(front, index, subscriber)
        searches, publish = subscriber.counters["searches"], engine.announcer._publish

        def fail(events: list) -> None:
            engine.announcer._publish = publish
            raise RuntimeError("once")

        engine.announcer._publish = fail
        engine.store(2)
        await until_right(front, index, subscriber)
        assert engine.announcer.counters["errors"] == 1 and subscriber.counters["restarts"] == 1
        async with aiohttp.ClientSession() as session:  # one that comes now reads the old notice
            late = Subscriber(subscriber.worker, PrefixIndex(BLOCK_SIZE), session)
            late.start()
            await until_right(front, late._index, late)
            await late.close()
        assert not late.counters["strangers"] and subscriber.counters["searches"] == searches


async def test_a_load_that_cannot_be_read_leaves_the_events_alone(endpoint):
    front = Front()
    engine = front.engine = FakeEngine(endpoint)
    async with watched(front) as (index, subscriber):
        engine.store(2)
        await until_right(front, index, subscriber)
        failing, engine.load = engine.announcer._read_load, m.EngineLoad(running=7, total_blocks=1000)
        while subscriber.load.running != 7:
            await asyncio.sleep(0.01)
        engine.announcer._read_load = lambda: 1 // 0
        engine.store(2)
        while engine.announcer.counters["load_failed"] < 3:
            await asyncio.sleep(0.01)
        await until_right(front, index, subscriber)
        assert subscriber.load.running == 7 and subscriber.load_age_s < PATIENCE_S
        assert not engine.announcer.counters["errors"] and not subscriber.counters["restarts"]
        engine.announcer._read_load, engine.load = failing, m.EngineLoad(running=8)
        while subscriber.load.running != 8:
            await asyncio.sleep(0.01)


async def test_without_events_the_snapshots_do(endpoint, caplog, monkeypatch):
    """A publisher that connects to somebody instead of listening. What it says goes nowhere, least of all here."""
    monkeypatch.setattr(followers, "SNAPSHOT_RETRY_S", PATIENCE_S)  # one that is late is not asked for again
    front = Front()
    front.engine = FakeEngine(endpoint)
    front.engine.notice = msgspec.structs.replace(front.engine.notice, events="")
    async with watched(front) as (index, subscriber):
        front.engine.store(3)
        await until_right(front, index, subscriber)
        asked, began = subscriber.counters["snapshots_asked"], time.monotonic()
        while time.monotonic() - began < 1.5:
            front.engine.store(1)
            await asyncio.sleep(0.02)
        await until_right(front, index, subscriber)
        assert subscriber.counters["snapshots_asked"] - asked <= (time.monotonic() - began) / POLLED_S + 1
        assert "tcp://*:PORT" in caplog.text and not subscriber.counters["errors"]


async def test_an_engine_without_snapshots_reports_its_load(endpoint, monkeypatch):
    """As V1 with the plugin: each rank has an address of its own for it, and a router adds the ranks up."""
    front, seen = Front(), []
    front.engine = FakeEngine(endpoint)
    notice = front.engine.notice
    front.engine.notice = msgspec.structs.replace(notice, side=None, epoch=None, ranks=2,
                                                  loads=["tcp://127.0.0.1:1", notice.side])
    front.engine.load = m.EngineLoad(running=3, used_blocks=10, total_blocks=1000)
    async with watched(front, on_load=lambda worker, load: seen.append(load)) as (_, silent), \
            aiohttp.ClientSession() as session:
        spoken = Subscriber(silent.url, PrefixIndex(BLOCK_SIZE), session, rank=1, worker="second")
        spoken.start()
        await becomes(lambda: spoken.load == front.engine.load, lambda: spoken.counters)
        assert silent.load is None and not seen and spoken.load_age_s < PATIENCE_S
        assert load_of([spoken, silent]) == (None, math.inf) == load_of([])
        together, age_s = load_of([spoken, spoken])
        assert together == m.EngineLoad(running=6, used_blocks=20, total_blocks=2000) and age_s >= 0
        assert spoken.connected and silent.connected, "events do not need a load"
        monkeypatch.setattr(followers, "LOST_S", 2.0)
        since_s = time.monotonic()
        await becomes(lambda: spoken.load_age_s < time.monotonic() - since_s, lambda: spoken.counters)
        front.engine.close()  # it comes again, with a side socket elsewhere
        front.engine = FakeEngine(endpoint)
        front.engine.load = m.EngineLoad(running=1, total_blocks=1000)
        front.engine.notice = msgspec.structs.replace(front.engine.notice, side=None, epoch=None, ranks=2,
                                                      loads=["tcp://127.0.0.1:1", front.engine.notice.side])
        await becomes(lambda: spoken.load == front.engine.load, lambda: spoken.counters)
        await spoken.close()
        assert spoken.load is None


class ReplayingEngine:
    """One life of a V1 engine without load: its publisher's events and their replay, at ports of its own."""

    def __init__(self, first: int) -> None:
        self._context = zmq.asyncio.Context()
        self._events, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._events, self._replay)]
        self.notice = EventsNotice(f"tcp://127.0.0.1:{ports[0]}", BLOCK_SIZE, f"tcp://127.0.0.1:{ports[1]}", TOPIC)
        self.truth = [*range(first, first + 3)]
        self._batches = [msgspec.msgpack.encode(m.EventBatch(0.0, [
            m.BlockStored([number], None, [number] * BLOCK_SIZE, BLOCK_SIZE)])) for number in self.truth]
        self._task = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        while True:
            reader, *_, first = await self._replay.recv_multipart()
            for number in range(int.from_bytes(first, "big"), len(self._batches)):
                await self._replay.send_multipart([reader, b"", number.to_bytes(8, "big"), self._batches[number]])
            await self._replay.send_multipart([reader, b"", followers.END, b""])

    def close(self) -> None:
        self._task.cancel()
        self._context.destroy(linger=0)


@pytest.mark.parametrize("old_port", ["closed", "taken"])
async def test_b61_an_engine_without_a_load_that_restarts_at_other_ports_is_found_again(old_port):
    """Its old ports are nobody's, or those of an engine that has nothing to do with this front end."""
    front = Front()
    old = front.engine = ReplayingEngine(1)
    async with watched(front) as (index, subscriber):
        await until_right(front, index, subscriber)
        front.engine = ReplayingEngine(11)
        if old_port == "closed":
            old.close()
        else:
            old._batches[:] = front.engine._batches[:1]
        await until_right(front, index, subscriber)
        if old_port == "taken":
            old.close()
