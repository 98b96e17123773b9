# SPDX-License-Identifier: Apache-2.0
"""The prefix index against a plain model of it, and one by one what it must not get wrong."""
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.errors import ConfigError, PeerMismatch
from vllm_pd.protocol.hashes import root_seed
from vllm_pd.router import index as index_module
from vllm_pd.router.index import PrefixIndex

SIZE = 4
TEXT = list(range(1000, 1000 + 10 * SIZE))


def tokens(*blocks: int) -> list[int]:
    """A prompt whose blocks are told apart by one number each."""
    return [block * 100 + position for block in blocks for position in range(SIZE)]


def filled(index: PrefixIndex, worker: str, blocks: int, text: list[int] = TEXT, lora=None, first: int = 0) -> None:
    """The engine's own hashes are 1, 2, ... from `first`."""
    index.stored(worker, list(range(first + 1, first + blocks + 1)), None, text[:blocks * SIZE], SIZE, lora)


def empty(index: PrefixIndex) -> bool:
    index.sweep(1 << 40)
    return not any(index.sizes().values())


def test_b62_a_match_is_contiguous_from_the_start():
    index = PrefixIndex(SIZE)
    filled(index, "a", 10)
    filled(index, "b", 4)
    names = index.hashes(TEXT)
    assert index.matches(names) == {"a": 10, "b": 4}
    index.removed("a", [3])
    assert index.matches(names) == {"a": 2, "b": 4}  # what is behind the gap does not count
    assert index.matches(names[4:]) == {"a": 6}  # a name says all that came before it
    index.removed("a", [1])
    assert index.matches(names) == {"b": 4}
    index.stored("a", [1], None, TEXT[:SIZE])
    index.stored("a", [3], 2, TEXT[2 * SIZE:3 * SIZE])
    assert index.matches(names) == {"a": 10, "b": 4}


def test_a_part_of_a_block_has_no_name_and_other_text_no_match():
    index = PrefixIndex(SIZE)
    filled(index, "a", 2)
    assert index.hashes(TEXT[:SIZE - 1]) == []
    assert len(index.hashes(TEXT[:2 * SIZE + 1])) == 2
    assert index.matches(index.hashes([7] + TEXT[1:])) == {}
    assert index.matches(index.hashes(TEXT[SIZE:])) == {}  # the same tokens, but not after the same ones
    assert index.matches([]) == {}


def test_b60_adapters_have_names_of_their_own():
    index = PrefixIndex(SIZE)
    filled(index, "a", 3)
    filled(index, "a", 2, lora="tone", first=10)
    filled(index, "a", 1, lora=7, first=20)
    assert [index.matches(index.hashes(TEXT, lora)) for lora in (None, "tone", 7, "other")] == [
        {"a": 3}, {"a": 2}, {"a": 1}, {}]
    assert len({root_seed(), root_seed(0), root_seed(""), root_seed("tone")}) == 4
    index.stored("a", [13], 12, TEXT[2 * SIZE:3 * SIZE], SIZE, "tone")  # what follows is known by what it follows
    assert index.matches(index.hashes(TEXT, "tone")) == {"a": 3}


def test_children_before_their_parents_wait_for_them():
    index = PrefixIndex(SIZE)
    names = index.hashes(TEXT)
    assert index.stored("a", [5, 6], 4, TEXT[4 * SIZE:6 * SIZE])
    assert index.stored("a", [3, 4], 2, TEXT[2 * SIZE:4 * SIZE])
    assert index.matches(names) == {} and index.blocks("a") == 4 and index.sizes()["waiting"] == 4
    index.removed("a", [6])
    filled(index, "a", 2)
    assert index.matches(names) == {"a": 5}
    index.stored("a", [9], 8, TEXT[8 * SIZE:9 * SIZE])
    index.removed("a", [1, 2, 3, 4, 5, 9])
    assert index.sizes()["waiting"] == index.sizes()["waited_for"] == 0
    assert index.blocks("a") == 0 and index.counts.unknown_removed == 0


def test_an_event_that_begins_unknown_goes_on_from_what_is_known():
    index = PrefixIndex(SIZE)
    filled(index, "a", 5)
    index.removed("a", [3])
    index.stored("a", [4, 5, 6], 3, TEXT[3 * SIZE:6 * SIZE])  # 4 and 5 a second time
    index.stored("a", [3], 2, TEXT[2 * SIZE:3 * SIZE])
    assert index.matches(index.hashes(TEXT)) == {"a": 6}
    index.removed("a", [4])
    assert index.matches(index.hashes(TEXT)) == {"a": 6}
    index.removed("a", [4])
    assert index.matches(index.hashes(TEXT)) == {"a": 3}


def test_an_engine_may_hold_a_block_twice():
    """V1 engines do, and say so each time."""
    index = PrefixIndex(SIZE)
    for _ in range(3):
        filled(index, "a", 2)
    for _ in range(2):
        index.removed("a", [2])
        assert index.matches(index.hashes(TEXT)) == {"a": 2}
    index.removed("a", [2])
    assert index.matches(index.hashes(TEXT)) == {"a": 1}
    index.removed("a", [2])
    assert index.counts.unknown_removed == 1


