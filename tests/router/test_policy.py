# SPDX-License-Identifier: Apache-2.0
"""Who gets a request, and what is said about it."""
import random
from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.errors import ConfigError
from vllm_pd.router.policy import (
    MAX_HEADER_CHARS,
    MAX_SHOWN,
    Candidate,
    ChoiceReason,
    PlacementRequest,
    Policy,
    RoutingPolicyConfig,
    choose,
)

KV = RoutingPolicyConfig(overlap_weight=2.0, blocks_weight=1.0, open_weight=0.25)  # easy to reckon with
ASKED = PlacementRequest(prompt_tokens=1600, prompt_blocks=100, key="s1")


@dataclass
class Load:
    """As an engine tells it."""
    queued_prefill_tokens: int = 0
    used_blocks: int = 0
    remote_prefilling: int = 0
    total_blocks: int = 1000


def pick(candidates, config=KV, request=ASKED, seed=0):
    return choose(config, request, candidates, random.Random(seed))


def idle(name: str, overlap: int = 0, **load: int) -> Candidate:
    return Candidate(name, overlap, load=Load(**load))


@pytest.mark.parametrize("policy", Policy)
def test_nobody_and_one(policy):
    config = RoutingPolicyConfig(policy=policy)
    assert pick([], config) is None
    alone = pick([idle("a", 3)], config)
    assert (alone.worker, alone.reason, alone.overlap_blocks, alone.candidates) == ("a", ChoiceReason.ONLY, 3, 1)


@pytest.mark.parametrize("a, b, chosen, reason", [
    (idle("a", 60), idle("b", 20), "a", ChoiceReason.OVERLAP),
    (idle("a", 60), idle("b", 60, used_blocks=10), "a", ChoiceReason.LOAD),
    (idle("a", 60, queued_prefill_tokens=1000), idle("b", 20), "a", ChoiceReason.OVERLAP),  # 0.8 gained, 0.625 waited
    (idle("a", 60, queued_prefill_tokens=1300), idle("b", 20), "b", ChoiceReason.LOAD),
    (idle("a", 60, used_blocks=900), idle("b", 20), "b", ChoiceReason.LOAD),
    (idle("a", 60, remote_prefilling=9), idle("b", 20), "b", ChoiceReason.LOAD),
    (idle("a"), idle("b", used_blocks=1), "a", ChoiceReason.LOAD),
    (Candidate("a", 60, 0, Load(), 1300), idle("b", 20), "b", ChoiceReason.LOAD),  # just sent, not told yet
    (Candidate("a", 60, in_flight=3), Candidate("b", 20), "a", ChoiceReason.OVERLAP),  # loads unknown
    (Candidate("a", 60, in_flight=4), Candidate("b", 20), "b", ChoiceReason.LOAD),
])
def test_overlap_and_load_are_weighed(a, b, chosen, reason):
    for candidates in ([a, b], [b, a]):
        choice = pick(candidates)
        assert (choice.worker, choice.reason) == (chosen, reason)


def test_a_short_prompt_does_not_wait_for_its_prefix():
    behind = idle("a", 5, queued_prefill_tokens=400)
    assert pick([behind, idle("b")], request=PlacementRequest(80, 5)).worker == "b"
    assert pick([msgspec.structs.replace(behind, overlap_blocks=100), idle("b")]).worker == "a"


def test_ties_are_drawn_by_lot_and_the_seed_decides():
    three = [idle(name, 10) for name in "abc"]
    drawn = [pick(three, seed=seed) for seed in range(300)]
    assert {choice.reason for choice in drawn} == {ChoiceReason.TIE}
    assert all(70 < count < 130 for count in Counter(choice.worker for choice in drawn).values())
    assert drawn[7] == pick(list(reversed(three)), seed=7)


def test_temperature_lets_others_have_a_share():
    two = [idle("a", 60), idle("b", 20)]
    warm = Counter(pick(two, msgspec.structs.replace(KV, temperature=0.8), seed=seed).reason for seed in range(400))
    assert 250 < warm[ChoiceReason.OVERLAP] < 330 and sum(warm.values()) == 400  # e to 1 is 73 %
    assert warm[ChoiceReason.DRAWN] == 400 - warm[ChoiceReason.OVERLAP]
    assert pick(two, msgspec.structs.replace(KV, temperature=1e-6), seed=1).worker == "a"


def test_without_a_prompt_it_goes_by_load():
    choice = pick([idle("a", queued_prefill_tokens=100), idle("b", queued_prefill_tokens=99)],
                  request=PlacementRequest())
    assert (choice.worker, choice.prompt_blocks) == ("b", 0)


