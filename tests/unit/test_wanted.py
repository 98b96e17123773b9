# SPDX-License-Identifier: Apache-2.0
"""How many engines a fleet wants: `vllm_pd.decisions.demand`, `wanted`."""
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.decisions.demand import Demand, DemandMeter, FleetLook, Targets
from vllm_pd.decisions.wanted import WantedBounds, WantedCounter, WantedEngines, engines_now

TARGETS = Targets(5.0, 0.04)
BOUNDS = WantedBounds(hold_s=300.0, most=16)


def demand(at_s=10.0, rate=4.0, prefill_s=1.2, answer_tokens=170.0, **more) -> Demand:
    """At these defaults 4.8 engines of prefill and 1.7 of decode."""
    return Demand(at_s, 10.0, rate, prefill_s, answer_tokens, 0.02, 0.00125, **more)


def test_demand_is_work_in_engines():
    assert demand().prefill_engines() == pytest.approx(4.8)
    assert demand().seats(0.04) == pytest.approx(16)
    assert demand().decode_engines(0.04) == pytest.approx(1.7)


def test_the_meter_counts_what_arrives_and_not_what_is_served():
    meter = DemandMeter(TARGETS)
    assert meter.receive(FleetLook(0.0)) is None, "nothing to compare with"
    found = meter.receive(FleetLook(10.0, arrived=40, prompt_tokens=120_000, waiting_tokens=360_000,
                                    waiting=30, tokens_per_s=10_000))
    assert found.prefill_engines() == pytest.approx(4.8), "30 prompts wait that nobody has computed"


def test_the_meter_finds_the_line_of_the_time_between_tokens():
    meter = DemandMeter(TARGETS)
    for number in range(20):
        running = 4.0 + number
        found = meter.receive(FleetLook(10.0 * number, arrived=1, running=running, decodes=1,
                                        itl_s=0.02 + 0.00125 * running))
    assert found.base_s == pytest.approx(0.02) and found.slope_s == pytest.approx(0.00125)


def test_few_requests_are_not_what_makes_the_time_between_tokens_long():
    """Of a large fleet with little to do. It would want more of what has nothing to do."""
    meter = DemandMeter(TARGETS)
    for number in range(20):
        found = meter.receive(FleetLook(10.0 * number, arrived=40, running=10, decodes=10, itl_s=0.02125))
    assert found.seats(0.04) > 16


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e6))
looks = st.builds(FleetLook, at_s=numbers, **{
    name: numbers for name in FleetLook.__struct_fields__ if name not in ("at_s", "decodes")},
    decodes=st.integers(-2, 9))


@settings(max_examples=30, deadline=None)
@given(st.lists(looks, max_size=5))
def test_b80_whatever_is_counted_gives_numbers_in_bounds(hostile):
    meter, counter = DemandMeter(TARGETS), WantedCounter(TARGETS, BOUNDS)
    for look in hostile:
        found = meter.receive(look)
        if found is not None:
            assert all(math.isfinite(value) and value >= 0 for value in msgspec.structs.astuple(found))
            wanted = counter.receive(found)
            assert 1 <= wanted.prefills <= 16 and 1 <= wanted.decodes <= 16


@given(st.floats(0, 50), st.floats(0.01, 5), st.floats(1, 3000), st.floats(1, 4))
def test_more_demand_never_wants_fewer(rate, prefill_s, answer_tokens, factor):
    less = engines_now(demand(rate=rate, prefill_s=prefill_s, answer_tokens=answer_tokens), TARGETS, BOUNDS)
    more = engines_now(demand(rate=rate * factor, prefill_s=prefill_s, answer_tokens=answer_tokens), TARGETS, BOUNDS)
    assert more.prefills >= less.prefills and more.decodes >= less.decodes


def test_late_requests_want_more_prefill_though_nothing_waits():
    assert engines_now(demand(late=0.5), TARGETS, BOUNDS).prefills > engines_now(demand(), TARGETS, BOUNDS).prefills


def test_a_backlog_wants_more_of_its_role():
    usual = engines_now(demand(), TARGETS, BOUNDS)
    assert usual == WantedEngines(6, 3)
    assert engines_now(demand(waiting=900), TARGETS, BOUNDS).prefills > usual.prefills
    assert engines_now(demand(running=160), TARGETS, BOUNDS) == WantedEngines(6, 13)


def test_up_after_two_looks_and_down_when_it_was_not_needed_for_long():
    counter = WantedCounter(TARGETS, BOUNDS)
    calm, busy = {"rate": 1.0}, {"rate": 4.0}
    assert counter.receive(demand(10.0, **calm)).prefills == 2
    assert counter.receive(demand(20.0, **busy)).prefills == 2, "one look may be chance"
    assert counter.receive(demand(30.0, **busy)).prefills == 6
    for at_s in range(40, 331, 10):
        assert counter.receive(demand(float(at_s), **calm)).prefills == 6, at_s
    assert counter.receive(demand(340.0, **calm)).prefills == 2
