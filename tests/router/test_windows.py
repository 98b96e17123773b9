# SPDX-License-Identifier: Apache-2.0
"""B69: a prefix hit at an engine of which some KV cache groups need only the last blocks before a position. The rule
of `vllm_pd.router.windows`, and the index that keeps what it needs. tests/v1/test_window_hits.py compares both with
V1."""
import random
from collections import Counter

import pytest

from vllm_pd.events.formats import ClearedMap, RemovedMap, StoredMap
from vllm_pd.router import index as index_module
from vllm_pd.router.events import holdings as holdings_module
from vllm_pd.router.events.holdings import Holdings
from vllm_pd.router.index import PrefixIndex
from vllm_pd.router.windows import longest_hits

SIZE = 4
BLOCKS = 12
TEXT = [100 * block + at for block in range(BLOCKS) for at in range(SIZE)]


def right_hit(length: int, groups: list[tuple[int, set[int]]]) -> int:
    """By the definition. `groups` are (reach, the blocks that it holds)."""
    return next(hit for hit in range(length, -1, -1)
                if all(set(range(max(0, hit - reach), hit)) <= held for reach, held in groups))


def test_b69_the_longest_hit_of_many_engines_at_a_time_is_that_of_each():
    rng = random.Random(1)
    found = Counter()
    for _ in range(3000):
        reaches = rng.sample([1, 2, 3, 5, 100], rng.randint(1, 3))
        engines = [(rng.randint(1, BLOCKS),
                    [(reach, {block for block in range(BLOCKS) if rng.random() < rng.choice([0.5, 0.9])})
                     for reach in reaches if rng.random() < 0.7]) for _ in range(rng.randint(1, 5))]
        lengths: dict[int, int] = {}
        for number, (length, _) in enumerate(engines):
            lengths[length] = lengths.get(length, 0) | 1 << number

        def lacks(block: int, reach: int, engines: list = engines) -> int:
            return sum(1 << number for number, (_, groups) in enumerate(engines)
                       if any(one == reach and block not in held for one, held in groups))

        hits = longest_hits(lengths, reaches, lacks)
        got = {number: length for length, bits in hits.items() for number in range(8) if bits >> number & 1}
        right = {number: right_hit(*engine) for number, engine in enumerate(engines)}
        assert got == {number: hit for number, hit in right.items() if hit}, (engines, reaches)
        found.update(hit == length for (length, _), hit in zip(engines, right.values(), strict=True))
    assert min(found.values()) > 1000


def test_b69_of_a_long_prompt_only_what_a_hit_needs_is_looked_at():
    looked = []
    assert longest_hits({1 << 40: 1}, [8], lambda block, reach: looked.append(block) or 0) == {1 << 40: 1}
    assert looked == [(1 << 40) - 1 - back for back in range(8)]


class Engine:
    """An engine's events, in words, and the index that they reach."""

    def __init__(self, index: PrefixIndex | None = None, worker: str = "w") -> None:
        self.index = index or PrefixIndex(SIZE)
        self.worker = worker
        self.notes: list[str] = []
        self.holdings = Holdings(self.index, worker, self.notes.append)

    def stored(self, group: int, blocks, first: int = 0, end: int | None = None, kind: str | None = "full_attention",
               window: int | None = None) -> bool:
        """Blocks of the run from `first` to before `end`; the others are left out. Their hashes are 1000 + number."""
        end = (max(blocks, default=first) + 1) if end is None else end
        parent = 1000 + first - 1 if first else None
        return self.holdings.apply(StoredMap(
            [1000 + block for block in blocks], parent, TEXT[first * SIZE:end * SIZE], SIZE, group_idx=group,
             kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window))

    def whole(self, blocks, first: int = 0, group: int = 1) -> bool:
        return self.stored(group, blocks, first)

    def window(self, blocks, first: int = 0, end: int | None = None, group: int = 0, window: int = 9) -> bool:
        """Of a group that reaches back two blocks."""
        return self.stored(group, blocks, first, end, "sliding_window", window)

    def removed(self, group: int, blocks) -> None:
        self.holdings.apply(RemovedMap([1000 + block for block in blocks], group_idx=group))

    def hits(self, blocks: int = BLOCKS, now_s: float | None = None) -> int:
        return self.index.matches(self.index.hashes(TEXT[:blocks * SIZE]), now_s).get(self.worker, 0)


def sizes(engine: Engine) -> dict[str, int]:
    engine.index.sweep(1 << 40)
    return engine.index.sizes()