def test_least_load_does_not_look_at_prefixes():
    config = RoutingPolicyConfig(policy=Policy.LEAST_LOAD)
    choice = pick([idle("a", 100, used_blocks=1), idle("b")], config)
    assert (choice.worker, choice.reason) == ("b", ChoiceReason.LOAD)
    assert pick([Candidate("a", in_flight=1), Candidate("b", in_flight=2)], config).worker == "a"


def test_round_robin_takes_turns_whatever_the_order():
    config = RoutingPolicyConfig(policy=Policy.ROUND_ROBIN)
    three = [idle(name) for name in "bca"]
    taken = [pick(three, config, PlacementRequest(turn=turn)) for turn in range(6)]
    assert [choice.worker for choice in taken] == list("abcabc")
    assert {choice.reason for choice in taken} == {ChoiceReason.TURN}


def test_a_consistent_hash_moves_only_what_it_must():
    config = RoutingPolicyConfig(policy=Policy.CONSISTENT_HASH)
    five = [idle(name) for name in "abcde"]
    keys = [f"session {number}" for number in range(1000)]
    before = {key: pick(five, config, PlacementRequest(key=key)).worker for key in keys}
    assert all(140 < count < 260 for count in Counter(before.values()).values())
    after = {key: pick(five[1:], config, PlacementRequest(key=key)).worker for key in keys}
    assert {key for key in keys if before[key] != after[key]} == {key for key in keys if before[key] == "a"}
    assert pick(five, config).reason is ChoiceReason.HASH


def test_an_explanation_is_short_whoever_is_chosen_among_however_many():
    drawn = RoutingPolicyConfig(temperature=100.0)
    for long in (0, 400):
        some = [Candidate(f"http://{'x' * long}{number}:1", number % 7) for number in range(50)]
        for seed in range(10):
            choice = choose(drawn, PlacementRequest(160, 10), some, random.Random(seed))
            assert len(choice.scores) == MAX_SHOWN and choice.worker in {score.name for score in choice.scores}
            assert len(choice.header()) <= MAX_HEADER_CHARS + 3
            assert "others=42" in choice.header() or long


def test_a_choice_explains_itself():
    choice = pick([idle("http://h:1", 60, used_blocks=500), idle("http://h:2", 20)])
    assert choice.header() == (
        "policy=kv; reason=overlap; worker=http://h:1; hit=60/100; of=2; score=0.700; "
        "overlap=1.200 waiting=-0.000 remote=-0.000 blocks=-0.500; http://h:2=0.400")
    turn = pick([idle("a"), idle("b")], RoutingPolicyConfig(policy=Policy.ROUND_ROBIN))
    assert turn.header() == "policy=round-robin; reason=turn; worker=a; hit=0/100; of=2"


@pytest.mark.parametrize("key, value", [("overlap_weight", -1), ("temperature", float("nan")), ("policy", "best"),
                                        ("blocks_weight", "1"), ("waiting_weight", float("inf")),
                                        ("open_weight", True)])
def test_b80_weights_that_mean_nothing_are_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        msgspec.structs.replace(KV, **{key: value}).check()
    assert KV.check() is KV


LOADS = st.one_of(st.none(), st.builds(Load, st.integers(0, 10**6), st.integers(0, 2000), st.integers(0, 500),
                                       st.integers(0, 2000)))
CANDIDATES = st.lists(st.builds(Candidate, st.text("abcdef", min_size=1, max_size=3), st.integers(0, 300),
                                st.integers(0, 1000), LOADS, st.integers(0, 10**6)),
                      min_size=1, max_size=8, unique_by=lambda candidate: candidate.name)


@settings(max_examples=200, deadline=None)
@given(CANDIDATES, st.sampled_from(Policy), st.floats(0, 10), st.builds(
    PlacementRequest, st.integers(0, 10**5), st.integers(0, 200), st.text(max_size=5), st.integers(0, 10**6)),
    st.integers())
def test_there_is_always_a_choice_and_nobody_beats_it(candidates, policy, temperature, request, seed):
    config = RoutingPolicyConfig(policy=policy, temperature=temperature)
    choice = choose(config, request, candidates, random.Random(seed))
    assert choice == choose(config, request, list(reversed(candidates)), random.Random(seed))
    assert choice.worker in {candidate.name for candidate in candidates}
    assert choice.header().isprintable() and choice.header().isascii()
    if choice.scores and choice.reason is not ChoiceReason.DRAWN:
        own = next(score.total for score in choice.scores if score.name == choice.worker)
        assert own >= choice.scores[0].total - 1e-9
