# SPDX-License-Identifier: Apache-2.0
"""B67: KV events as the releases of vLLM from 0.9.2 to 0.33 write them, in the bytes of their own encoders
(`make_event_fixtures.py`)."""
import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.fakes.faulty_engine import serving
from tests.router.holding import with_index
from vllm_pd.events import reach
from vllm_pd.events.formats import BatchReader
from vllm_pd.router.events.followers import ReplayFollower
from vllm_pd.router.events.holdings import Holdings
from vllm_pd.router.events.subscriber import Subscriber
from vllm_pd.router.index import PrefixIndex
from vllm_pd.router.policy import Policy
from vllm_pd.rpc.codec import BadFrame

FIXTURES = json.loads(Path(__file__).with_name("event_fixtures.json").read_text())
TODAY = {name: bytes.fromhex(payload) for name, payload in FIXTURES["0.32.0"]["batches"].items()}
SIZE = 4
TOKENS = [*range(8)]


class Engine:
    """What comes from one engine's publisher, and the index that is fed with it."""

    def __init__(self) -> None:
        self.index = PrefixIndex(SIZE)
        self.unread: Counter[str] = Counter()
        self.reader = BatchReader(self.unread)
        self.holdings = Holdings(self.index, "w", self.reader.note)

    def feed(self, payload: bytes) -> None:
        for event in self.reader.read([b"", bytes(8), payload])[1].events:
            self.holdings.apply(event)

    def say(self, *events, rank: int = 0) -> None:
        self.feed(msgspec.msgpack.encode([1.0, list(events), rank]))

    def hits(self, tokens=TOKENS, lora=None) -> int:
        return self.index.matches(self.index.hashes(tokens, lora)).get("w", 0)


def releases(case: str) -> list[str]:
    return [version for version, found in FIXTURES.items() if case in found["batches"]]


def fed(version: str, *cases: str) -> Engine:
    engine = Engine()
    for case in cases:
        engine.feed(bytes.fromhex(FIXTURES[version]["batches"][case]))
    return engine


def each(case: str):
    found = releases(case)
    assert found
    return pytest.mark.parametrize("version", found)


def test_the_fixtures_are_of_every_format():
    assert {*FIXTURES} >= {"0.9.2", "0.11.0", "0.14.1", "0.17.1", "0.20.2", "0.23.0", "0.24.0", "0.27.1", "0.32.0",
                           "0.33.0"}


@each("stored")
def test_b67_what_is_stored_and_removed_is_read(version):
    engine = fed(version, "stored")
    assert engine.hits() == 2 and not engine.unread
    assert fed(version, "stored", "removed").hits() == 1
    assert fed(version, "stored", "cleared").hits() == 0
    assert not fed(version, "stored", "removed", "cleared").unread


@each("orphan")
def test_b67_a_block_with_an_unknown_parent_waits(version):
    engine = fed(version, "orphan", "stored")
    assert engine.hits([*range(12)]) == 2 and engine.index.sizes()["waiting"] == 1


@each("bytes")
def test_b67_hashes_may_be_bytes(version):
    engine = fed(version, "bytes")
    assert engine.hits([*range(12)]) == 3 and not engine.unread


@each("cpu")
def test_b67_a_block_in_the_hosts_memory_is_no_hit_and_its_end_removes_none(version):
    engine = fed(version, "cpu")
    assert engine.hits() == 2 and engine.index.blocks("w") == 2 and not engine.unread


@each("remote")
def test_b67_a_block_on_another_machine_is_no_hit(version):
    engine = fed(version, "remote")
    assert engine.hits([*range(8, 16)]) == 0 and engine.hits() == 2 and not engine.unread


@each("adapter")
def test_b67_adapters_go_by_their_name(version):
    engine = fed(version, "adapter")
    assert engine.hits(lora="ada") == 2 and engine.hits() == 0


@each("adapter_keys")
def test_b67_an_adapters_name_among_the_extra_keys_is_no_extra(version):
    engine = fed(version, "adapter_keys")
    assert engine.hits(lora="ada") == 2 and engine.hits() == 0


