# SPDX-License-Identifier: Apache-2.0
"""How a fixed number of engines is divided: `vllm_pd.decisions.virtual_fleet`, `splits`."""
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.decisions import splits as rule
from vllm_pd.decisions import virtual_fleet
from vllm_pd.decisions.demand import Demand, DemandMeter, FleetLook, Targets
from vllm_pd.decisions.splits import SplitPlanner
from vllm_pd.decisions.virtual_fleet import VirtualFleet, VirtualRequest

TARGETS = Targets(5.0, 0.04)
BASE_S, SLOPE_S = 0.02, 0.00125
# Requests a second, seconds of prefill, answer tokens: the work of 4.8 prefill and 1.7 decode engines, and 1.6 and 4.8.
PREFILL, DECODE = (4.0, 1.2, 170.0), (4.0, 0.4, 480.0)


def steady(kind: tuple[float, float, float], seconds: float, begin_s: float = 0.0) -> list[VirtualRequest]:
    rate, prefill_s, answer_tokens = kind
    return [VirtualRequest(begin_s + number / rate, prefill_s, answer_tokens) for number in range(int(seconds * rate))]


def good(prefills: int, kind=PREFILL, seconds=600.0) -> float:
    """The share of good requests of eight engines."""
    fleet = VirtualFleet(8, prefills, TARGETS, 30.0, 8)
    requests = steady(kind, seconds)
    return (fleet.advance(requests, seconds, BASE_S, SLOPE_S)
            + fleet.advance([], seconds + 100, BASE_S, SLOPE_S)) / len(requests)


def test_one_request_takes_what_its_parts_take():
    fleet = VirtualFleet(2, 1, Targets(1.0, 0.022), 30.0, 1)
    assert fleet.advance([VirtualRequest(0.0, 0.999, 100)], 3.1, BASE_S, SLOPE_S) == 0, "100 tokens at 21.25 ms each"
    assert fleet.advance([], 3.2, BASE_S, SLOPE_S) == 1
    late, slow = Targets(0.9, 0.022), Targets(1.0, 0.021)
    for targets in (late, slow):
        fleet = VirtualFleet(2, 1, targets, 30.0, 1)
        assert fleet.advance([VirtualRequest(0.0, 0.999, 100)], 10, BASE_S, SLOPE_S) == 0


def test_requests_of_one_engine_slow_each_other():
    fleet = VirtualFleet(2, 1, Targets(9.0, 0.023), 30.0, 1)
    assert fleet.advance([VirtualRequest(0.0, 0.0, 100)] * 2, 9, BASE_S, SLOPE_S) == 2, "22.5 ms for each token"
    assert fleet.advance([VirtualRequest(9.0, 0.0, 100)] * 3, 20, BASE_S, SLOPE_S) == 0, "23.75 ms"


def test_a_load_has_its_split():
    assert [good(prefills) > 0.9 for prefills in range(1, 8)] == [False] * 4 + [True, True] + [False]
    assert [good(prefills, DECODE) > 0.9 for prefills in range(1, 8)] == [False, True, True] + [False] * 4


def test_time_in_pieces_is_time_in_one():
    requests, found = steady(PREFILL, 200.0), []
    for step_s in (200.0, 10.0, 0.7):
        fleet, total, begun_s = VirtualFleet(8, 5, TARGETS, 30.0, 8), 0, 0.0
        while begun_s < 200.0:
            end_s = min(200.0, begun_s + step_s)
            total += fleet.advance([one for one in requests if begun_s <= one.at_s < end_s], end_s, BASE_S, SLOPE_S)
            begun_s = end_s
        found.append(total)
    assert max(found) - min(found) <= 1 and found[0] > 500


def test_engines_change_when_they_have_finished_and_no_more_at_a_time_than_may():
    fleet = VirtualFleet(4, 1, TARGETS, 30.0, 2)
    fleet.advance([VirtualRequest(0.0, 0.0, 4000)] * 3, 1.0, BASE_S, SLOPE_S)
    fleet.want(3)
    fleet.advance([], 2.0, BASE_S, SLOPE_S)
    assert fleet.prefills == 3
    fleet.want(1)
    fleet.advance([], 3.0, BASE_S, SLOPE_S)
    assert fleet.prefills == 3, "two change"
    fleet.advance([], 200.0, BASE_S, SLOPE_S)
    assert fleet.prefills == 1, "4,000 tokens at 21 ms, and 30 s back"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 30), st.floats(1, 3000)), max_size=60),
       st.lists(st.integers(0, 5), max_size=6), st.floats(0, 1), st.floats(0, 1))
