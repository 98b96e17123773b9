# SPDX-License-Identifier: Apache-2.0
"""What becomes of prompts that belong at a prefill engine and can't go there (`fallback: bounded | refuse`)."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.decisions.fallback import (
    MAX_WAITING,
    FallbackAnswer,
    FallbackConfig,
    FallbackRule,
    Fallbacks,
    is_fallback,
)
from vllm_pd.decisions.policy import Decision, Reason

LOCAL, WAIT, REFUSED = FallbackAnswer.LOCAL, FallbackAnswer.WAIT, FallbackAnswer.REFUSE


class Prompts:
    """A decode engine's prompts by name, and what is to be computed of each that was begun."""

    def __init__(self, rule: FallbackRule = FallbackRule.BOUNDED, tokens: int = 100, wait_s: float = 10.0) -> None:
        self.left: dict[str, int] = {}
        self.fallbacks: Fallbacks[str] = Fallbacks(FallbackConfig(rule, tokens, wait_s), lambda one: self.left[one])

    def ask(self, now: float, prompt: str, tokens: int, reason: Reason = Reason.PEER) -> FallbackAnswer:
        return self.fallbacks.ask(now, prompt, tokens, reason)

    def begin(self, prompt: str, tokens: int) -> None:
        self.left[prompt] = tokens
        self.fallbacks.begin(prompt, tokens)


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("remote", [False, True])
def test_which_decisions_are_fallbacks(reason, remote):
    """Those that an operator sees as prompts which D computes against its policy; no other."""
    expected = not remote and reason.value in ("retry", "broker", "peer", "queue", "cap")
    assert is_fallback(Decision(remote, reason)) is expected


def test_no_more_than_the_bound_is_here_at_a_time():
    one = Prompts()
    assert one.ask(0.0, "a", 60) is LOCAL
    one.begin("a", 60)
    assert one.ask(0.0, "b", 41) is WAIT
    one.fallbacks.begin_round()
    one.left["a"] = 59
    assert one.ask(0.1, "b", 41) is LOCAL
    one.begin("b", 41)
    assert one.fallbacks.tokens_here() == 100 and not one.fallbacks.waiting
    one.fallbacks.begin_round()
    assert one.ask(0.2, "c", 1) is WAIT
    one.left["a"] = one.left["b"] = 0
    one.fallbacks.begin_round()
    assert one.ask(0.3, "c", 100) is LOCAL


@pytest.mark.parametrize("rule", [FallbackRule.BOUNDED, FallbackRule.REFUSE])
def test_only_so_many_wait_and_a_further_one_is_refused_at_once(rule):
    fallbacks = Fallbacks(FallbackConfig(rule, tokens=10, wait_s=5.0), lambda prompt: 10)
    fallbacks.begin("here", 10)
    for number in range(MAX_WAITING):
        assert fallbacks.ask(0.0, number, 10, Reason.PEER) is FallbackAnswer.WAIT
    assert fallbacks.ask(0.0, "one more", 10, Reason.PEER) is FallbackAnswer.REFUSE
    assert fallbacks.ask(1.0, 7, 10, Reason.PEER) is FallbackAnswer.WAIT and len(fallbacks.waiting) == MAX_WAITING
    fallbacks.forget(7)
    assert fallbacks.ask(1.0, "another", 10, Reason.PEER) is FallbackAnswer.WAIT


def test_a_prompt_that_is_larger_than_the_bound_goes_alone():
    one = Prompts()
    one.begin("a", 1)
    assert one.ask(0.0, "large", 1000) is WAIT
    one.left["a"] = 0
    one.fallbacks.begin_round()
    assert one.ask(1.0, "large", 1000) is LOCAL
    one.begin("large", 1000)
    one.fallbacks.begin_round()
    assert one.ask(1.0, "b", 1) is WAIT
    one.left["large"] = 99
    one.fallbacks.begin_round()
    assert one.ask(2.0, "b", 1) is LOCAL, "with what is left of it there is room"


def test_short_ones_do_not_pass_one_that_waits_for_room():
    """In the order in which the engine asks, which is that of its queue."""
    one = Prompts()
    one.begin("a", 60)
    assert one.ask(0.0, "long", 90) is WAIT and one.ask(0.0, "short", 1) is WAIT
    one.left["a"] = 10
    one.fallbacks.begin_round()
    assert one.ask(0.1, "long", 90) is LOCAL
    one.begin("long", 90)
    assert one.ask(0.1, "short", 1) is WAIT


