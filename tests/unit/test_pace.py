# SPDX-License-Identifier: Apache-2.0
"""How fast fallbacks are let in while others run."""
import pytest

from vllm_pd.decisions.pace import FallbackPace


def test_the_others_get_their_share():
    pace = FallbackPace(0.25)
    assert pace.may_begin(0.0, True)
    pace.began(0.0)
    assert not pace.may_begin(1.0, True), "one batch at a time"
    pace.ended(2.0)
    assert not pace.may_begin(7.9, True)
    assert pace.may_begin(8.0, True), "2 s of 8 s"


def test_nobody_to_spare():
    pace = FallbackPace(0.25)
    pace.began(0.0)
    pace.ended(2.0)
    assert pace.may_begin(2.0, False)


def test_share_one_is_no_limit():
    pace = FallbackPace(1.0)
    pace.began(0.0)
    pace.ended(2.0)
    assert pace.may_begin(2.0, True)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_last_of_many_begins_within_the_bound(share):
    pace, now = FallbackPace(share), 0.0
    for number in range(20):
        while not pace.may_begin(now, True):
            now += 0.01
        assert now <= number * 1.0 / share + 0.01 * number
        pace.began(now)
        now += 1.0
        pace.ended(now)


def test_an_end_without_a_batch_means_nothing():
    pace = FallbackPace(0.5)
    pace.ended(5.0)
    assert pace.may_begin(5.0, True)