@pytest.mark.parametrize("window_first", [True, False])
def test_b69_after_a_hand_over_the_hit_is_as_long_as_its_prompt(window_first):
    """The first batch of an engine's life: the window's group says its last blocks only. The hit is there, whichever
    group comes first, and a shorter prompt has none."""
    engine = Engine()
    events = [lambda: engine.window([8, 9], end=10), lambda: engine.whole(range(10))]
    for event in events if window_first else events[::-1]:
        assert event()
    assert engine.hits() == 10 and engine.hits(9) == 0 and not engine.notes
    assert engine.window([10], 10) and engine.whole([10], 10)
    assert [engine.hits(blocks) for blocks in (12, 11, 10, 9)] == [11, 11, 10, 0]
    engine.removed(0, [8])
    assert [engine.hits(blocks) for blocks in (12, 10)] == [11, 0]
    engine.removed(0, [9])
    assert engine.hits() == 0
    engine.window([9], 9)
    assert engine.hits() == 11
    engine.removed(1, [3])
    assert engine.hits() == 0 and engine.index.beginnings(engine.index.hashes(TEXT)) == {"w": 3}
    engine.whole([3], 3)
    assert engine.hits() == 11, "the blocks behind it were there all the time"


def test_b69_the_end_of_a_block_is_the_end_of_its_marks():
    """Whoever computes it again stores it in all groups."""
    engine = Engine()
    engine.window(range(4))
    engine.whole(range(4))
    assert engine.hits() == 4
    engine.removed(1, [2])
    engine.whole([2], 2)
    assert engine.hits() == 2
    engine.window([2, 3], 2)
    assert engine.hits() == 4
    engine.removed(1, range(4))
    assert not engine.holdings._held
    engine.index.drop("w")
    assert not any(sizes(engine).values())


def test_b69_blocks_that_wait_for_a_parent_keep_their_marks():
    engine = Engine()
    engine.whole([0])
    engine.window([0])
    engine.window([4, 5], 4)
    engine.whole([4, 5], 4)
    assert engine.hits() == 1 and sizes(engine)["unnamed"] == 2
    engine.whole([1, 2, 3], 1)
    assert engine.hits() == 6 and not sizes(engine)["unnamed"]
    engine.window([7, 8], 7)
    engine.whole([7, 8], 7)
    engine.removed(1, [7, 8])
    assert not sizes(engine)["unnamed"] and not engine.index.sizes()["waiting"]


def test_b69_groups_with_one_window_hold_a_block_together_and_others_count_by_themselves():
    engine = Engine()
    engine.whole(range(6), group=0)
    engine.window([4, 5], end=6, group=1)
    assert engine.hits() == 6, "one group of layers has a window"
    engine.window([5], end=6, group=2)
    assert engine.hits() == 0, "another one has the same, and lacks a block"
    engine.window([4], 4, group=2)
    assert engine.hits() == 6
    engine.stored(3, [4], 4, kind="mamba")
    assert [engine.hits(blocks) for blocks in (6, 5)] == [0, 0]
    engine.window([3], 3, group=1)
    engine.window([3], 3, group=2)
    assert engine.hits() == 5, "where the state is, and both windows"
    engine.removed(2, [3])
    assert engine.hits() == 0


def test_b69_two_groups_with_full_attention_and_a_window():
    engine = Engine()
    for _ in range(2):  # what the first group said before the second one was known is forgotten
        engine.whole(range(6), group=0)
        engine.whole(range(6), group=1)
    engine.window([4, 5], end=6, group=2)
    assert engine.hits() == 6
    engine.removed(0, [5])
    assert engine.hits() == 0
    engine.whole([5], 5, group=0)
    assert engine.hits() == 0, "its mark ended with it"
    engine.window([5], 5, group=2)
    assert engine.hits() == 6
    engine.whole([6], 6, group=0)  # the other one lacks it
    engine.window([6], 6, group=2)
    assert sizes(engine)["unnamed"] == 1
    for group in (0, 1):
        engine.removed(group, range(7))
    assert not sizes(engine)["unnamed"] and not sizes(engine)["marked"]
    assert not engine.holdings._held and not engine.holdings._blocks and not engine.holdings._indexed


@pytest.mark.parametrize("kind, window", [(None, None), ("chunked_local_attention", None), ("unknown", None),
                                          ("sliding_window", None), ("sliding_window", 0), ("sliding_window", -1),
                                          ("full_attention", 9), ("new_kind", 9)])
def test_b69_a_group_that_does_not_say_how_far_it_looks_back_needs_all_blocks(kind, window):
    """As of publishers that say no kinds."""
    engine = Engine()
    for _ in range(2):
        engine.whole(range(6), group=0)
        engine.stored(1, [4, 5], 0, 6, kind, window)
    assert engine.hits() == 0
    engine.stored(1, range(4), 0, 4, kind, window)
    assert engine.hits() == 6


