# SPDX-License-Identifier: Apache-2.0
"""How a decode engine's estimates start, stay fresh and age."""
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.decisions.expected import expect
from vllm_pd.decisions.measured import (
    HALF_LIFE_S,
    LAST_PROMPTS,
    START_MOVED_PER_S,
    START_OVERHEAD_S,
    ArrivalRate,
    DecodeMeasures,
    StepSpeed,
    StepTimer,
    aged,
    aged_rate,
)

LONG_AGO_S = 100 * HALF_LIFE_S


@pytest.fixture
def speed():
    return StepSpeed()


@pytest.fixture
def measures(speed):
    return DecodeMeasures(512, speed)


def compute(speed: StepSpeed, now: float, tokens_per_s: float, step_s: float = 0.02) -> None:
    for _ in range(200):
        speed.stepped(now, 0, 4, step_s)
        speed.stepped(now, 100, 4, step_s + 100 / tokens_per_s)


def test_a_speed_is_that_of_prompt_tokens_beyond_the_step(speed):
    compute(speed, 0.0, 500.0)
    assert speed.step_s == pytest.approx(0.02) and speed.tokens_per_s == pytest.approx(500.0)
    compute(speed, 0.0, 2000.0, step_s=0.01)
    assert speed.step_s == pytest.approx(0.01) and speed.tokens_per_s == pytest.approx(2000.0, rel=0.01)


def test_steps_that_say_nothing_teach_nothing(speed):
    speed.stepped(0.0, 0, 0, 5.0)  # nobody decodes
    speed.stepped(0.0, 63, 4, 5.0)  # too few tokens
    speed.stepped(0.0, 1000, 4, 0.0)
    assert (speed.step_s, speed.tokens_per_s) == (0.0, 0.0)


def test_a_step_with_a_prompt_that_is_no_longer_than_one_without_is_no_endless_speed(speed):
    speed.stepped(0.0, 0, 4, 1.0)
    speed.stepped(0.0, 100, 4, 0.5)
    assert speed.tokens_per_s == pytest.approx(100 / 0.05)


def test_nothing_is_expected_until_any_speed_is_known(speed, measures):
    def now():
        here = measures.here(0.0, 0, 0, [0.0, 0.0])
        return expect(100, here, measures.there(0.0, 100, 0, [(0, 0.0), (0, 0.0)]))

    assert now() is None
    compute(speed, 0.0, 500.0)
    assert now() is not None


def test_who_has_not_measured_is_as_fast_as_the_others(speed, measures):
    assert measures.here(0.0, 0, 0, [0.0, 300.0, 500.0]).tokens_per_s == pytest.approx(400.0)
    assert measures.there(0.0, 100, 0, [(5, 0.0), (7, 500.0)]).busy == ((5, 500.0), (7, 500.0))
    compute(speed, 0.0, 1000.0)
    assert measures.there(0.0, 100, 0, [(5, 0.0)]).busy == ((5, pytest.approx(1000.0)), )


def test_a_speed_that_nobody_measures_any_more_becomes_the_mean(speed, measures):
    compute(speed, 0.0, 1000.0)
    assert measures.here(0.0, 0, 0, [500.0]).tokens_per_s == pytest.approx(1000.0)
    assert measures.here(HALF_LIFE_S, 0, 0, [500.0]).tokens_per_s == pytest.approx((1000 * 750) ** 0.5)
    assert measures.here(LONG_AGO_S, 0, 0, [500.0]).tokens_per_s == pytest.approx(750.0)
    assert measures.there(LONG_AGO_S, 100, 0, [(0, 500.0)]).busy[0][1] == pytest.approx(500.0), "it has just begun"
    measures.handed_over(LONG_AGO_S, 100, 0.1, 0.1, 0.0)
    assert measures.there(LONG_AGO_S, 100, 0, [(0, 500.0)]).busy[0][1] == pytest.approx(500.0)
    assert measures.there(2 * LONG_AGO_S, 100, 0, [(0, 500.0)]).busy[0][1] == pytest.approx(750.0)


def test_a_p_that_was_slow_once_is_tried_again(speed, measures):
    """Its first job took its time, as a cold engine's does; D never goes there again and so measures nothing new."""
    compute(speed, 0.0, 1000.0)
    measures.handed_over(0.0, 1000, 100.0, 100.0, 0.0)

    def sooner_there(now: float) -> bool:
        compute(speed, now, 1000.0)
        here = measures.here(now, 2000, 4, [10.0])
        return expect(1000, here, measures.there(now, 1000, 0, [(0, 10.0)])).sooner_there

    assert not sooner_there(1.0)
    assert sooner_there(10 * HALF_LIFE_S)


def test_what_a_hand_over_takes_beside_waiting_computing_and_writing(measures):
    assert measures.there(0.0, 100, 0, [(0, 1.0)]).overhead_s == START_OVERHEAD_S
    for _ in range(50):
        measures.handed_over(0.0, 1000, total_s=2.0, known_s=1.2, transfer_s=0.5)
    there = measures.there(0.0, 500, 0, [(0, 1.0)])
    assert there.overhead_s == pytest.approx(0.3, rel=0.01) and there.transfer_s == pytest.approx(0.25, rel=0.01)
    there = measures.there(HALF_LIFE_S, 500, 0, [(0, 1.0)])
    assert there.overhead_s == pytest.approx((0.3 + START_OVERHEAD_S) / 2, rel=0.01)
    assert measures.there(LONG_AGO_S, 500, 0, [(0, 1.0)]).overhead_s == pytest.approx(START_OVERHEAD_S)


