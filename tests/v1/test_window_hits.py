# SPDX-License-Identifier: Apache-2.0
"""B69: the router's index finds the prefix hit that V1's own coordinator finds, where some KV cache groups need only
the last blocks before a position (sliding windows, recurrent states): the rule by itself, and the index that is fed
with the events of V1's real scheduler."""
import collections
import random
from collections.abc import Callable, Iterator

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.request import Request

from tests.v1.simulated import BLOCK_SIZE, Engine, answer
from tests.v1.states import StateEngine
from tests.v1.windows import WindowEngine
from vllm_pd.events.formats import BatchReader, reach_of
from vllm_pd.protocol.rows import STATE
from vllm_pd.router import index as index_module
from vllm_pd.router.events import holdings as holdings_module
from vllm_pd.router.events.holdings import Holdings
from vllm_pd.router.index import PrefixIndex
from vllm_pd.router.windows import longest_hits

WINDOW = 40
BLOCKS = 14  # of a prompt
GROUPS = [(0, WINDOW), (WINDOW, 0), (WINDOW, 0, 23), (23, 0, WINDOW, 23), (0, 0, BLOCK_SIZE), (0, BLOCK_SIZE + 1),
          (0, BLOCK_SIZE + 2), (0, 1), (0, 1000), (0, STATE), (STATE, 0, STATE)]
EVENT_GROUPS = [(0, WINDOW), (WINDOW, 0), (WINDOW, 0, 23), (WINDOW, 0, WINDOW)]


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")


def make(folder, windows: tuple[int, ...], **more) -> WindowEngine:
    return (StateEngine if STATE in windows else WindowEngine)(folder, windows=windows, **more)


def request_of_tokens(engine: Engine, tokens: list[int]) -> Request:
    return Request(request_id="looked up", prompt_token_ids=tokens, sampling_params=SamplingParams(max_tokens=1),
                   pooling_params=None, block_hasher=engine.hasher)


def hit_of(engine: Engine, tokens: list[int]) -> int:
    """What V1's coordinator finds, in blocks."""
    hashes = request_of_tokens(engine, tokens).block_hashes
    return engine.manager.coordinator.find_longest_cache_hit(hashes, len(hashes) * BLOCK_SIZE)[1] // BLOCK_SIZE


# The rule.


def reaches_of(engine: WindowEngine) -> dict[int, int | None]:
    """Of each group, from what its events say."""
    found = {}
    for group, (kind, window) in enumerate(engine.manager.kv_cache_event_metadata):
        event = BlockStored(block_hashes=[], parent_block_hash=None, token_ids=[], block_size=BLOCK_SIZE, lora_id=None,
                            medium="GPU", lora_name=None, group_idx=group, kv_cache_spec_kind=kind,
                            kv_cache_spec_sliding_window=window)
        [read] = BatchReader(collections.Counter()).read(
            [b"", bytes(8), msgspec.msgpack.encode([0.0, [event], 0])])[1].events
        found[group] = reach_of(read)
    return found


def compare(engine: WindowEngine, rule: Callable, seed: int) -> tuple[int, int]:
    """The rule beside V1's coordinator, for random contents of the cache. Returns how many hits there were, and how
    many of them were shorter than what the groups with full attention hold. Raises AssertionError."""
    rng, reaches = random.Random(seed), reaches_of(engine)
    assert [reach is None for reach in reaches.values()] == [window == 0 for window in engine.windows]
    tokens = list(range(BLOCKS * BLOCK_SIZE))
    hashes = list(request_of_tokens(engine, tokens).block_hashes)
    hits = shortened = 0
    for _ in range(300):
        share, gaps = rng.choice([0.5, 0.8, 0.97]), rng.random() < 0.3
        held = {group: {number for number in range(BLOCKS) if rng.random() < (share if reach or gaps else 0.98)}
                for group, reach in reaches.items()}
        present = {(hashes[number], group) for group, numbers in held.items() for number in numbers}
        engine.pool.get_cached_block = lambda block_hash, groups, present=present: (
            [engine.pool.blocks[1]] * len(groups) if all((block_hash, group) in present for group in groups) else None)
        asked = rng.randint(1, BLOCKS)
        right = hit_of(engine, tokens[:asked * BLOCK_SIZE])
        length = next((number for number in range(asked) if any(reach is None and number not in held[group]
                                                                for group, reach in reaches.items())), asked)

        def lacks(number: int, reach: int, held: dict = held) -> int:
            return int(any(one == reach and number not in held[group] for group, one in reaches.items()))

        found = rule({length: 1}, {reach for reach in reaches.values() if reach is not None}, lacks) if length else {}
        assert found in ({right: 1}, {}) and bool(found) == bool(right), (seed, asked, held, found, right)
        hits, shortened = hits + bool(right), shortened + (0 < right < length)
    return hits, shortened


