# SPDX-License-Identifier: Apache-2.0
"""How long a peer's job waits for what this engine has parked."""
from vllm_pd.core.mutual import BLOCKED_S, JobPatience


def test_where_nothing_moves_it_is_given_back_at_once():
    patience = JobPatience()
    assert not patience.is_over(0.0, moving=False), "no step was scheduled yet"
    patience.scheduled(0.0, blocked=True)
    assert patience.is_over(0.0, moving=False)


def test_where_something_moves_it_waits_a_while_from_the_first_step_that_left_it_out():
    patience = JobPatience()
    patience.scheduled(10.0, blocked=True)
    patience.scheduled(10.0 + BLOCKED_S / 2, blocked=True)
    assert not patience.is_over(9.9 + BLOCKED_S, moving=True)
    assert patience.is_over(10.0 + BLOCKED_S, moving=True)


def test_a_step_that_begins_a_prompt_starts_the_time_anew():
    patience = JobPatience()
    patience.scheduled(10.0, blocked=True)
    patience.scheduled(10.9, blocked=False)
    assert not patience.is_over(20.0, moving=True) and not patience.is_over(20.0, moving=False)
    patience.scheduled(21.0, blocked=True)
    assert not patience.is_over(21.5, moving=True)
