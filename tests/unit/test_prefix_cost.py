# SPDX-License-Identifier: Apache-2.0
"""B5: whether reading a prefix is cheaper than computing it, from what was measured."""

import pytest

from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.decisions.prefix import MIN_BYTES, PrefixCost, PrefixReads

TOKEN_BYTES = 46_080  # of a model of 135 million parameters, in float32


@pytest.fixture
def speed() -> StepSpeed:
    return StepSpeed()


@pytest.fixture
def cost(speed) -> PrefixCost:
    return PrefixCost(PrefixReads.AUTO, TOKEN_BYTES, speed)


def feed(cost: PrefixCost, speed: StepSpeed, *, bytes_per_s: float, tokens_per_s: float) -> None:
    for _ in range(100):
        cost.moved(1000, 1000 * TOKEN_BYTES / bytes_per_s)
        speed.stepped(0.0, 1000, 0, 1000 / tokens_per_s)


def test_b5_a_long_prefix_is_read_and_a_few_tokens_are_computed(cost):
    assert cost.worth_reading(2000)
    assert not cost.worth_reading(16)  # a read takes a step of its own


def test_b5_nothing_is_read_where_nothing_lacks():
    for wanted in PrefixReads:
        assert not PrefixCost(wanted, TOKEN_BYTES, StepSpeed()).worth_reading(0)
        assert not PrefixCost(wanted, TOKEN_BYTES, StepSpeed()).worth_reading(-16)


def test_b5_the_operator_may_decide():
    assert PrefixCost(PrefixReads.ALWAYS, 10**9, StepSpeed()).worth_reading(16)
    assert not PrefixCost(PrefixReads.NEVER, 1, StepSpeed()).worth_reading(10**6)


def test_b5_what_was_measured_decides(cost, speed):
    feed(cost, speed, bytes_per_s=1e6, tokens_per_s=1e5)
    assert not cost.worth_reading(2000)
    assert cost.read_s(2000) == pytest.approx(2000 * TOKEN_BYTES / 1e6, rel=0.05)
    assert cost.compute_s(2000) == pytest.approx(0.02, rel=0.05)
    feed(cost, speed, bytes_per_s=1e10, tokens_per_s=1e3)
    assert cost.worth_reading(2000)


def test_b5_small_and_impossible_observations_teach_nothing(cost):
    before = cost.read_s(1000)
    cost.moved(MIN_BYTES // TOKEN_BYTES - 1, 100.0)
    cost.moved(10**6, 0.0)
    assert cost.read_s(1000) == before
