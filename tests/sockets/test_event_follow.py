# SPDX-License-Identifier: Apache-2.0
"""What a subscriber does in one piece: little, for the event loop is everybody's."""

import asyncio
import collections
from collections import Counter
from collections.abc import Collection
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from vllm_pd.events import messages as m
from vllm_pd.events.notice import EventsNotice
from vllm_pd.router.events import followers, stream, subscriber
from vllm_pd.router.events.followers import ReplayFollower, SideFollower
from vllm_pd.router.events.subscriber import Subscriber
from vllm_pd.router.index import PrefixIndex

MANY = 100


class Wire:
    """A socket that has everything at once."""

    def __init__(self) -> None:
        self.messages: collections.deque[list[bytes]] = collections.deque()
        self.sent: list[list[bytes]] = []

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.messages:
            raise zmq.Again
        return self.messages.popleft()

    def send_multipart(self, frames, flags: int) -> None:
        self.sent.append(frames)

    def close(self) -> None:
        pass


class Told:
    """A target that writes down what it is told."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.replaced = 0

    def apply(self, batches: list[m.EventBatch]) -> None:
        self.stored += [batch.events[0].block_hashes[0] for batch in batches]

    def clear(self) -> None:
        self.stored.clear()

    def replace(self, blocks, then) -> None:
        self.replaced = len(list(blocks))
        then()

    def reported(self, report: m.EngineReport) -> None:
        pass


def batch_of(number: int) -> m.EventBatch:
    return m.EventBatch(0.0, [m.BlockStored([number], None, [number] * 4, 4)])


def replayed(number: int) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch_of(number))]


def answer(wire: Wire, count: int, lost: Collection[int] = ()) -> None:
    """Answer replay requests as a publisher of `count` batches that no longer has those in `lost`."""
    while wire.sent:
        first = int.from_bytes(wire.sent.pop()[-1], "big")
        wire.messages += [replayed(number) for number in range(first, count) if number not in lost]
        wire.messages.append([b"", followers.END, b""])


def test_a_snapshot_is_read_in_slices():
    wire, told = Wire(), Told()
    follower = SideFollower(wire, told, Counter(), 0.0)
    wire.messages.append([m.encode(m.EngineReport("e", 5, 4, m.EngineLoad()))])
    follower.turn(0.0)
    wire.messages += [[m.encode(m.SnapshotPart(1, "e", 5, number, MANY, batch_of(number).events))]
                      for number in range(MANY)]
    turns = 0
    while not follower.live:
        before = len(wire.messages)
        follower.turn(0.0)
        assert before - len(wire.messages) <= followers.MESSAGES_A_TURN
        assert follower.more is bool(wire.messages) or follower.live
        turns += 1
    assert told.replaced == MANY and turns >= MANY / followers.MESSAGES_A_TURN


def test_b61_an_engine_that_is_slow_with_its_snapshot_is_waited_for():
    """It answers each request, in order, 3 s after that; an answer to any but the last one is of no use."""
    wire, told, counters, now = Wire(), Told(), Counter(), 0.0
    follower = SideFollower(wire, told, counters, now)
    answers: list[tuple[float, int]] = []
    while not follower.live and now < 60.0:
        wire.messages.append([m.encode(m.EngineReport("e", 5, 4, m.EngineLoad()))])
        while answers and answers[0][0] <= now:
            number = answers.pop(0)[1]
            wire.messages.append([m.encode(m.SnapshotPart(number, "e", 5, 0, 1, batch_of(1).events))])
        follower.turn(now)
        requests = [message for [frame] in wire.sent if isinstance(message := m.decode([frame]), m.SnapshotRequest)]
        answers += [(now + 3.0, request.number) for request in requests]
        wire.sent.clear()
        now += 0.1
    assert follower.live and now < 12.0 and counters["snapshots_asked"] <= 6


def test_a_replay_is_read_in_slices():
    wire, told = Wire(), Told()
    follower = ReplayFollower(lambda: wire, told, Counter(), 0.0)
    follower.turn(0.0)
    wire.messages += [*map(replayed, range(MANY)), [b"", followers.END, b""]]
    while not follower.live:
        before = len(wire.messages)
        follower.turn(0.0)
        assert before - len(wire.messages) <= followers.MESSAGES_A_TURN
        assert follower.more or follower.live
    assert told.stored == list(range(MANY))


def test_b61_what_came_while_the_replay_was_asked_for_stands_before_what_only_the_replay_has():
    wire, told = Wire(), Told()
    follower = ReplayFollower(lambda: wire, told, Counter(), 0.0)
    follower.turn(0.0)
    for number in range(2):
        follower.batch(0.01, [b"", *replayed(number)[1:]])
    wire.messages += [*map(replayed, range(4)), [b"", followers.END, b""]]
    follower.turn(0.02)
    assert told.stored == [0, 1, 2, 3]


@pytest.mark.parametrize("known, came", [(0, range(18, 20)), (4, range(5, 20))])
def test_b61_batches_that_come_while_many_others_are_replayed_are_no_restart(known, came, monkeypatch):
    """More than are remembered: in the first replay, or where a gap is filled."""
    monkeypatch.setattr(stream, "REMEMBERED", 4)
    wire, told, counters, now = Wire(), Told(), Counter(), 0.0
    follower = ReplayFollower(lambda: wire, told, counters, now)
    follower.turn(now)
    if known:
        answer(wire, known)
        follower.turn(now)
    for number in came:
        follower.batch(now + 0.01, [b"", *replayed(number)[1:]])
    while now < 2.0:
        now += 0.1
        answer(wire, 20)
        follower.turn(now)
    assert follower.live and told.stored == list(range(20)) and counters["replays_check"]
    assert not counters["restarts"] and counters["replays_begin"] == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_b61_a_gap_is_not_filled_from_another_life_of_the_engine(restarted):
    """The engine has restarted while this process was suspended, so its numbers have passed the last one known here."""
    wire, told, counters, now = Wire(), Told(), Counter(), 0.0
    follower = ReplayFollower(lambda: wire, told, counters, now)
    published = list(range(3))
    while now < 1.0:
        while wire.sent:
            first = int.from_bytes(wire.sent.pop()[-1], "big")
            wire.messages += [[b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch_of(value))]
                              for number, value in enumerate(published) if number >= first]
            wire.messages.append([b"", followers.END, b""])
        follower.turn(now)
        now += 0.01
        if now > 0.1 and len(published) == 3:
            published = [100 * restarted + number for number in range(6)]
            follower.batch(now, [b"", (5).to_bytes(8, "big"), msgspec.msgpack.encode(batch_of(published[5]))])
    assert follower.live and told.stored == published and counters["gaps"] == 1
    assert counters["restarts"] == restarted and counters["replays_begin"] == 1 + restarted


@pytest.mark.parametrize("first, count", [(0, 3), (0, 3 * stream.REMEMBERED), (500, 3)])
def test_b61_a_restart_is_noticed_without_a_replay_however_long_the_engine_has_lived(first, count):
    told, counters, now = Told(), Counter(), 0.0
    follower = ReplayFollower(None, told, counters, now)
    for value, number in [*((number, number) for number in range(first, first + count)),
                          *((10**6 + number, number) for number in range(3))]:
        now += 2 * stream.REORDER_S
        follower.batch(now, [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch_of(value))])
        follower.turn(now)
    assert told.stored == [10**6, 10**6 + 1, 10**6 + 2] and counters["restarts"] == 1


@pytest.mark.parametrize("kept", [(), (7,), (6, 8)])
@pytest.mark.parametrize("subscribed", [False, True])
@pytest.mark.parametrize("unanswered", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_b61_a_replay_that_is_too_long_for_its_publishers_queue_is_read_part_by_part(kept, subscribed, unanswered,
                                                                                     ended, monkeypatch):
    """A ZeroMQ ROUTER drops what its queue has no room for: here all after the first 5 messages of an answer but those
    in `kept`, and perhaps the end. Every second answer may be lost as a whole."""
    monkeypatch.setattr(stream, "MAX_AHEAD", 8)
    wire, told, counters, now = Wire(), Told(), Counter(), 0.0
    follower = ReplayFollower(lambda: wire, told, counters, now)
    count, requests = 30, 0
    while now < 40.0:
        while wire.sent:
            first = int.from_bytes(wire.sent.pop()[-1], "big")
            answer = [*map(replayed, range(first, count)), [b"", followers.END, b""]]
            requests += 1
            if not unanswered or requests % 2 or requests > 10:
                wire.messages += [one for number, one in enumerate(answer)
                                  if number < 5 or number in kept or ended and one[1] == followers.END]
        follower.turn(now)
        now += 0.01
        if subscribed and 0.1 < now < 3.0 and int(now * 100) % 10 == 0:
            follower.batch(now, [b"", *replayed(count)[1:]])
            count += 1
    assert follower.live and told.stored == list(range(count))
    assert counters["replays_begin"] == 1 and bool(counters["replays_cut"]) is not ended
    assert bool(counters["replays_unanswered"]) is unanswered and not counters["incomplete"]


def test_b61_no_more_of_a_replay_is_kept_than_fits_and_the_rest_is_read_after_it(monkeypatch):
    monkeypatch.setattr(followers, "MAX_REPLAY_BYTES", 3 * len(replayed(0)[2]))
    wire, told, counters, now = Wire(), Told(), Counter(), 0.0
    follower = ReplayFollower(lambda: wire, told, counters, now)
    while now < 3.0:
        if wire.sent:
            wire.messages.clear()
        answer(wire, MANY)
        follower.turn(now)
        assert follower._replay is None or len(follower._replay.batches) <= 4
        now += 0.01
    assert follower.live and told.stored == list(range(MANY)) and counters["replays_cut"] > 20


def test_b61_no_more_of_a_snapshot_is_kept_than_an_engine_can_hold(monkeypatch):
    monkeypatch.setattr(followers, "MAX_SNAPSHOT_TOKENS", 8)
    wire, told = Wire(), Told()
    follower = SideFollower(wire, told, Counter(), 0.0)
    for message in (m.EngineReport("e", 5, 4, m.EngineLoad()),
                    *(m.SnapshotPart(1, "e", 5, number, 3, batch_of(number).events) for number in range(3))):
        wire.messages.append([m.encode(message)])
        follower.turn(0.0)
    assert not follower.live and len(follower._runs) == 2 and not told.replaced


@pytest.mark.parametrize("runs", [(), (m.BlockStored([], None, [], 4), )], ids=["none", "empty"])
def test_b61_a_part_of_a_snapshot_without_blocks_is_not_used(runs):
    """Any number of them could be kept, and be waited for."""
    wire, counters = Wire(), Counter()
    follower = SideFollower(wire, Told(), counters, 0.0)
    for message in (m.EngineReport("e", 5, 4, m.EngineLoad()), m.SnapshotPart(1, "e", 5, 0, 3, list(runs))):
        wire.messages.append([m.encode(message)])
        follower.turn(0.0)
    assert not follower._runs and counters["snapshot_parts_unused"] == 1


@pytest.mark.parametrize("lost", [{0}, {7}, {5, 9}])
def test_b61_what_the_publisher_itself_has_lost_is_not_waited_for(lost):
    """What is known from before can't be trusted then."""
    wire, told, counters, now = Wire(), Told(), Counter(), 0.0
    follower = ReplayFollower(lambda: wire, told, counters, now)
    while now < 3.0:
        answer(wire, 12, lost)
        follower.turn(now)
        now += 0.01
    assert follower.live and told.stored == list(range(max(lost) + 1, 12))
    assert counters["replays_begin"] == 1 and counters["replays_fill"] <= 1 and not counters["restarts"]