def test_whatever_comes_ends_or_waits(drawn, wants, base_s, slope_s):
    """No order of changes loses a request or counts one twice, and time goes on."""
    fleet = VirtualFleet(5, 2, Targets(1e9, 1e9), 30.0, 2)
    requests = [VirtualRequest(*one) for one in sorted(drawn)]
    ended = fleet.advance(requests, 20.0, base_s, slope_s)
    for number, want in enumerate(wants):
        fleet.want(want)
        ended += fleet.advance([], 40.0 + 20 * number, base_s, slope_s)
    fleet.want(2)
    ended += fleet.advance([], 1e9, base_s, slope_s)
    assert ended == len(requests) and fleet.prefills == 2


def test_what_waits_has_a_bound(monkeypatch):
    monkeypatch.setattr(virtual_fleet, "MAX_WAITING", 10)
    monkeypatch.setattr(virtual_fleet, "SEATS", 4)
    fleet = VirtualFleet(2, 1, Targets(1e9, 1e9), 30.0, 1)
    assert fleet.advance([VirtualRequest(0.0, 1.0, 1)] * 50, 1000.0, BASE_S, SLOPE_S) == 11, "10 prompts wait"
    assert fleet.advance([VirtualRequest(1000.0 + number, 0.0, 1e6) for number in range(50)], 2000.0, 1.0, 1.0) == 0
    assert fleet.advance([], 1e9, 1.0, 1.0) == 14, "4 decode, and 10 wait"


@pytest.mark.parametrize("bad", [
    {"tokens_per_s": 1.0}, {"tokens_per_s": 1e-300}, {"prompt_tokens": 1e12}, {"arrived": 1e12},
    {"answer_tokens": 1e12}, {"itl_s": 1e9}, {"waiting_tokens": 1e12}])
def test_b80_one_look_of_nonsense_is_forgotten(bad):
    """Also by the fleets in virtual time, which would have to finish it. Four engines, a quarter of the requests."""
    gains = []
    for figures in ({}, bad):
        planner, meter = SplitPlanner(4, 3, TARGETS, 30.0, 4), DemandMeter(TARGETS)
        for number in range(1, 200):
            look = FleetLook(10.0 * number, 10, 200_000, 10, 1700, 0.03, 10, 0, 8, 0, 1, 10_000)
            if number == 15:
                look = msgspec.structs.replace(look, **figures)
            if (demand := meter.receive(look)) is not None:
                choice = planner.receive(look, demand, 3)
        assert choice.prefills == 3
        gains.append(max(planner.gains().values()))
    assert gains[1] > 0.6 * gains[0]


class Served:
    """A fleet in virtual time as the real one, with a planner that sees what such a fleet shows. `at_once` as theirs.
    Lengths are known at the end only: here they are those of the requests of the look."""

    def __init__(self, prefills: int, at_once: int = 8) -> None:
        self.real = VirtualFleet(8, prefills, TARGETS, 30.0, at_once)
        self.planner = SplitPlanner(8, prefills, TARGETS, 30.0, at_once)
        self.at_s, self.good, self.came, self.chosen = 0.0, 0, 0, []

    def serve(self, kind, seconds: float, acts: bool = True) -> None:
        end_s = self.at_s + seconds
        while self.at_s < end_s:
            requests = steady(kind, 10.0, self.at_s)
            self.at_s += 10.0
            ended = self.real.advance(requests, self.at_s, BASE_S, SLOPE_S)
            self.good, self.came = self.good + ended, self.came + len(requests)
            look = FleetLook(self.at_s, len(requests), 10_000 * kind[1] * len(requests), len(requests),
                             kind[2] * len(requests), 0.03, tokens_per_s=10_000)
            demand = Demand(self.at_s, 10.0, kind[0], kind[1], kind[2], BASE_S, SLOPE_S, good=ended)
            choice = self.planner.receive(look, demand, self.real.prefills)
            self.chosen.append(self.real.prefills if choice is None else choice.prefills)
            if acts:
                self.real.want(self.chosen[-1])


@pytest.mark.parametrize("start", [1, 4, 7])
def test_a_constant_load_gets_its_split_at_once_and_keeps_it(start):
    served = Served(start)
    served.serve(PREFILL, 600.0)
    assert set(served.chosen[1:]) == {6} and served.good / served.came > 0.65, "less than what waited at first"