@each("adapter_id")
def test_b67_an_adapters_number_is_not_the_base_model(version):
    assert fed(version, "adapter_id").hits() == 0


@each("salt")
def test_b67_a_salted_prompt_is_no_hit_for_a_plain_one(version):
    engine = fed(version, "salt")
    assert engine.hits() == 0 and engine.index.blocks("w") == 2 and not engine.unread


@each("image")
def test_b67_a_block_of_an_image_is_no_hit_for_a_plain_one(version):
    assert fed(version, "image").hits() == 1


@each("salt")
def test_b67_a_block_with_extras_keeps_them_while_it_waits(version):
    engine = Engine()
    batch = msgspec.msgpack.decode(bytes.fromhex(FIXTURES[version]["batches"]["image"]))
    whole = engine.reader.read([b"", bytes(8), msgspec.msgpack.encode(batch)])[1].events[0]
    first, second = (type(whole)([whole.block_hashes[number]], [None, whole.block_hashes[0]][number],
                                 whole.token_ids[number * SIZE:(number + 1) * SIZE], SIZE,
                                 extra_keys=[whole.extra_keys[number]]) for number in (0, 1))
    for event in (second, first):
        engine.holdings.apply(event)
    assert engine.hits() == 1 and engine.index.blocks("w") == 2 and not engine.index.sizes()["waiting"]


@each("one_group")
def test_b67_one_group_is_no_hybrid_model(version):
    assert fed(version, "one_group").hits() == 2


@each("two_groups")
def test_b67_a_block_that_one_group_lacks_is_no_hit(version):
    engine = fed(version, "two_groups")
    assert engine.hits() == 0  # the sliding window's group has the second block only
    assert fed(version, "two_groups", "one_group").hits() == 0
    assert not fed(version, "two_groups", "group_removed").unread


def test_b67_a_block_that_all_groups_hold_is_a_hit_until_one_loses_it():
    engine = Engine()
    first = {"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": None, "token_ids": TOKENS,
             "block_size": SIZE, "group_idx": 0}
    engine.say(first, {**first, "group_idx": 1})
    assert engine.hits() == 0  # the second group was new: what was known is forgotten
    engine.say(first)
    assert engine.hits() == 2
    engine.say({"type": "BlockRemoved", "block_hashes": [12], "group_idx": 0})
    assert engine.hits() == 1
    engine.say({**first, "block_hashes": [12], "parent_block_hash": 11, "token_ids": TOKENS[4:]})
    assert engine.hits() == 2
    engine.say({"type": "BlockRemoved", "block_hashes": [11, 12], "group_idx": 1})
    engine.say({"type": "BlockRemoved", "block_hashes": [11, 12], "group_idx": 0})
    assert engine.hits() == 0 and not engine.holdings._held and not engine.holdings._blocks


def test_b67_a_group_with_blocks_of_another_size_is_left_out_and_that_is_said():
    engine = Engine()
    stored = {"type": "BlockStored", "block_hashes": [11], "parent_block_hash": None, "token_ids": TOKENS[:4],
              "block_size": SIZE, "group_idx": 0}
    engine.say(stored, {**stored, "block_hashes": [21], "token_ids": TOKENS, "block_size": 8, "group_idx": 1})
    assert engine.hits() == 1, "that of the other group"
    assert any("group 1" in reason and "8" in reason for reason in engine.unread)


def test_b67_a_block_that_a_hit_announced_again_is_gone_with_its_one_removal():
    """`kv_cache_report_mode` "full" of 0.27 and later."""
    engine = fed("0.33.0", "stored", "stored", "removed")
    assert engine.hits() == 1
    assert fed("0.9.2", "stored", "stored", "removed").hits() == 2  # where a block is told of twice there are two


@each("lookahead")
def test_b67_a_block_whose_hash_looks_ahead_needs_the_next_one(version):
    engine = fed(version, "lookahead")
    assert engine.hits([*range(8), 50, 51, 52, 53]) == 1  # [8, 9] followed the second block
    assert fed(version, "lookahead", "cleared").index.sizes()["names"] == 0