def test_an_engine_may_tell_apart_what_its_events_do_not():
    """A cache salt: two blocks of one name."""
    index = PrefixIndex(SIZE)
    filled(index, "a", 2)
    filled(index, "a", 2, first=10)
    filled(index, "a", 2, first=20)
    for left in ([1, 2], [11, 12]):
        index.removed("a", left)
        assert index.matches(index.hashes(TEXT)) == {"a": 2}
    index.removed("a", [22])
    assert index.matches(index.hashes(TEXT)) == {"a": 1}
    index.drop("a")
    assert empty(index)


def test_one_hash_that_changes_its_meaning_has_the_last_one():
    index = PrefixIndex(SIZE)
    filled(index, "a", 2)
    index.stored("a", [1], None, tokens(9))
    assert index.matches(index.hashes(TEXT)) == {}
    assert index.matches(index.hashes(tokens(9))) == {"a": 1}


def test_what_is_dropped_is_gone_at_once_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(index_module, "SWEEP_BLOCKS", 1)
    index = PrefixIndex(SIZE)
    names = index.hashes(TEXT)
    for life in range(50):
        filled(index, "a", 10)
        filled(index, "b", 3)
        assert index.matches(names) == {"a": 10, "b": 3}
        index.drop("a") if life % 2 else index.cleared("a")
        assert index.matches(names) == {"b": 3}
        assert ("a" in index.workers()) == (life % 2 == 0)
    index.drop("a")
    index.drop("b")
    index.drop("nobody")
    assert index.counts.drops == 26 and index.matches(names) == {}
    assert empty(index)
    filled(index, "c", 1)
    assert index._bits_made < 60 and index._free_bits  # bits are used again


def test_a_sweep_takes_as_many_as_it_may(monkeypatch):
    monkeypatch.setattr(index_module, "SWEEP_BLOCKS", 3)
    index = PrefixIndex(SIZE)
    filled(index, "a", 10)
    index.drop("a")
    assert index.sizes()["names"] == 7
    assert index.matches(index.hashes(TEXT)[5:]) == {}
    index.sweep(2)
    assert index.sizes()["names"] == 5
    filled(index, "b", 1)
    index.removed("b", [])
    assert index.matches(index.hashes(TEXT)) == {"b": 1} and index.sizes()["dying"] == 0


def test_b61_a_snapshot_replaces_everything_in_any_order(monkeypatch):
    monkeypatch.setattr(index_module, "SLICE_BLOCKS", 2)
    index = PrefixIndex(SIZE)
    filled(index, "a", 3, tokens(1, 2, 3))
    blocks = [(n + 1, n or None, TEXT[n * SIZE:(n + 1) * SIZE], None) for n in range(8)]
    random.Random(0).shuffle(blocks)
    steps = index.replacing("a", blocks)
    assert next(steps) == 2
    assert index.matches(index.hashes(tokens(1, 2, 3))) == {}
    assert list(steps) == [4, 6, 8, 8]
    assert index.matches(index.hashes(TEXT)) == {"a": 8}
    assert index.counts.refused == 0
    steps = index.replacing("a", blocks)
    next(steps)
    index.drop("a")
    assert list(steps) == [] and index.workers() == []


def test_what_can_not_wait_asks_for_a_snapshot(monkeypatch):
    monkeypatch.setattr(index_module, "MAX_WAITING_BLOCKS", 3)
    index = PrefixIndex(SIZE)
    assert index.stored("a", [5, 6], 4, tokens(5, 6)) and index.counts.refused == 0
    assert not index.stored("a", [8, 9], 7, tokens(8, 9))
    assert index.counts.refused == 2
    index.replace("a", [(1, None, tokens(1), None)])
    assert index.blocks("a") == 1
    index.replace("a", [(number, number + 100, tokens(number), None) for number in range(10, 20)])
    assert index.counts.refused == 2 and index.blocks("a") == 10  # what an engine does hold always has room
    assert index.stored("a", [5, 6, 7], 4, tokens(5, 6, 7)) and not index.stored("a", [8], 7000, tokens(8))


def test_what_is_expected_counts_until_it_comes_or_its_time_is_over():
    index = PrefixIndex(SIZE)
    names = index.hashes(TEXT)
    filled(index, "a", 2)
    index.expect("a", names[:5], until_s=10.0)
    index.expect("b", names[:4], until_s=5.0)
    assert index.matches(names) == {"a": 2}
    assert index.matches(names, 4.9) == {"a": 5, "b": 4}
    assert index.matches(names, 5.0) == {"a": 5}
    index.stored("a", [3, 4], 2, TEXT[2 * SIZE:4 * SIZE])
    index.removed("a", [3])  # came and went: not expected any more
    assert index.matches(names, 6.0) == {"a": 2}
    index.stored("a", [3], 2, TEXT[2 * SIZE:3 * SIZE])
    assert index.matches(names, 6.0) == {"a": 5}
    assert index.matches(names, 10.0) == {"a": 4}
    index.expect("a", names, until_s=20.0)
    index.expect("a", names, until_s=15.0)  # the later time holds
    assert index.matches(names, 15.0) == {"a": 10}
    index.drop("a")
    filled(index, "a", 1)
    assert index.matches(names, 15.0) == {"a": 1}  # nobody expects anything of a worker that was dropped
    index.stored("b", [2], 1, TEXT[SIZE:2 * SIZE])
    index.expect("b", names[:3], until_s=30.0)
    index.stored("b", [1], None, TEXT[:SIZE])  # both come
    index.removed("b", [2])
    assert index.matches(names, 16.0) == {"a": 1, "b": 1}
    index.expect("c", names, until_s=30.0)
    index.expire(30.0)
    for worker in "abc":
        index.drop(worker)
    assert empty(index)