@pytest.mark.parametrize("windows", GROUPS)
def test_b69_the_rule_is_v1s(model_folder, windows):
    hits, shortened = compare(make(model_folder, windows), longest_hits, 1)
    assert hits > 50 and shortened > 10 or windows == (0, 1000)


WRONG = {
    "a block more": lambda lengths, reaches, lacks: longest_hits(
        lengths, [reach + 1 for reach in reaches], lambda number, reach: lacks(number, reach - 1)),
    "a block less": lambda lengths, reaches, lacks: longest_hits(
        lengths, [reach - 1 for reach in reaches], lambda number, reach: lacks(number, reach + 1)),
    "whole groups only": lambda lengths, reaches, lacks: lengths,
    "all blocks": lambda lengths, reaches, lacks: longest_hits(
        lengths, [1000 + reach for reach in reaches], lambda number, reach: lacks(number, reach - 1000)),
}


@pytest.mark.parametrize("name", WRONG)
def test_b69_a_wrong_rule_is_found_beside_v1(model_folder, name):
    with pytest.raises(AssertionError):
        compare(make(model_folder, (WINDOW, 0, 23)), WRONG[name], 1)


# Events.


class Reader:
    """Reads an engine's events as the router does, and feeds an index."""

    def __init__(self, engine: WindowEngine) -> None:
        self.engine = engine
        self.index = PrefixIndex(BLOCK_SIZE)
        self.unread: collections.Counter[str] = collections.Counter()
        self._batches = BatchReader(self.unread)
        self.holdings = Holdings(self.index, "d", self.unread.update)
        self.events: collections.Counter[str] = collections.Counter()
        self.lost: set[tuple[int, int]] = set()  # what the engine holds, and the index can't know any more: hash, group
        engine.pool.enable_kv_cache_events = engine.manager.enable_kv_cache_events = True
        engine.scheduler.kv_event_publisher = self

    def publish(self, batch) -> None:
        """In the place of V1's publisher."""
        self.events.update(type(event).__name__ for event in batch.events)
        for event in self._batches.read([b"", bytes(8), msgspec.msgpack.encode(batch)])[1].events:
            assert self.holdings.apply(event)
        self._note_lost(batch.events)

    def shutdown(self) -> None:
        """As V1's publisher."""

    def flush(self) -> None:
        """What V1 would publish with its next step."""
        if events := self.engine.manager.take_events():
            self.publish(KVEventBatch(ts=0.0, events=events))

    def hit(self, tokens: list[int]) -> int:
        """By the index, in blocks."""
        self.flush()
        return self.index.matches(self.index.hashes(tokens)).get("d", 0)

    def check(self, tokens: list[int]) -> tuple[int, int]:
        """The index's hit is V1's, or shorter where V1 has removed one of two equal blocks. Returns both."""
        found, right = self.hit(tokens), hit_of(self.engine, tokens)
        hashes = {maybe_convert_block_hash(one) for one in request_of_tokens(self.engine, tokens).block_hashes}
        if any(block_hash in hashes for block_hash, _ in self.lost):
            assert found <= right, (found, right)
        else:
            assert found == right, (found, right)
        return found, right

    def _note_lost(self, events: list) -> None:
        held = {(maybe_convert_block_hash(get_block_hash(key)), get_group_id(key))
                for key in self.engine.pool.cached_block_hash_to_block._cache}
        for event in events:
            blocks = {(block_hash, event.group_idx) for block_hash in event.block_hashes}
            if isinstance(event, BlockRemoved):
                if not self.engine.windows[event.group_idx]:  # the marks of other groups end with the block
                    blocks |= {(block_hash, group) for block_hash, _ in blocks
                               for group in range(len(self.engine.windows))}
                self.lost |= blocks
            else:
                self.lost -= blocks
        self.lost &= held