@each("session")
def test_b67_fields_that_say_nothing_here_are_skipped(version):
    assert fed(version, "session").hits() == 2


def test_b67_an_event_of_a_kind_to_come_is_named_and_the_others_of_its_batch_are_read():
    for new in (["BlockPinned", [1]], {"type": "BlockPinned", "block_hashes": [1]}):
        engine = fed("0.33.0", "stored")
        engine.say(new, {"type": "BlockRemoved", "block_hashes": [12]})
        assert engine.hits() == 1 and [*engine.unread] == ["an event of an unknown kind, 'BlockPinned'"]


@pytest.mark.parametrize("odd", [
    {"type": "BlockRemoved", "block_hashes": [{"digest": 1}]}, {"type": "BlockRemoved"}, ["BlockRemoved", "12"],
    {"type": "BlockStored", "block_hashes": [1]}, ["BlockStored", [1, 2], None, [1], 4, None], [], 7, {"kind": 1},
    {"type": "BlockStored", "block_hashes": [11], "parent_block_hash": None, "token_ids": TOKENS[:4], "block_size": 4,
     "extra_keys": [None, None]}])
def test_b67_after_an_event_that_cant_be_read_nothing_known_counts(odd):
    engine = fed("0.32.0", "stored")
    engine.say(odd)
    assert engine.hits() == 0 and len(engine.unread) == 1
    engine.feed(TODAY["stored"])
    assert engine.hits() == 2


def test_b67_reasons_are_bounded():
    engine = Engine()
    for number in range(100):
        engine.say({"type": f"Kind{number}" * 100})
    assert len(engine.unread) <= 17 and max(map(len, engine.unread)) <= 200


def test_b67_reasons_why_blocks_are_left_out_are_bounded_too():
    subscriber = Subscriber("http://127.0.0.1:1", PrefixIndex(SIZE), None)
    reader = BatchReader(subscriber.unread)
    for size in range(5, 105):
        stored = {"type": "BlockStored", "block_hashes": [size], "parent_block_hash": None,
                  "token_ids": [*range(size)], "block_size": size, "group_idx": 0}
        batch = msgspec.msgpack.encode([1.0, [stored], 0])
        for event in reader.read([b"", bytes(8), batch])[1].events:
            assert subscriber.holdings.apply(event)
    assert sum(subscriber.unread.values()) == 100 and len(subscriber.unread) <= 17


def test_b67_two_ranks_in_one_stream_are_refused():
    """Each rank numbers its batches by itself."""
    engine = fed("0.32.0", "stored")
    with pytest.raises(BadFrame, match="data-parallel ranks 0 and 3"):
        engine.feed(bytes.fromhex(FIXTURES["0.32.0"]["batches"]["rank_3"]))
    assert engine.unread and fed("0.32.0", "rank_3").hits() == 2


