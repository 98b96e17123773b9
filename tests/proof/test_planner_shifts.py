# SPDX-License-Identifier: Apache-2.0
"""The planner in a simulated fleet (scripts/lab/_planner): at least 0.95 of the goodput of the best fixed ratio in
hindsight, and clearly more where the load shifts. Planners that are broken on purpose are found.
"""
import dataclasses

import msgspec
import pytest
from _planner.compare import RULES, compare, faults, make_rule
from _planner.fleet import ENGINES, TARGETS, FleetSpeed, SimulatedFleet, goodput
from _planner.loads import LOADS, SHIFTING, LoadRequest, Traffic, draw, lasts_s, stays

from vllm_pd.decisions.wanted import DecodeReading, PrefillReading, WantedDecision, WantedEngines
from vllm_pd.protocol.messages import Role

SEEDS = (1, 2)


@pytest.mark.search
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", LOADS)
def test_the_planner_is_nearly_as_good_as_the_best_fixed_ratio_or_better(load, seed):
    found = compare(LOADS[load], seed)
    assert faults(found, load in SHIFTING) == [], found.static
    assert found.static[found.best] > 0.15 * found.offered, "the load is one that the fleet can serve"


class NoHysteresis(WantedEngines):
    """Decides by the last interval alone, and as often as it likes."""

    def __init__(self) -> None:
        super().__init__(msgspec.structs.replace(RULES, cool_down_s=0.0, high_intervals=1, margin=1.0, even=0.0), 0.0)


class WrongSign(WantedEngines):
    """Gives an engine to the role that can do without."""

    def __init__(self) -> None:
        super().__init__(RULES, 0.0)

    def decide(self, now: float, prefill: PrefillReading, decode: DecodeReading) -> WantedDecision:
        found = super().decide(now, prefill, decode)
        other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL, None: None}[found.flip_to]
        gives = found.decode if other is Role.PREFILL else found.prefill
        return found._replace(flip_to=other if gives.present > 1 else None)


class NoCoolDown(WantedEngines):
    """Forgets that a role has just changed."""

    def __init__(self) -> None:
        super().__init__(RULES, 0.0)

    def role_changed(self, now: float) -> None:
        pass


class NeverChanges(WantedEngines):
    """Leaves all roles as they are."""

    def __init__(self) -> None:
        super().__init__(RULES, 0.0)

    def decide(self, now: float, prefill: PrefillReading, decode: DecodeReading) -> WantedDecision:
        return super().decide(now, prefill, decode)._replace(flip_to=None)


@pytest.mark.parametrize("broken, load, best, fault", [
    (NoHysteresis, "bursts of ten seconds", 5, "goodput"), (NoHysteresis, "steady, long answers", 2, "cool-down"),
    (WrongSign, "one step", 2, "goodput"), (NoCoolDown, "one step", 2, "cool-down"),
    (NeverChanges, "one step", 2, "goodput")])
def test_a_broken_planner_is_found(broken, load, best, fault):
    """`best`: the prefill engines of the best fixed ratio."""
    assert any(one.startswith(fault) for one in faults(compare(LOADS[load], 1, broken, (best, )), load in SHIFTING))


def one_request(prompt_tokens: int, answer_tokens: int, speed: FleetSpeed) -> LoadRequest:
    request = LoadRequest(0.0, prompt_tokens, answer_tokens)
    SimulatedFleet(1, 2, speed).run([request])
    return request


def test_one_request_takes_what_its_tokens_take():
    """12,000 tokens at 6,000 a second, 1 s to send, then 100 tokens of 20 ms; ticks are 0.1 s."""
    request = one_request(12_000, 100, FleetSpeed(6000.0, 0.015, 0.005, 4, 20_000, send_s=1.0))
    assert request.ttft_s == pytest.approx(3.02, abs=0.2) and request.itl_s == pytest.approx(0.02, rel=0.1)


def test_what_does_not_fit_waits_and_its_client_leaves():
    speed = FleetSpeed(1000.0, 0.1, 0.0, 1, 20_000)
    requests = [LoadRequest(0.0, 1000, 100), LoadRequest(0.0, 1000, 100), LoadRequest(0.0, 1000, 1000)]
    SimulatedFleet(1, 2, speed).run(requests)
    assert requests[0].itl_s and requests[1].itl_s and requests[1].ttft_s > 10, "it waits for the seat of the first"
    assert requests[2].ttft_s is None, "nobody waits for longer than 20 s"
    assert goodput(requests, 1.0, dataclasses.replace(TARGETS, itl_s=1.0)) == 1


def test_an_engine_that_changes_its_role_first_ends_what_it_has():
    fleet = SimulatedFleet(1, 2, FleetSpeed(1000.0, 0.1, 0.0, 8, 20_000))
    request, later = LoadRequest(0.0, 100, 100), LoadRequest(2.0, 100, 2)

    class Changes:
        def look(self, fleet: SimulatedFleet) -> None:
            if fleet.now >= 1.0:
                fleet.engines[1].role = Role.PREFILL

    fleet.run([request, later], Changes())
    assert request.itl_s == pytest.approx(0.1, rel=0.1)
    assert later.ttft_s is None, "nobody decodes any more"


def test_a_load_is_the_same_for_the_same_seed_and_has_its_means():
    phases = (stays(Traffic(10.0, 1000.0, 50.0), 600), stays(Traffic(2.0, 100.0, 500.0), 300))
    one, again, other = draw(phases, 1), draw(phases, 1), draw(phases, 2)
    key = [(each.arrives_s, each.prompt_tokens, each.answer_tokens) for each in one]
    assert key == [(each.arrives_s, each.prompt_tokens, each.answer_tokens) for each in again]
    assert len(one) != len(other) and lasts_s(phases) == 900
    first = [each for each in one if each.arrives_s < 600]
    assert 5500 < len(first) < 6500 and 500 < len(one) - len(first) < 700
    assert sum(each.prompt_tokens for each in first) / len(first) == pytest.approx(1000, rel=0.05)
    assert make_rule().rules is RULES and ENGINES == 8