def hand_over(engine: WindowEngine, name: str, prompt: list[int], tokens: int = 4) -> list[int]:
    """From its coming to its end, at D. Returns what comes next in the conversation."""
    engine.add(name, prompt, tokens)
    engine.run()
    engine.prefilled(name)
    engine.run()
    assert engine.outputs[name] == answer(prompt, tokens)
    return [*prompt, *engine.outputs[name]]


def conversation(engine: WindowEngine, reader: Reader, turns: int = 5) -> Iterator[tuple[int, int]]:
    """For each turn after the first: the hit by the index, and that of the job that D has made then, in blocks. An
    answer fills the prompt's last block: before that V1 itself finds no hit, as D got only what the next token
    reads."""
    history = [3 * at % 4000 + 1 for at in range(5 * WINDOW)]
    for turn in range(turns):
        history += [(7 * turn + at) % 4000 + 1 for at in range(2 * BLOCK_SIZE)]
        found = reader.hit(history)
        history = hand_over(engine, f"turn {turn}", history, BLOCK_SIZE + 4)
        if turn:
            yield found, engine.protocol.jobs[engine.attempt(f"turn {turn}")][2]


@pytest.mark.parametrize("windows", EVENT_GROUPS)
def test_b69_after_a_hand_over_the_index_finds_the_hit_that_d_has(model_folder, windows):
    """Prompts far longer than the window."""
    engine = make(model_folder, windows, blocks=400)
    reader = Reader(engine)
    found = list(conversation(engine, reader))
    assert all(ours == theirs > 5 * WINDOW // BLOCK_SIZE for ours, theirs in found), found
    assert not reader.unread and not reader.lost and not reader.index.sizes()["unnamed"]
    engine.check_at_rest()


def test_b69_without_what_the_events_say_of_groups_the_index_finds_no_hit(model_folder, monkeypatch):
    """As of publishers that say no kinds: a block counts while all groups hold it."""
    monkeypatch.setattr(holdings_module, "reach_of", lambda run: None)
    engine = make(model_folder, (0, WINDOW), blocks=400)
    found = list(conversation(engine, Reader(engine)))
    assert all(ours == 0 < theirs for ours, theirs in found), found


def history(folder, windows: tuple[int, ...], seed: int, steps: int = 25) -> collections.Counter:
    """Hand-overs and jobs of prompts that share beginnings, on an engine with few blocks. After each, the index's hit
    of every prompt is compared with V1's. Returns counts. Raises AssertionError."""
    rng = random.Random(seed)
    engine = make(folder, windows, blocks=rng.choice([60, 90, 140]))
    reader = Reader(engine)
    known: list[list[int]] = []
    counts: collections.Counter = collections.Counter()
    for step in range(steps):
        base = rng.choice(known[-6:]) if known and rng.random() < 0.8 else []
        prompt = base[:rng.randint(0, len(base))] + rng.choices(range(1, 4000), k=rng.randint(BLOCK_SIZE + 2, 60))
        prompt = prompt[:180]
        if rng.random() < 0.6:
            known.append(hand_over(engine, f"r{step}", prompt))
        else:
            attempt = engine.job(prompt, 0, step)
            engine.run()
            engine.transfer.end(str(attempt))
            engine.run()
            known.append(prompt)
        for tokens in known[-8:]:
            for cut in (len(tokens), rng.randint(BLOCK_SIZE, len(tokens))):
                found, right = reader.check(tokens[:cut])
                counts.update(hits=bool(right), equal=found == right, looked=1,
                              shortened=right < reader.index.beginnings(reader.index.hashes(tokens[:cut])).get("d", 0))
    counts.update(reader.events)
    assert not reader.unread
    engine.check_at_rest()
    return counts


@pytest.mark.parametrize("windows", EVENT_GROUPS)
def test_b69_random_histories_of_v1s_scheduler(model_folder, windows):
    counts = sum((history(model_folder, windows, seed) for seed in range(6)), collections.Counter())
    assert counts["hits"] > 100 and counts["shortened"] > 20 and counts["BlockRemoved"] > 100, counts
    assert counts["equal"] > 0.8 * counts["looked"], counts


@pytest.mark.parametrize("name", WRONG)
def test_b69_a_wrong_rule_is_found_in_histories(model_folder, name, monkeypatch):
    monkeypatch.setattr(index_module, "longest_hits", WRONG[name])
    with pytest.raises(AssertionError):
        for seed in range(20):
            history(model_folder, (WINDOW, 0, 23), seed)
