# SPDX-License-Identifier: Apache-2.0
"""What both bindings do alike with the prompts of a decode engine: B2, B4, B10, B21, B25, B43, B103.

`test_bound_decoding.py` of tests/upstream and of tests/v1 import all tests of this module, and have the fixture
`make`: a decode engine of theirs, on the real scheduler over memory that notices a wrong read.
"""
from typing import Any, Protocol

import pytest

from vllm_pd.protocol.actions import FallbackReason
from vllm_pd.protocol.messages import Attempt

DEADLINE_S = 120.0  # `attempt_deadline_s`


class DecodeEngine(Protocol):
    """A decode engine that a test drives. It hands prompts of more than two blocks over, and knows the prefill engines
    p and q."""
    block_size: int

    def add(self, name: str, tokens: list[int], **params: Any) -> None:
        """A client's request for a few tokens, with these kv_transfer_params. The engine runs until it rests."""

    def abort(self, name: str) -> None:
        """The client of this request is gone."""

    def is_parked(self, name: str) -> bool:
        """Whether it waits for a peer."""

    def is_answered(self, name: str) -> bool:
        """Whether it has all its tokens."""

    def attempts(self, name: str) -> list[Attempt]:
        """Its attempts that were submitted, the newest last."""

    def blocks(self, attempt: Attempt) -> set[int]:
        """Which blocks a peer may write for it."""

    def asked_for(self, attempt: Attempt) -> tuple[tuple[str, ...], float]:
        """The prefill engines that are not to have it, and how many seconds it has."""

    def write(self, attempt: Attempt, tokens: int | None = None) -> None:
        """A peer writes the KV of all, or of the first tokens."""

    def prefilled(self, attempt: Attempt) -> None:
        """The peer has written all, and says so. The engine runs until it rests."""

    def lost(self, attempt: Attempt, reason: FallbackReason = FallbackReason.PEER, peer: str = "p",
             released: bool = True) -> None:
        """The attempt has ended without the KV; `released`: nobody will write its blocks any more. The engine runs
        until it rests."""

    def release(self, attempt: Attempt) -> None:
        """Nobody will write the blocks of this attempt any more."""

    def counted(self) -> list[tuple[str, ...]]:
        """The decisions since the last call: ("decision", where, reason), ("asked", place, where)."""

    def set_peers(self, *names: str) -> None:
        """Which prefill engines there are."""

    def hand_nothing_over(self) -> None:
        """It has left, or has another role."""

    def later(self, seconds: float) -> None:
        """So much time passes."""

    def end(self) -> None:
        """It runs to the end. All answers are right, and nothing is left."""


def tokens_of(engine: DecodeEngine, blocks: int, more: int = 0, first: int = 100) -> list[int]:
    """A prompt of so many tokens. Those with another first token share no block."""
    return [first + number for number in range(blocks * engine.block_size + more)]


class SendsShort:
    """A policy of an operator's own."""

    def __init__(self, config) -> None:
        self._threshold = config.max_local_prefill_tokens

    def wants_peer(self, prompt) -> bool:
        """Whether it is under the threshold."""
        return prompt.prompt_tokens - prompt.cached_tokens <= self._threshold


@pytest.fixture
def engine(make) -> DecodeEngine:
    return make()


def short(engine: DecodeEngine, first: int = 100) -> list[int]:
    """Under the threshold."""
    return tokens_of(engine, 1, 1, first)


def long(engine: DecodeEngine, first: int = 100) -> list[int]:
    """Above it."""
    return tokens_of(engine, 3, 0, first)


def decisions(engine: DecodeEngine) -> list[tuple[str, ...]]:
    return [one[1:] for one in engine.counted() if one[0] == "decision"]


def test_b103_a_short_prompt_is_handed_over_where_it_asks_for_that(engine):
    engine.add("r", short(engine), pd="remote")
    assert engine.is_parked("r")
    engine.prefilled(engine.attempts("r")[-1])
    engine.end()
    assert engine.counted() == [("decision", "remote", "asked"), ("asked", "remote", "remote")]


def test_b103_a_long_prompt_stays_where_it_asks_for_that(engine):
    engine.add("r", long(engine), pd="local")
    engine.end()
    assert not engine.attempts("r")
    assert engine.counted() == [("decision", "local", "asked"), ("asked", "local", "local")]


@pytest.mark.parametrize("spoil, reason", [("no peer", "peer"), ("role", "role"), ("short", "threshold"),
                                           ("cached", "threshold")])
def test_b103_what_can_t_be_handed_over_is_computed_here_and_counted(engine, spoil, reason):
    tokens = short(engine)
    if spoil == "no peer":
        engine.set_peers()
    elif spoil == "role":
        engine.hand_nothing_over()
    elif spoil == "short":
        tokens = tokens[:engine.block_size - 1]
    else:
        engine.add("first", tokens, pd="local")
        engine.counted()
    engine.add("r", tokens, pd="remote")
    engine.end()
    assert not engine.attempts("r")
    assert engine.counted() == [("decision", "local", reason), ("asked", "remote", "local")]


@pytest.mark.parametrize("place", ["fast", "x" * 10**6, None, 7, [["remote"]], {"remote": {}}])
def test_b103_a_place_that_does_not_exist_is_counted_and_changes_nothing(engine, place):
    engine.add("long", long(engine), pd=place)
    assert engine.is_parked("long")
    engine.add("short", short(engine, 900), pd=place)
    assert engine.is_answered("short")
    assert engine.counted() == [("decision", "remote", "length"), ("asked", "other", "remote"),
                                ("decision", "local", "threshold"), ("asked", "other", "local")]
    engine.prefilled(engine.attempts("long")[-1])
    engine.end()