def test_hand_overs_that_waited_for_a_long_step_here_do_not_speak_against_the_next(measures):
    """Else an engine that has computed a long prompt itself would do so again and again."""
    measures.handed_over(0.0, 1000, total_s=1.71, known_s=1.2, transfer_s=0.5)
    for number in range(7):
        measures.handed_over(1.0 + number, 1000, total_s=4.0, known_s=1.2, transfer_s=0.5)
        assert measures.there(1.0 + number, 500, 0, [(0, 1.0)]).overhead_s == pytest.approx(0.01)
    measures.handed_over(9.0, 1000, total_s=4.0, known_s=1.2, transfer_s=0.5)
    assert measures.there(9.0, 500, 0, [(0, 1.0)]).overhead_s == pytest.approx(2.3), "a slow network stays slow"
    measures.handed_over(9.0 + 2 * HALF_LIFE_S, 1000, total_s=1.9, known_s=1.2, transfer_s=0.5)
    assert measures.there(9.0 + 2 * HALF_LIFE_S, 500, 0, [(0, 1.0)]).overhead_s == pytest.approx(0.2), "those are old"


def test_parts_that_overlap_leave_no_negative_overhead(measures):
    for _ in range(50):
        measures.handed_over(0.0, 1000, total_s=1.0, known_s=1.2, transfer_s=0.5)
    assert 0.0 <= measures.there(0.0, 500, 0, [(0, 1.0)]).overhead_s < 1e-4


@pytest.mark.parametrize("tokens, seconds", [(256, 0.05), (512, 0.1), (4000, 0.1), (8000, 0.1), (16000, 0.2)])
def test_b100_where_blocks_leave_early_a_short_prompt_still_takes_the_time_of_its_only_write(measures, tokens, seconds):
    """All hand-overs were of 8,000 tokens, of which 512 were left when they were computed."""
    for _ in range(200):
        measures.handed_over(0.0, 8000, total_s=2.1, known_s=2.0, transfer_s=0.1, last_tokens=512)
    assert measures.there(0.0, tokens, 0, [(0, 1.0)]).transfer_s == pytest.approx(seconds, rel=0.01)
    assert measures.there(LONG_AGO_S, tokens, 0, [(0, 1.0)]).transfer_s == pytest.approx(tokens / START_MOVED_PER_S)


def test_how_many_come():
    rate = ArrivalRate()
    assert rate.per_s(50.0) == 0.0
    for number in range(200):
        rate.came(100.0 + number / 4)
    assert rate.per_s(150.0) == pytest.approx(4.0, rel=0.05), "from the first on"
    assert rate.per_s(150.0 + HALF_LIFE_S) == pytest.approx(4.0 / 2, rel=0.3)
    assert rate.per_s(150.0 + LONG_AGO_S) < 1e-9


def test_prompts_are_counted_where_they_go(measures):
    for number in range(400):
        measures.decided(number / 4, remote=number % 4 == 0, tokens=number)
    assert measures.here(100.0, 0, 0, [1.0]).prompts_per_s == pytest.approx(4.0, rel=0.05)
    there = measures.there(100.0, 1, 0, [(0, 1.0)])
    assert there.prompts_per_s == pytest.approx(1.0, rel=0.1)
    assert there.later_tokens == tuple(range(396 - 4 * (LAST_PROMPTS - 1), 400, 4)), "the last that left"


class Steps(StepSpeed):

    def __init__(self):
        super().__init__()
        self.seen = []

    def stepped(self, now, prompt_tokens, decodes, seconds):
        self.seen.append((prompt_tokens, decodes, pytest.approx(seconds)))


def test_a_step_lasts_from_its_begin_or_from_the_end_of_the_one_before():
    steps = Steps()
    timer = StepTimer(steps)
    timer.began(10.0, 1, [1, 1, 100])
    timer.began(10.1, 2, [1, 1, 1])  # while the first one runs
    timer.ended(10.5, 1)
    timer.ended(10.6, 2)
    timer.began(20.0, 4, [7])  # number 3 was empty
    timer.ended(20.0, 3)
    timer.ended(20.25, 4)
    timer.ended(21.0, 4)
    assert steps.seen == [(100, 2, 0.5), (0, 3, 0.1), (7, 0, 0.25)]


def test_a_step_whose_end_nobody_saw_is_no_step_of_another():
    steps = Steps()
    timer = StepTimer(steps)
    for number in range(1000):
        timer.began(float(number), number, [1])
    timer.ended(1000.0, 999)
    assert steps.seen == [(0, 1, 1.0)]


@given(st.floats(1e-3, 1e9), st.floats(1e-3, 1e9), st.floats(-10, 1e9), st.sampled_from([aged, aged_rate]))
def test_what_ages_stays_between(measured, reference, age_s, age):
    found = age(measured, reference, age_s)
    assert not math.isnan(found)
    slack = 1e-6 + 1e-9 * max(measured, reference)
    assert age(measured, reference, 0.0) == pytest.approx(measured, rel=1e-6, abs=1e-6)
    assert min(measured, reference) - slack <= found <= max(measured, reference) + slack