def test_b69_a_window_alone_is_as_any_only_group():
    engine = Engine()
    engine.window(range(6))
    assert engine.hits() == 6 and engine.hits(3) == 3
    engine.removed(0, [5])
    assert engine.hits() == 5
    engine.removed(0, range(6))
    assert not engine.holdings._held


def test_b69_a_window_shorter_than_a_block_needs_the_last_one():
    engine = Engine()
    for window in (1, 2, SIZE, SIZE + 1):
        engine = Engine()
        engine.whole(range(6))
        engine.window([3], 3, window=window)
        assert engine.hits() == 4 and engine.hits(5) == 4 and engine.hits(3) == 0
    engine.window([3], 3, group=5, window=SIZE + 2)
    assert engine.hits() == 0


@pytest.mark.parametrize("first", [True, False])
def test_b69_a_group_with_blocks_of_another_size_is_left_out(first):
    """As of compressed attention: its blocks have names that say nothing of those of the others. The hit is that of
    the rest."""
    engine = Engine()

    def of_another_size():
        half = SIZE // 2
        engine.holdings.apply(StoredMap([5, 6], None, TEXT[:2 * half], half, group_idx=0,
                                        kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=half))

    for event in [of_another_size, lambda: engine.whole(range(6))][::1 if first else -1]:
        event()
    assert engine.hits() == 6 and len(engine.notes) == 1 and "its blocks are left out" in engine.notes[0]
    engine.window([4, 5], end=6, group=2)
    engine.removed(0, [5])
    assert engine.hits() == 6 and engine.hits(5) == 0


def test_b69_after_all_is_cleared_the_groups_are_known_still():
    engine = Engine()
    engine.window([4, 5], end=6)
    engine.whole(range(6))
    assert engine.hits() == 6
    engine.holdings.apply(ClearedMap())
    assert engine.hits() == 0 and sizes(engine)["marked"] == 0
    engine.whole(range(6))
    assert engine.hits() == 0
    engine.window([4, 5], end=6)
    assert engine.hits() == 6
    engine.holdings.forget()
    engine.index.drop("w")
    assert not any(sizes(engine).values())


def test_b69_a_block_whose_name_changes_and_one_that_is_removed_lose_their_marks():
    """No engine names a block anew; a mark that stays would be the next worker's that gets the bit."""
    for happens in ("renamed", "removed"):
        engine = Engine()
        engine.whole(range(6))
        engine.window([4, 5], end=6)
        if happens == "renamed":
            engine.index.stored("w", [1005], 1004, [9] * SIZE)
        else:
            engine.index.removed("w", iter([1005]))
        assert engine.hits() == 0 and engine.index._marks[2].holders.keys() <= engine.index._holders.keys()
        engine.index.drop("w")
        assert not any(sizes(engine).values())


def test_b69_what_a_group_removes_that_has_stored_nothing_is_nothing():
    """A reader may come late."""
    engine = Engine()
    engine.whole(range(6))
    engine.removed(0, [5])
    assert engine.hits() == 6
    engine.window([4, 5], end=6)
    assert engine.hits() == 6


def test_b69_workers_with_windows_and_without_share_an_index():
    index = PrefixIndex(SIZE)
    one, other, third = (Engine(index, worker) for worker in ("one", "other", "third"))
    for engine in (one, other, third):
        engine.whole(range(8))
    one.window([6, 7], end=8)
    other.window([3, 4], 3)
    names = index.hashes(TEXT)
    assert index.matches(names) == {"one": 8, "other": 5, "third": 8}
    assert index.beginnings(names) == {"one": 8, "other": 8, "third": 8}
    one.holdings.forget()
    index.drop("one")
    late = Engine(index, "late")  # it may get the bit of the one that left
    index.sweep(1 << 40)
    late.whole(range(8))
    assert index.matches(names) == {"late": 8, "other": 5, "third": 8}
    late.window([], end=8)
    assert index.matches(names) == {"other": 5, "third": 8}


def test_b69_what_is_expected_is_expected_in_all_groups():
    engine = Engine()
    engine.whole(range(8))
    engine.window([3, 4], 3)
    engine.index.expect("w", engine.index.hashes(TEXT), 10.0)
    assert engine.hits(now_s=1.0) == BLOCKS and engine.hits() == 5 and engine.hits(now_s=10.0) == 5
    engine.index.expect("w", engine.index.hashes(TEXT), 30.0)
    engine.whole(range(8, 12), 8)  # now it is known
    engine.window([10, 11], end=12)
    assert engine.hits(now_s=20.0) == 12
    engine.removed(0, [11])
    assert engine.hits(now_s=20.0) < 12
    engine.index.drop("w")
    assert not any(sizes(engine).values())


