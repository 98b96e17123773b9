# SPDX-License-Identifier: Apache-2.0
"""The trace that the hit rates are measured with, and the bound they are measured against."""
import itertools
import random

import msgspec
import pytest

from vllm_pd.bench.simulation.oracle import bound, footprint_blocks
from vllm_pd.bench.simulation.trace import Arrival, TraceConfig, make

SMALL = TraceConfig(conversations=40, system_tokens=50, document_tokens=200, system_prompts=2, documents=2)


def arrivals(*prompts: str) -> list[Arrival]:
    """A block is one token, so the prefix of a letter matters; answers add nothing."""
    return [Arrival(float(n), n, 0, tuple(map(ord, prompt)), (0,)) for n, prompt in enumerate(prompts)]


def test_a_trace_is_its_seeds():
    trace = make(SMALL)
    assert trace == make(SMALL) != make(msgspec.structs.replace(SMALL, seed=1))
    assert [a.at_s for a in trace] == sorted(a.at_s for a in trace)
    assert len({a.conversation for a in trace}) == SMALL.conversations


def test_each_turn_goes_on_from_the_one_before():
    chats: dict[int, list[Arrival]] = {}
    for arrival in make(SMALL):
        chats.setdefault(arrival.conversation, []).append(arrival)
    for chat in chats.values():
        for turn, (before, after) in enumerate(itertools.pairwise(chat), 1):
            assert after.turn == turn and after.at_s > before.at_s
            assert after.prompt[:len(before.prompt) + len(before.answer)] == before.prompt + before.answer
    assert max(len(chat) for chat in chats.values()) > 3
    assert len({chat[0].prompt[:20] for chat in chats.values()}) == SMALL.system_prompts


@pytest.mark.parametrize("prompts, pool, hits", [
    (("a", "a", "a"), None, 2),
    (("abc", "abd", "abc"), None, 5),
    (("abc", "xbc"), None, 0),  # the same letters after another beginning are other blocks
    (("a", "b", "a", "b"), 2, 2),
    (("a", "b", "a", "b"), 1, 1),
    (("a", "b", "c", "a", "b", "c"), 2, 2),
    (("a", "b", "c", "a", "b", "c"), 0, 0),
    (("a", "b", "b", "b", "a"), 1, 2),  # keeps what is needed first
])
def test_the_bound_by_hand(prompts, pool, hits):
    trace = arrivals(*prompts)
    assert bound(trace, 1, pool) == pytest.approx(hits / sum(map(len, prompts)))


def best_by_trying(trace: list[Arrival], pool: int) -> int:
    """The most hits that any choice of what to keep gives. A block is named by the prompt up to it."""
    states: dict[frozenset, int] = {frozenset(): 0}
    for arrival in trace:
        names = [arrival.prompt[:end] for end in range(1, len(arrival.prompt) + 1)]
        after: dict[frozenset, int] = {}
        for kept, hits in states.items():
            hits += sum(name in kept for name in names)
            have = kept | set(names)
            for count in range(min(pool, len(have)) + 1):
                for keep in map(frozenset, itertools.combinations(sorted(have), count)):
                    after[keep] = max(after.get(keep, 0), hits)
        states = after
    return max(states.values())


def test_nothing_beats_the_bound_and_something_reaches_it():
    rng = random.Random(4)
    for _ in range(25):
        trace = arrivals(*("".join(rng.choices("ab", k=rng.randint(1, 2))) for _ in range(6)))
        pool = rng.randint(0, 3)
        most = best_by_trying(trace, pool)
        assert bound(trace, 1, pool) == pytest.approx(most / sum(len(a.prompt) for a in trace))


def test_an_answer_can_be_hit_by_the_next_turn():
    first = Arrival(0.0, 0, 0, (1, 2), (3, 4))
    second = Arrival(1.0, 0, 1, (1, 2, 3, 4, 5), (6,))
    assert bound([first, second], 1, None) == pytest.approx(3 / 7)  # the answer's last token was never computed
    assert footprint_blocks([first, second], 1) == 5


def test_more_room_never_hurts():
    trace = make(SMALL)
    size = footprint_blocks(trace, 4)
    bounds = [bound(trace, 4, size * share // 10) for share in range(11)]
    assert bounds == sorted(bounds) and bounds[0] == 0.0
    assert bounds[-1] == bound(trace, 4, None) > 0.5