def test_a_load_that_shifts_is_followed():
    served = Served(6)
    served.serve(PREFILL, 600.0)
    served.serve(DECODE, 600.0)
    assert served.chosen[-1] == 2 and served.good / served.came > 0.6, "no fixed split has more than half"


@pytest.mark.parametrize("start", [2, 4, 6])
def test_where_there_is_enough_nothing_changes(start):
    served = Served(start)
    served.serve((1.0, 1.2, 170.0), 600.0)
    assert set(served.chosen) == {start} and served.good / served.came > 0.95


def test_what_one_tracker_did_not_keep_is_no_longer_believed_of_the_others():
    """All of them promise too much where changes take longer than in virtual time. Of a load that shifts, a third of
    what was promised is seen while the split changes."""
    served = Served(5)
    for kind in (PREFILL, DECODE) * 3:
        served.serve(kind, 300.0)
    trackers = [one for one in served.planner._candidates if isinstance(one, rule._Tracker)]
    before = [one.value(240.0) for one in trackers]
    assert served.planner._followed in trackers and min(before) > 0
    served.planner._followed.trust.see(3000.0, 1000.0)
    assert [one.value(240.0) < 0.8 * value for one, value in zip(trackers, before, strict=True)] == [True] * 4
    fixed = served.planner._fixed[5]
    assert fixed.trust is not trackers[0].trust and fixed.value(240.0) > 0


def test_what_is_not_carried_out_goes_on_being_said():
    """A dry run: the real engines stay as they are, and what they do is not held against what is followed."""
    for start in (2, 4):
        served = Served(start)
        served.serve(PREFILL, 1800.0, acts=False)
        assert set(served.chosen[3:]) == {6} and served.good < 0.5 * served.came


def test_what_promises_more_than_it_keeps_is_followed_no_longer():
    """The pace of tokens is not what was measured: what virtual time promises of six prefill engines is not seen."""
    planner = SplitPlanner(8, 6, TARGETS, 30.0, 8)
    chosen = []
    for number in range(1, 150):
        good = 4.0 if not chosen or chosen[-1] == 6 else 30.0
        demand = Demand(10.0 * number, 10.0, *PREFILL, BASE_S, SLOPE_S, good=good)
        look = FleetLook(10.0 * number, 40, 480_000, 40, 40 * 170.0, 0.03, tokens_per_s=10_000)
        found = planner.receive(look, demand, chosen[-1] if chosen else 6)
        chosen.append(found.prefills if found else 6)
    assert chosen[5] == 6 and chosen[-1] == 5


@pytest.mark.parametrize(("count", "least_prefills", "least_decodes"), [(1, 1, 1), (65, 1, 1), (4, 3, 2), (0, 1, 1)])
def test_b80_what_is_not_possible_is_refused(count, least_prefills, least_decodes):
    with pytest.raises(ValueError, match=f"count={count} is not possible"):
        SplitPlanner(count, 1, TARGETS, least_prefills=least_prefills, least_decodes=least_decodes)


def test_a_role_has_its_least_number():
    planner = SplitPlanner(8, 4, TARGETS, least_prefills=2, least_decodes=3)
    for number in range(1, 40):
        demand = Demand(10.0 * number, 10.0, 4.0, 3.0, 10.0, BASE_S, SLOPE_S)
        look = FleetLook(10.0 * number, 40, 1_200_000, 40, 400.0, 0.03, tokens_per_s=10_000)
        choice = planner.receive(look, demand, 4)
        assert choice is None or 2 <= choice.prefills <= 5
    assert choice.prefills == 5


def test_many_engines_have_few_splits_computed():
    planner = SplitPlanner(64, 32, TARGETS)
    assert len(planner.gains()) <= rule.MAX_SPLITS + 2 + len(rule.PATIENCE_S)


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e6))
looks = st.builds(FleetLook, at_s=numbers, **{
    name: numbers for name in FleetLook.__struct_fields__ if name not in ("at_s", "decodes")},
    decodes=st.integers(-2, 9))


@settings(max_examples=20, deadline=None)
@given(st.lists(looks, min_size=3, max_size=6))
def test_b80_whatever_is_counted_gives_a_possible_split(hostile):
    meter, planner = DemandMeter(TARGETS), SplitPlanner(4, 2, TARGETS)
    for look in hostile:
        demand = meter.receive(look)
        if demand is not None:
            choice = planner.receive(look, demand, 2)
            assert choice is None or 1 <= choice.prefills <= 3
            assert all(math.isfinite(gain) for gain in planner.gains().values())