async def test_others_have_the_loop_between_two_batches(monkeypatch):
    monkeypatch.setattr(subscriber, "SLICE_S", 0.0)
    index = PrefixIndex(4)
    one = Subscriber("http://127.0.0.1:1", index, None)
    one.apply([batch_of(number) for number in range(MANY)])
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count())
    await one._apply_batches()
    task.cancel()
    assert len(index.engine_hashes(one.worker)) == MANY and turns >= MANY / 2


@pytest.mark.parametrize("what", ["cleared", "replaced"])
async def test_what_is_void_is_not_applied(what):
    index = PrefixIndex(4)
    one = Subscriber("http://127.0.0.1:1", index, None)
    one.apply([batch_of(1)])
    if what == "cleared":
        one.clear()
    else:
        one.replace(iter(()), lambda: None)
    one.apply([batch_of(2)])
    await one._apply_batches()
    assert set(index.engine_hashes(one.worker)) == {2}


async def test_warnings_that_alternate_are_logged_once_until_all_was_well_for_a_time(caplog, monkeypatch):
    one = Subscriber("http://127.0.0.1:1", PrefixIndex(4), None)
    live = SimpleNamespace(live=True, turn=lambda now: None)
    for _ in range(3):
        one._warn("first")
        one._warn("second")
        await one._turn(None, live)
    assert [record.args[1] for record in caplog.records] == ["first", "second"]
    monkeypatch.setattr(subscriber, "QUIET_S", -1.0)
    await one._turn(None, live)
    for number in range(2 * subscriber.MAX_WARNINGS):
        one._warn("first" if not number else str(number))
    assert len(caplog.records) == 2 + subscriber.MAX_WARNINGS and caplog.records[2].args[1] == "first"


