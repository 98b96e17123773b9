# SPDX-License-Identifier: Apache-2.0
"""How long a peer's job waits for what this engine has parked."""
from vllm_pd.decisions.mutual import BLOCKED_S, JobPatience
from vllm_pd.protocol.messages import Attempt

ONE, TWO = (Attempt("decode-incarnation", "request", number) for number in range(2))


def test_where_nothing_moves_it_is_given_back_at_once():
    patience = JobPatience()
    assert patience.take_over(0.0, False, [ONE]) == [], "no step was scheduled yet"
    patience.scheduled(0.0, [ONE])
    assert patience.take_over(0.0, False, [ONE]) == [ONE]


def test_where_something_moves_it_waits_a_while_from_the_first_step_that_left_it_out():
    patience = JobPatience()
    assert patience.next_look() is None
    patience.scheduled(10.0, [ONE])
    patience.scheduled(10.0 + BLOCKED_S / 2, [ONE, TWO])
    assert patience.next_look() == 10.0 + BLOCKED_S
    assert patience.take_over(9.9 + BLOCKED_S, True, [ONE, TWO]) == []
    assert patience.take_over(10.0 + BLOCKED_S, True, [ONE, TWO]) == [ONE]
    assert patience.next_look() == 10.0 + 1.5 * BLOCKED_S


def test_a_step_that_begins_a_prompt_starts_the_time_anew():
    patience = JobPatience()
    patience.scheduled(10.0, [ONE])
    patience.scheduled(10.9, [])
    assert patience.take_over(20.0, True, [ONE]) == patience.take_over(20.0, False, [ONE]) == []
    patience.scheduled(21.0, [ONE])
    assert patience.take_over(21.5, True, [ONE]) == []


def test_no_job_is_given_back_for_what_happened_to_another():
    """Neither for one that was given back before it came, nor for one that was cancelled."""
    patience = JobPatience()
    patience.scheduled(10.0, [ONE])
    assert patience.take_over(20.0, False, [ONE]) == [ONE]
    assert patience.take_over(30.0, False, [ONE, TWO]) == []
    patience.scheduled(40.0, [ONE])
    assert patience.take_over(50.0, False, [TWO]) == []
    assert patience.next_look() is None