def test_b103_after_a_failure_it_asks_another_peer_and_then_stays(engine):
    engine.add("r", short(engine), pd="remote")
    for peer in ("p", "q"):
        engine.lost(engine.attempts("r")[-1], peer=peer)
    engine.end()
    assert decisions(engine) == [("remote", "asked"), ("remote", "asked"), ("local", "retry")]


def test_b103_an_engine_that_hands_nothing_over_counts_nobody_else(engine):
    engine.hand_nothing_over()
    engine.add("r", long(engine))
    engine.end()
    assert engine.counted() == []


@pytest.mark.parametrize("tokens", [1, 2, -1, 0])
def test_b2_what_is_less_than_a_block_stays_whatever_the_threshold(make, tokens):
    """B2: D computes the last token again, so a peer's part of a block brings nothing."""
    engine = make(max_local_prefill_tokens=0)
    engine.add("r", tokens_of(engine, int(tokens <= 0), tokens))
    if tokens:
        assert not engine.attempts("r") and decisions(engine) == [("local", "threshold")]
    else:
        assert decisions(engine) == [("remote", "length")]
        engine.prefilled(engine.attempts("r")[-1])
    engine.end()


def test_a_policy_of_the_operators_own_decides(make):
    engine = make(policy=f"{SendsShort.__module__}.{SendsShort.__name__}")
    engine.add("long", long(engine))
    assert engine.is_answered("long")
    engine.add("short", short(engine, 900))
    assert engine.is_parked("short")
    engine.prefilled(engine.attempts("short")[-1])
    engine.end()
    assert decisions(engine) == [("local", "own"), ("remote", "own")]


def test_b4_a_prompt_that_is_cached_here_makes_no_job(engine):
    engine.add("a", long(engine))
    engine.prefilled(engine.attempts("a")[-1])
    engine.add("b", long(engine))
    engine.end()
    assert not engine.attempts("b") and decisions(engine) == [("remote", "length"), ("local", "threshold")]


@pytest.mark.parametrize("ends", ["aborted", "lost"])
def test_b10_blocks_that_were_never_written_are_no_prefix_hit(engine, ends):
    engine.add("a", long(engine))
    attempt = engine.attempts("a")[-1]
    engine.write(attempt, engine.block_size + 1)  # the peer had begun
    engine.set_peers()
    if ends == "aborted":
        engine.abort("a")
    else:
        engine.lost(attempt, released=False)
    engine.add("b", long(engine))  # the memory notices a read of what was not written
    assert engine.is_answered("b")
    engine.write(attempt)  # late
    engine.release(attempt)
    engine.end()


def test_b21_a_second_attempt_goes_to_another_peer_in_fresh_blocks(engine):
    engine.add("r", long(engine))
    [first] = engine.attempts("r")
    engine.later(30.0)
    engine.lost(first, released=False)
    _, second = engine.attempts("r")
    avoid, left_s = engine.asked_for(second)
    assert second.number > first.number and avoid == ("p", )
    assert left_s == pytest.approx(DEADLINE_S - 30.0, abs=5.0), "all attempts together have the deadline"
    assert not engine.blocks(first) & engine.blocks(second), "the first peer may still write to its blocks"
    engine.write(first)  # late
    engine.prefilled(second)
    engine.release(first)
    engine.end()


def test_b21_attempts_are_counted(engine):
    engine.set_peers("p", "q", "s")
    engine.add("r", long(engine))
    engine.lost(engine.attempts("r")[-1])
    engine.lost(engine.attempts("r")[-1], peer="q")
    assert engine.is_answered("r") and len(engine.attempts("r")) == 2, "prefilled here"
    engine.end()


@pytest.mark.parametrize("reason", [FallbackReason.BROKER, FallbackReason.QUEUE, FallbackReason.FEATURE,
                                    FallbackReason.DEADLINE, FallbackReason.CONTROL])
def test_b21_no_second_attempt_where_the_peer_was_not_at_fault(engine, reason):
    engine.add("r", long(engine))
    engine.lost(engine.attempts("r")[-1], reason, "")
    assert engine.is_answered("r") and len(engine.attempts("r")) == 1
    engine.end()


def test_b21_no_second_attempt_without_another_peer_or_without_time(engine):
    engine.set_peers("p")
    engine.add("r", long(engine))
    engine.lost(engine.attempts("r")[-1])
    assert engine.is_answered("r") and len(engine.attempts("r")) == 1
    engine.set_peers("p", "q")
    engine.add("s", long(engine, 300))
    engine.later(DEADLINE_S)
    engine.lost(engine.attempts("s")[-1])
    assert engine.is_answered("s") and len(engine.attempts("s")) == 1
    engine.end()


def test_b25_an_aborted_prompt_has_its_blocks_fenced_until_they_are_released(engine):
    engine.add("r", long(engine))
    attempt = engine.attempts("r")[-1]
    engine.abort("r")
    for number in range(6):  # of other blocks
        engine.add(f"s{number}", tokens_of(engine, 2, 0, 300 + 100 * number))
        engine.write(attempt)  # late
    engine.release(attempt)
    engine.end()


def test_b43_an_engine_that_has_left_parks_nothing_new(engine):
    engine.add("a", long(engine))
    engine.hand_nothing_over()
    engine.add("b", long(engine, 300))
    assert engine.is_answered("b") and engine.is_parked("a") and not engine.attempts("b")
    engine.prefilled(engine.attempts("a")[-1])
    engine.end()