async def test_subscribers_share_one_context_and_leave_none(tmp_path):
    index = PrefixIndex(4)
    many = [Subscriber(f"http://127.0.0.1:{number}", index, None, configured=EventsNotice(
        f"ipc://{tmp_path}/{number}", 0, f"ipc://{tmp_path}/{number}r")) for number in range(1, 5)]
    for one in many:
        one.start()
    while not all(one.counters["replays_begin"] for one in many):
        await asyncio.sleep(0.01)
    assert len(subscriber._contexts) == 1
    for one in many[:-1]:
        await one.close()
    [(context, _)] = subscriber._contexts.values()
    assert not context.closed
    await many[-1].close()
    assert context.closed and not subscriber._contexts


def test_nothing_is_awaited_of_an_engine_that_is_at_rest():
    wire = Wire()
    follower = SideFollower(wire, Told(), Counter(), 0.0)
    assert follower.waits
    for message in (m.EngineReport("e", 1, 4, m.EngineLoad()), m.SnapshotPart(1, "e", 1, 0, 0, [])):
        wire.messages.append([m.encode(message)])
        follower.turn(0.0)
    assert not follower.waits
    follower.batch(0.1, [b"", *replayed(2)[1:]])  # number 1 is missing
    assert follower.waits
    follower.batch(0.1, [b"", *replayed(1)[1:]])
    assert not follower.waits
    wire.messages.append([m.encode(m.EngineReport("e", 5, 4, m.EngineLoad()))])
    follower.turn(0.2)
    assert follower.waits
    follower.batch(0.2, [b"", *replayed(3)[1:]])
    follower.batch(0.2, [b"", *replayed(4)[1:]])
    follower.turn(0.2)
    assert not follower.waits
    follower.hung_up(0.3)
    assert follower.waits