class _Replay:
    def __init__(self, frames: list[list[bytes]]) -> None:
        self.frames = frames

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.frames:
            raise zmq.Again
        return self.frames.pop(0)

    def send_multipart(self, frames, flags: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("version", FIXTURES)
def test_b67_replays_are_read_with_the_topic_and_without(version):
    class Target:
        batches: list = []

        def apply(self, batches) -> None:
            self.batches = [*self.batches, *batches]

        def clear(self) -> None:
            pass

    target, counters = Target(), Counter()
    replay = _Replay([[bytes.fromhex(frame) for frame in frames] for frames in FIXTURES[version]["replay"]])
    follower = ReplayFollower(lambda: replay, target, counters, 0.0)
    follower.turn(0.0)
    follower.turn(0.01)
    assert follower.live and [batch.events[0].block_hashes for batch in target.batches] == [[11, 12]], counters


def test_b67_the_publisher_of_a_rank_is_at_the_port_and_its_rank():
    assert reach.of_rank("tcp://*:5557", 3) == "tcp://*:5560" and reach.of_rank("tcp://*:5557", 0) == "tcp://*:5557"


class Publisher:
    """Of one rank, with the bytes of a release."""

    def __init__(self, context: zmq.Context) -> None:
        self.socket = context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._numbers = itertools.count()

    def send(self, payload: bytes) -> None:
        self.socket.send_multipart([b"", next(self._numbers).to_bytes(8, "big"), payload])


async def until_heard(served, engine, publishers, payload: bytes) -> None:
    """A subscription takes a while to stand."""
    index = with_index(served.router.placer, SIZE)
    names = [engine.url, *(f"{engine.url}#{rank}" for rank in range(1, len(publishers)))]
    async with asyncio.timeout(60):
        while not all(index.blocks(name) for name in names):
            for publisher, name in zip(publishers, names, strict=True):
                if not index.blocks(name):
                    publisher.send(payload)
            await asyncio.sleep(0.05)


async def asked(served, tokens) -> str:
    answer = await served.ask(prompt=tokens, headers={"x-vllm-pd-explain": "1"})
    return answer.headers["x-vllm-pd-explain"].partition("hit=")[2].split(";")[0]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


async def test_b67_the_router_goes_by_the_events_of_todays_vllm(context):
    publisher = Publisher(context)
    async with serving(2, Policy.KV, events=(publisher.endpoint,), block_size=SIZE) as (served, [engine, _]):
        await until_heard(served, engine, [publisher], TODAY["stored"])
        assert await asked(served, [*range(10)]) == "2/2"


async def test_b67_what_cant_be_read_is_said_once_in_the_log_and_in_workers(context, caplog):
    publisher = Publisher(context)
    async with serving(1, Policy.KV, events=(publisher.endpoint,), block_size=SIZE) as (served, [engine]):
        await until_heard(served, engine, [publisher], TODAY["stored"])
        for _ in range(3):
            publisher.send(msgspec.msgpack.encode([time.time(), [{"type": "BlockPinned"}], 0]))
        subscriptions = served.router.subscriptions
        await served.until(lambda: sum(subscriptions.as_json()[engine.url]["unread"].values()) == 3)
        shown = (await served.ask(path="/workers", method="GET")).json["workers"][0]["events"]
        assert shown["unread"] == {"an event of an unknown kind, 'BlockPinned'": 3}
        await served.until(lambda: "BlockPinned" in caplog.text)
        assert caplog.text.count("BlockPinned") == 1


async def test_b67_a_rank_that_begins_anew_leaves_the_others_events_alone(context):
    ranks = [Publisher(context), Publisher(context)]
    async with serving(1, Policy.KV, events=([rank.endpoint for rank in ranks],)) as (served, [engine]):
        await until_heard(served, engine, ranks, TODAY["stored"])
        index, names = with_index(served.router.placer, SIZE), (engine.url, f"{engine.url}#1")
        first, second = served.router.subscriptions._subscribers[engine.url]
        await first.close()
        assert index.blocks(names[0]) == 0 and index.blocks(names[1]) == 2
        ranks[1].send(TODAY["removed"])
        await served.until(lambda: second.counters["blocks_removed"])
        assert index.blocks(names[1]) == 1


async def test_b67_what_only_one_data_parallel_rank_holds_is_no_hit(context):
    """The engine's own front end chooses the rank."""
    ranks = [Publisher(context), Publisher(context)]
    async with serving(2, Policy.KV, events=([rank.endpoint for rank in ranks],),
                       block_size=SIZE) as (served, [engine, other]):
        await until_heard(served, engine, ranks, TODAY["stored"])
        served.worker(other).pause(1000.0)  # nothing is sent there, and so nothing is expected there
        assert await asked(served, [*range(8)]) == "2/2"
        index = with_index(served.router.placer, SIZE)
        ranks[1].send(TODAY["removed"])
        await served.until(lambda: index.blocks(f"{engine.url}#1") == 1)
        assert await asked(served, [*range(8)]) == "1/2"
        shown = (await served.ask(path="/workers", method="GET")).json["workers"]
        assert shown[0]["events"]["ranks"] == 2
        served.router._membership.remove(engine.url)
        await served.until(lambda: not index.workers())