def test_b69_the_lookahead_comes_first():
    """The last block may differ, so the hit ends before it, and the window's blocks count from there."""
    engine = Engine()
    engine.whole(range(6))
    engine.window([4, 5], end=6)
    engine.index.set_lookahead("w", 1)
    assert engine.hits() == 0
    engine.window([3], 3)
    assert engine.hits() == 5


def test_b69_more_groups_than_any_model_has_are_left_out():
    engine = Engine()
    engine.whole(range(6), group=0)
    for group in range(1, 200):
        engine.window([4, 5], end=6, group=group)
    assert len(engine.holdings._groups) == holdings_module.MAX_GROUPS and len(engine.notes) == 200 - 64
    assert engine.hits() == 6


def test_b69_with_more_windows_than_any_model_has_a_group_must_hold_all():
    engine = Engine()
    for _ in range(2):
        engine.whole(range(6), group=0)
        for group in range(1, 20):
            engine.window(range(6), group=group, window=SIZE * group + 1)
    assert engine.hits() == 6 and sizes(engine)["reaches"] == holdings_module.MAX_REACHES
    engine.removed(19, [0])
    assert engine.hits() == 0


def test_b69_what_partial_groups_hold_of_unknown_blocks_is_bounded(monkeypatch):
    monkeypatch.setattr(holdings_module, "MAX_EARLY_BLOCKS", 20)
    engine = Engine()
    engine.window(range(6))
    engine.whole(range(6))
    for start in range(10, 1000, 10):
        kept = engine.stored(0, range(start, start + 10), 0, 0, "sliding_window", 9)
        assert kept == (start < 30)
    assert len(engine.holdings._held) == 26 and sizes(engine)["unnamed"] == 20
    assert engine.hits() == 6
    alone = Engine()
    for start in range(0, 1000, 10):
        assert alone.stored(0, range(start, start + 10), 0, 0, "sliding_window", 9), "it may be the only group"
    assert len(alone.holdings._held) == 20


def wrong_rules():
    """Rules that are wrong in one point, which the histories must find."""
    def of_reaches(change):
        return lambda lengths, reaches, lacks: longest_hits(
            lengths, [change(reach) for reach in reaches],
            lambda block, changed: sum({lacks(block, reach) for reach in reaches if change(reach) == changed}))

    return {"all blocks": of_reaches(lambda reach: BLOCKS + reach), "a block less": of_reaches(lambda reach: reach - 1),
            "a block more": of_reaches(lambda reach: reach + 1),
            "whole groups only": lambda lengths, reaches, lacks: dict(lengths),
            "one group only": lambda lengths, reaches, lacks: longest_hits(lengths, [min(reaches)], lacks)}


def history(seed: int, steps: int = 60) -> int:
    """A random history of an engine with three groups. Returns how many hits were looked at; raises AssertionError."""
    rng = random.Random(seed)
    engine, held, looked = Engine(), [set(), set(), set()], 0
    kinds = [("sliding_window", 2 * SIZE + 1, 2), ("full_attention", None, None), ("sliding_window", 3 * SIZE + 1, 3)]
    for _ in range(steps):
        if rng.random() < 0.5:
            end = rng.randint(1, BLOCKS)
            for group, (kind, window, reach) in enumerate(kinds):
                first = 0 if reach is None else max(0, end - reach - rng.randint(0, 2))
                held[group] |= {*range(first, end)}
                engine.stored(group, range(first, end), 0, end, kind, window)
        else:
            group = rng.choice([0, 0, 1, 2])
            blocks = rng.sample(range(BLOCKS), 2)
            held[group] -= {*blocks}
            if group == 1:
                for marked in held:
                    marked -= {*blocks}
            engine.removed(group, blocks)
        length = next(block for block in range(BLOCKS + 1) if block not in held[1])
        for asked in range(1, BLOCKS + 1):
            right = right_hit(min(length, asked), [(2, held[0]), (3, held[2])])
            assert engine.hits(asked) == right, (seed, asked, held)
            looked += 0 < right < min(length, asked)
    return looked


def test_b69_random_histories():
    assert sum(history(seed) for seed in range(40)) > 200


@pytest.mark.parametrize("name", wrong_rules())
def test_b69_a_wrong_rule_is_found(name, monkeypatch):
    monkeypatch.setattr(index_module, "longest_hits", wrong_rules()[name])
    with pytest.raises(AssertionError):
        for seed in range(40):
            history(seed)