def test_b80_what_can_not_be_is_refused():
    index = PrefixIndex(SIZE)
    for bad in (0, -1, 1.5, True, "16"):
        with pytest.raises(ConfigError, match="block_size"):
            PrefixIndex(bad)
    with pytest.raises(PeerMismatch, match="block_size"):
        index.stored("a", [1], None, tokens(1), SIZE * 2)
    with pytest.raises(ConfigError, match="token_ids"):
        index.stored("a", [1, 2], None, tokens(1))
    for bad in ([-1] * SIZE, [1 << 32] * SIZE, ["x"] * SIZE, [None] * SIZE, None, [1.5] * 100):
        with pytest.raises(ConfigError, match="token_ids"):
            index.hashes(bad)
    assert index.workers() == []


WORKERS = st.sampled_from("abc")
PATHS = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)
OPERATIONS = st.one_of(
    st.tuples(st.just("store"), WORKERS, PATHS, st.integers(0, 3), st.booleans()),
    st.tuples(st.just("remove"), WORKERS, st.lists(PATHS, max_size=3)),
    st.tuples(st.just("clear"), WORKERS), st.tuples(st.just("drop"), WORKERS),
    st.tuples(st.just("snapshot"), WORKERS, st.sets(PATHS, max_size=6)),
    st.tuples(st.just("expect"), WORKERS, PATHS, st.integers(1, 9)), st.tuples(st.just("wait"), st.integers(1, 4)))


def own(worker: str, path: tuple[int, ...]) -> int:
    """What that engine calls the block at the end of the path."""
    return hash((worker, path))


@settings(max_examples=250, deadline=None)
@given(st.lists(OPERATIONS, max_size=40))
def test_b62_matches_what_a_plain_model_does(operations):
    """Any order of events, children without parents and parents without children included."""
    index, now_s = PrefixIndex(SIZE), 0.0
    held: dict[str, dict[tuple[int, ...], int]] = {worker: {} for worker in "abc"}  # path -> copies
    expected: dict[tuple[str, tuple[int, ...]], float] = {}
    for operation, *what in operations:
        if operation == "wait":
            now_s += what[0]
            continue
        worker = what[0]
        mine = held[worker]
        if operation == "store":
            path, start, lora_wrong = what[1], min(what[2], len(what[1]) - 1), what[3]
            parts = [path[:end] for end in range(start + 1, len(path) + 1)]
            index.stored(worker, [own(worker, part) for part in parts], own(worker, path[:start]) if start else None,
                         tokens(*path[start:]), SIZE, "ignored" if lora_wrong and start else None)
            for part in parts:
                mine[part] = mine.get(part, 0) + 1
        elif operation == "remove":
            index.removed(worker, [own(worker, path) for path in what[1]])
            for path in what[1]:
                if (copies := mine.pop(path, 0)) > 1:
                    mine[path] = copies - 1
        elif operation == "snapshot":
            index.replace(worker, [(own(worker, path), own(worker, path[:-1]) if path[:-1] else None,
                                    tokens(path[-1]), None) for path in what[1]])
            held[worker] = dict.fromkeys(what[1], 1)
        elif operation == "expect":
            index.expect(worker, index.hashes(tokens(*what[1])), now_s + what[2])
            for end in range(1, len(what[1]) + 1):
                key = worker, what[1][:end]
                expected[key] = max(now_s + what[2], expected.get(key, 0.0))
        else:
            index.cleared(worker) if operation == "clear" else index.drop(worker)
            mine.clear()
        if operation in ("clear", "drop", "snapshot"):
            expected = {key: until_s for key, until_s in expected.items() if key[0] != worker}
        for name in "abc":
            assert index.blocks(name) == len(held[name])
        for path in {(1, 1, 1), (1, 2, 3), (2, 1), (3,), *(path for paths in held.values() for path in paths)}:
            names = index.hashes(tokens(*path))
            depths = {name: _depth(held[name], path) for name in "abc"}
            assert index.matches(names) == {name: depth for name, depth in depths.items() if depth}
            for name, depth in index.matches(names, now_s).items():
                assert depth >= depths[name]
                assert all(path[:end] in held[name] or expected.get((name, path[:end]), 0.0) > now_s
                           for end in range(1, depth + 1))
    for worker in "abc":
        index.drop(worker)
    assert empty(index)


def _depth(held: dict, path: tuple[int, ...]) -> int:
    return next((end for end in range(len(path)) if path[:end + 1] not in held), len(path))