@pytest.mark.parametrize("rule", [FallbackRule.BOUNDED, FallbackRule.REFUSE])
def test_a_prompt_is_refused_at_its_deadline(rule):
    one = Prompts(rule)
    one.begin("a", 100)
    assert one.ask(5.0, "b", 50) is WAIT and one.fallbacks.next_deadline == 15.0
    assert one.fallbacks.overdue(14.9) == []
    assert one.ask(14.9, "b", 50) is WAIT, "its deadline stays what it is"
    assert one.fallbacks.overdue(15.0) == ["b"] and one.ask(15.0, "b", 50) is REFUSED
    assert not one.fallbacks.waiting and one.fallbacks.next_deadline is None


@pytest.mark.parametrize("rule", [FallbackRule.BOUNDED, FallbackRule.REFUSE])
def test_without_a_time_to_wait_it_is_refused_at_once(rule):
    one = Prompts(rule, wait_s=0.0)
    one.begin("a", 100)
    assert one.ask(0.0, "b", 50) is REFUSED and not one.fallbacks.waiting


@pytest.mark.parametrize("reason", [Reason.PEER, Reason.BROKER, Reason.QUEUE, Reason.CAP, Reason.RETRY])
def test_refuse_computes_none_here_and_waits_only_for_what_may_pass(reason):
    one = Prompts(FallbackRule.REFUSE)
    assert one.ask(0.0, "a", 1, reason) is (REFUSED if reason is Reason.RETRY else WAIT)


def test_bounded_has_room_for_one_whose_attempts_are_used_up():
    one = Prompts()
    assert one.ask(0.0, "a", 60, Reason.RETRY) is LOCAL
    one.begin("a", 60)
    assert one.ask(0.0, "b", 60, Reason.RETRY) is WAIT


def test_one_that_goes_to_a_peer_or_ends_waits_no_more_and_begins_anew_later():
    one = Prompts(FallbackRule.REFUSE)
    assert one.ask(0.0, "a", 1) is WAIT and one.ask(1.0, "b", 1) is WAIT
    one.fallbacks.forget("a")
    one.fallbacks.forget("never seen")
    assert list(one.fallbacks.waiting) == ["b"] and one.fallbacks.next_deadline == 11.0
    assert one.ask(9.0, "a", 1) is WAIT and list(one.fallbacks.waiting) == ["b", "a"]
    assert one.fallbacks.overdue(15.0) == ["b"] and one.fallbacks.overdue(19.0) == ["b", "a"]


STEPS = st.lists(st.one_of(
    st.tuples(st.just("new"), st.integers(1, 150), st.sampled_from([Reason.PEER, Reason.RETRY, Reason.CAP])),
    st.tuples(st.just("pass"), st.floats(0.0, 4.0), st.just(None)),
    st.tuples(st.just("compute"), st.integers(1, 120), st.just(None)),
    st.tuples(st.just("leave"), st.integers(0, 9), st.just(None)),
    st.tuples(st.just("peer"), st.integers(0, 9), st.just(None))), max_size=60)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.sampled_from([FallbackRule.BOUNDED, FallbackRule.REFUSE]), st.sampled_from([0.0, 5.0]))
def test_any_history(steps, rule, wait_s):
    """An engine that asks about all that wait after each thing that happens. Never more than the bound is here but for
    one that is alone, and no prompt waits beyond its deadline."""
    one, bound, now, queue, asked, number = Prompts(rule, 100, wait_s), 100, 0.0, {}, {}, 0
    for what, value, reason in steps:
        if what == "new":
            queue[f"r{(number := number + 1)}"] = value, reason
        elif what == "pass":
            now += value
        elif what == "compute":
            for prompt in one.left:
                done = min(value, one.left[prompt])
                one.left[prompt] -= done
                value -= done
        elif queue:  # its client leaves, or a peer has it
            gone = list(queue)[value % len(queue)]
            del queue[gone]
            asked.pop(gone, None)
            one.fallbacks.forget(gone)
        one.fallbacks.begin_round()
        for prompt, (tokens, why) in list(queue.items()):
            asked.setdefault(prompt, now)
            answer = one.ask(now, prompt, tokens, why)
            assert answer is not LOCAL or rule is FallbackRule.BOUNDED
            if answer is LOCAL:
                one.begin(prompt, tokens)
            if answer is WAIT:
                assert now < asked[prompt] + wait_s and prompt in one.fallbacks.waiting
            else:
                del queue[prompt], asked[prompt]
        here = [left for left in one.left.values() if left]
        assert sum(here) == one.fallbacks.tokens_here()
        assert sum(here) <= bound or len(here) == 1
        assert list(one.fallbacks.waiting) == sorted(queue, key=lambda one: asked[one])
        assert one.fallbacks.overdue(now) == []
        assert one.fallbacks.next_deadline == min((asked[prompt] + wait_s for prompt in queue), default=None)
