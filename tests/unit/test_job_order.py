# SPDX-License-Identifier: Apache-2.0
"""The order of a prefill engine's jobs, and the size of its steps."""
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.decisions.job_order import (
    MIN_STEP_TOKENS,
    BegunJob,
    Turn,
    due_s,
    in_turn,
    may_begin,
    step_tokens,
    tokens_of_each,
)
from vllm_pd.decisions.prefix import START_TOKENS_PER_S

SPEEDS = st.floats(0, 1e9)
TIMES = st.floats(0, 1e6)
TOKENS = st.integers(1, 4_000_000)
TURNS = st.builds(Turn, st.integers(-5, 5), TIMES)
BEGUN = st.lists(st.builds(BegunJob, TURNS, st.integers(0, 5000)), max_size=8)


@given(TIMES, TOKENS, SPEEDS, st.floats(0, 1000))
def test_a_job_is_due_when_it_arrives_or_later(arrived, tokens, speed, overtaking):
    assert arrived <= due_s(arrived, tokens, speed, overtaking, 30) <= arrived + 30


@given(TIMES, TIMES, TOKENS, TOKENS, SPEEDS)
def test_without_overtaking_the_order_is_that_of_arrival(first, second, tokens, others, speed):
    assert (due_s(first, tokens, speed, 0, 30) < due_s(second, others, speed, 0, 30)) is (first < second)


@given(TIMES, st.integers(1, 10_000), st.integers(1, 10_000), st.floats(1, 1e6), st.floats(0, 1000), st.floats(0, 1e4))
def test_nobody_is_passed_without_end(arrived, tokens, others, speed, overtaking, later):
    """What arrives later than `overtaking` times a job's own time after it comes after it, whatever its length."""
    if later > min(30, overtaking * tokens / speed):
        assert due_s(arrived, tokens, speed, overtaking, 30) <= due_s(arrived + later, others, speed, overtaking, 30)


def test_a_short_job_passes_a_long_one_that_came_a_while_before():
    long = due_s(0.0, 1300, 500, 8, 30)
    assert due_s(20.0, 40, 500, 8, 30) < long < due_s(20.5, 40, 500, 8, 30)
    assert due_s(29.0, 40, 500, 8, 30) < due_s(0.0, 30_000, 500, 8, 30) < due_s(30.0, 40, 500, 8, 30)


QUEUES = st.lists(st.one_of(st.none(), TURNS), max_size=30).map(lambda turns: list(enumerate(turns)))


@given(QUEUES)
def test_b102_jobs_that_wait_next_to_each_other_are_in_their_turn_and_nobody_passes_another(queue):
    ordered = in_turn(queue, lambda one: one[1])
    assert sorted(ordered, key=lambda one: one[0]) == queue
    assert in_turn(ordered, lambda one: one[1]) == ordered, "it is in order then"
    for place, (number, turn) in enumerate(ordered):
        if turn is None:
            assert place == number
            assert {other for other, _ in ordered[:place]} == set(range(number))
        elif place and ordered[place - 1][1] is not None:
            assert (ordered[place - 1][1], ordered[place - 1][0]) <= (turn, number), "and of equals the first is first"


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 100_000)), max_size=20), st.floats(1, 1e5),
       st.floats(0, 1000), st.floats(0, 60))
def test_b102_nobody_is_passed_by_one_that_comes_after_it_is_due(jobs, speed, overtaking, most):
    """Jobs in the order of their arrival, in seconds, and their tokens."""
    arrived = sorted(jobs, key=lambda job: job[0])
    due = {place: due_s(at, tokens, speed, overtaking, most) for place, (at, tokens) in enumerate(arrived)}
    ordered = in_turn(range(len(arrived)), lambda place: Turn(0, due[place]))
    for one in ordered:
        passed_by = [other for other in ordered[:ordered.index(one)] if other > one]
        assert all(arrived[other][0] < due[one] <= arrived[one][0] + most for other in passed_by)


@given(SPEEDS, st.floats(0.001, 3600), st.integers(1, 1 << 20))
def test_a_step_has_some_tokens_and_no_more_than_the_engine_takes(speed, step_s, most):
    tokens = step_tokens(speed, step_s, most)
    assert min(most, MIN_STEP_TOKENS) <= tokens <= most
    assert tokens <= max(MIN_STEP_TOKENS, (speed or START_TOKENS_PER_S) * step_s)


def test_the_speed_decides_how_long_a_step_is():
    assert [step_tokens(speed, 0.25, 2048) for speed in (0, 10, 550, 4000, 20_000)] == [1216, 64, 128, 960, 2048]


@given(TURNS, BEGUN, st.integers(1, 4096))
def test_a_job_begins_where_those_before_it_leave_room(turn, begun, tokens):
    before = sum(job.tokens_left for job in begun if job.turn <= turn)
    assert may_begin(turn, begun, tokens) is (before < tokens)


@given(TURNS, BEGUN, st.integers(1, 4096))
def test_the_next_job_of_all_begins_at_once(turn, begun, tokens):
    assert may_begin(turn, [job for job in begun if job.turn > turn], tokens)
    assert may_begin(turn, [], tokens)


def test_priority_comes_before_all_else():
    urgent, usual = Turn(-1, 100.0), Turn(0, 0.0)
    assert may_begin(urgent, [BegunJob(usual, 1000)], 100) and not may_begin(usual, [BegunJob(urgent, 1000)], 100)


@given(st.integers(MIN_STEP_TOKENS, 1 << 20), st.integers(1, 1 << 20), st.integers(1, 60))
def test_a_job_that_passes_has_room_beside_those_it_passes(tokens, passing, begun):
    assert 1 <= tokens_of_each(tokens, passing, begun) <= max(1, tokens // (begun + 1))


def test_the_step_in_which_a_job_passes_is_short():
    assert [tokens_of_each(400, passing, 1) for passing in (10, 64, 100, 300)] == [64, 64, 100, 200]
    assert tokens_of_each(400, 300, 3) == 100
