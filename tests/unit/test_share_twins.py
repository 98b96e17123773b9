# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench share` against brute force: the radix tree, its pruning, the bound and the caches."""
import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.bench.share.caches import MAX_IMBALANCE, FleetHits, Routing, replay
from vllm_pd.bench.share.tree import PromptTree
from vllm_pd.bench.simulation.oracle import most_hits
from vllm_pd.bench.simulation.uses import BlockNames, BlockUses
from vllm_pd.protocol.hashes import pack_tokens

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), max_size=12)
# (prompt, answer), of letters that are a block each
TALKS = st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.text("ab", max_size=2)), min_size=1, max_size=6)


def built(prompts: list[tuple[int, ...]]) -> tuple[PromptTree, list[int]]:
    """The tree, and what each prompt repeated. The line of a prompt is ten times its place."""
    tree = PromptTree()
    return tree, [tree.add(pack_tokens(prompt), 10 * place) for place, prompt in enumerate(prompts)]


def beginnings(prompt):
    return [prompt[:end] for end in range(1, len(prompt) + 1)]


def used(talks: list[tuple[str, str]]) -> BlockUses:
    """Each block named by all letters up to it."""
    names, numbers = BlockNames(), {}
    for prompt, answer in talks:
        names.add([numbers.setdefault(name, len(numbers) + 7) for name in beginnings(prompt + answer)], len(prompt))
    return names.uses()


@settings(max_examples=100, deadline=None)
@given(PROMPTS)
def test_each_prompt_repeats_what_it_shares_with_an_earlier_one(prompts):
    _, repeated = built(prompts)
    for place, prompt in enumerate(prompts):
        earlier = {start for other in prompts[:place] for start in beginnings(other)}
        assert repeated[place] == sum(start in earlier for start in beginnings(prompt))


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.integers(1, 4), st.integers(1, 5))
def test_what_is_left_after_pruning(prompts, min_count, min_tokens):
    tree, repeated = built(prompts)
    pruned = tree.prune(min_count, min_tokens, 1000)
    uses = Counter(start for prompt in prompts for start in beginnings(prompt))
    counting = []  # of each prompt the longest prefix that is left
    for prompt in prompts:
        common = [start for start in beginnings(prompt) if uses[start] >= min_count and len(start) >= min_tokens]
        counting += common[-1:]
    distinct = {start for prefix in counting for start in beginnings(prefix)}
    assert pruned.distinct_tokens == len(distinct)
    assert pruned.repeated_tokens == sum(map(len, counting)) - len(distinct)
    following = Counter(start[:-1] for start in uses)
    ends = [start for start in uses if start in prompts or following[start] > 1]
    assert len(tree) == len(ends)
    left = [end for end in ends if uses[end] >= min_count and len(end) >= min_tokens]
    first = {start: 10 * place for place, prompt in reversed(list(enumerate(prompts))) for start in beginnings(prompt)}
    shorter = {end: max((len(other) for other in ends if other != end and other == end[:len(other)]), default=0)
               for end in left}
    assert pruned.nodes == len(left)
    assert pruned.leaves == sum(not any(other[:len(end)] == end for other in left if other != end) for end in left)
    assert sorted(pruned.prefixes) == sorted((len(end), len(end) - shorter[end], uses[end], first[end]) for end in left)
    saved = [prefix.saved_tokens for prefix in pruned.prefixes]
    assert saved == sorted(saved, reverse=True)
    assert tree.prune(min_count, min_tokens, 2).prefixes == pruned.prefixes[:2]
    if (min_count, min_tokens) in ((1, 1), (2, 1)):
        assert pruned.repeated_tokens == sum(repeated)


def best_by_trying(talks: list[tuple[str, str]], pool: int) -> int:
    """The most hits of a cache that hits from a prompt's start only, over all choices of what to keep."""
    states: dict[frozenset, int] = {frozenset(): 0}
    for prompt, answer in talks:
        after: dict[frozenset, int] = {}
        for kept, hits in states.items():
            hits += sum(1 for _ in itertools.takewhile(kept.__contains__, beginnings(prompt)))
            have = sorted(kept | set(beginnings(prompt + answer)))
            for count in range(min(pool, len(have)) + 1):
                for keep in map(frozenset, itertools.combinations(have, count)):
                    after[keep] = max(after.get(keep, 0), hits)
        states = after
    return max(states.values())


@settings(max_examples=60, deadline=None)
@given(TALKS, st.integers(0, 3))
def test_the_bound_is_the_most_that_any_cache_can_hit(talks, pool):
    assert most_hits(used(talks), pool) == best_by_trying(talks, pool)


class ListCache:
    """An LRU cache as a list, the block used last at its end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: list[str] = []

    def hits(self, prompt: str) -> int:
        return sum(1 for _ in itertools.takewhile(self.blocks.__contains__, beginnings(prompt)))

    def use(self, text: str) -> None:
        mine = beginnings(text)[::-1]
        self.blocks = ([block for block in self.blocks if block not in mine] + mine)[-self.size:]


def replayed(talks: list[tuple[str, str]], engines: int, size: int, routing: Routing) -> FleetHits:
    """As `replay`, with the plainest means."""
    caches, prefill = [ListCache(size) for _ in range(engines)], ListCache(size)
    lacked, d_blocks, p_blocks = [0] * engines, 0, 0
    for number, (prompt, answer) in enumerate(talks):
        chosen = number % engines
        if routing is Routing.PREFIX:
            most = MAX_IMBALANCE * sum(lacked) / engines + len(prompt)
            allowed = [each for each in range(engines) if lacked[each] <= most]
            chosen = sorted(allowed, key=lambda each: (-caches[each].hits(prompt), lacked[each]))[0]
        hits = caches[chosen].hits(prompt)
        d_blocks += hits
        lacked[chosen] += len(prompt) - hits
        caches[chosen].use(prompt + answer)
        if hits < len(prompt):
            p_blocks += max(0, prefill.hits(prompt) - hits)
            prefill.use(prompt)
    return FleetHits(d_blocks, p_blocks, max(lacked) * engines / max(1, sum(lacked)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=4), st.text("ab", max_size=2)), min_size=1, max_size=14),
       st.integers(1, 3), st.integers(1, 8), st.sampled_from(Routing))
def test_the_caches_of_a_fleet(talks, engines, size, routing):
    uses = used(talks)
    hits = replay(uses, engines, size, routing)
    assert hits == replayed(talks, engines, size, routing)
    assert hits.d_blocks <= most_hits(uses, engines * size)
    assert hits.d_blocks + hits.p_blocks <= most_hits(uses, (engines + 1) * size)


def test_a_cache_without_a_limit_reaches_the_bound():
    talks = [("abc", "ab"), ("abcab", ""), ("b", "a"), ("abcb", ""), ("ba", "")]
    uses = used(talks)
    assert replay(uses, 1, uses.distinct, Routing.PREFIX).d_blocks == most_hits(uses, None) == 10
