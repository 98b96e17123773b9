# SPDX-License-Identifier: Apache-2.0
"""How many engines a fleet wants: signs, hysteresis, changes of role."""
import math

import msgspec
import pytest

from vllm_pd.decisions.wanted import (
    DecodeReading,
    PrefillReading,
    Sign,
    WantedDecision,
    WantedEngines,
    WantedRules,
    decode_pressure,
    prefill_pressure,
)
from vllm_pd.protocol.messages import Role

RULES = WantedRules(ttft_s=2.0, itl_s=0.05, cool_down_s=30.0, lower_after_s=100.0)
STEP_S = 10.0
P, D = PrefillReading(2, busy=0.5), DecodeReading(2, cache=0.3, running=10, itl_s=0.02)
BUSY_P = PrefillReading(2, busy=1.0)
IDLE_P, IDLE_D = PrefillReading(2), DecodeReading(2)
SLOW_D = DecodeReading(2, running=80, itl_s=0.06)


class Clocked:
    """A rule whose intervals follow each other."""

    def __init__(self, rules: WantedRules = RULES) -> None:
        self.now = 0.0
        self.rule = WantedEngines(rules, self.now)

    def see(self, prefill: PrefillReading = P, decode: DecodeReading = D, intervals: int = 1) -> WantedDecision:
        """The last of so many decisions by the same reading."""
        for _ in range(intervals):
            self.now += STEP_S
            found = self.rule.decide(self.now, prefill, decode)
        return found


@pytest.mark.parametrize("prefill, decode, pressure, sign", [
    (PrefillReading(2), D, 0.0, Sign.NOTHING),
    (PrefillReading(2, busy=0.85), D, 1.0, Sign.BUSY),
    (PrefillReading(2, busy=0.2, wait_s=1.0), D, 1.0, Sign.WAIT),
    (PrefillReading(2, wait_s=0.5, compute_s=1.0), D, 1.0, Sign.WAIT),
    (PrefillReading(2, wait_s=0.4, compute_s=3.0), D, 2.0, Sign.WAIT),
    (PrefillReading(2, busy=0.2), msgspec.structs.replace(D, parked=0.4), 1.0, Sign.PARKED),
    (PrefillReading(2, wait_s=0.6), msgspec.structs.replace(D, ttft_s=4.0, handover_s=3.0), 2.0, Sign.TTFT),
    (PrefillReading(2, wait_s=0.6), msgspec.structs.replace(D, ttft_s=4.0, handover_s=1.0), 0.6, Sign.WAIT),
    (PrefillReading(2, wait_s=0.1), msgspec.structs.replace(D, ttft_s=4.0, handover_s=3.0), 0.1, Sign.WAIT),
    (PrefillReading(0), D, math.inf, Sign.NO_ENGINE)])
def test_the_worst_sign_of_prefill_engines_counts(prefill, decode, pressure, sign):
    found = prefill_pressure(prefill, decode, RULES)
    assert found.all == pytest.approx(pressure) and found.sign is sign


@pytest.mark.parametrize("decode, pressure, sign", [
    (DecodeReading(2), 0.0, Sign.NOTHING),
    (DecodeReading(2, itl_s=0.0475, cache=0.2), 1.0, Sign.ITL),
    (DecodeReading(2, itl_s=0.01, cache=0.9), 1.0, Sign.CACHE),
    (DecodeReading(2, itl_s=0.01, cache=0.9, parked=0.45), 0.5, Sign.CACHE),
    (DecodeReading(2, itl_s=0.01, running=10, waiting=4), 2.0, Sign.SEATS),
    (DecodeReading(2, running=100, waiting=3, ttft_s=6.0, handover_s=1.0), 3.0, Sign.TTFT),
    (DecodeReading(2, running=100, waiting=3, ttft_s=6.0, handover_s=5.0), 0.1, Sign.SEATS),
    (DecodeReading(2, running=100, waiting=2, ttft_s=6.0, handover_s=1.0), 0.0, Sign.NOTHING),
    (DecodeReading(2, running=100, ttft_s=6.0, handover_s=1.0), 0.0, Sign.NOTHING),
    (DecodeReading(0), math.inf, Sign.NO_ENGINE)])
def test_the_worst_sign_of_decode_engines_counts(decode, pressure, sign):
    found = decode_pressure(decode, RULES)
    assert found.all == pytest.approx(pressure) and found.sign is sign


def test_jobs_that_have_piled_up_and_go_by_themselves_call_for_no_change():
    """At half of the load 10 s of work are gone after 20 s, 20 s of it after 40 s."""
    soon, late = (prefill_pressure(PrefillReading(2, busy=0.5, wait_s=wait_s), D, RULES) for wait_s in (10.0, 20.0))
    assert soon.all > 1 and soon.rate < 1 <= late.rate


def test_one_more_is_wanted_after_two_intervals_and_no_more_than_one():
    clocked = Clocked()
    assert clocked.see(BUSY_P).prefill.wanted == 2
    assert [clocked.see(BUSY_P).prefill.wanted for _ in range(20)] == [3] * 20
    assert clocked.see(msgspec.structs.replace(BUSY_P, present=3)).prefill.wanted == 3, "it has come"
    assert clocked.see(msgspec.structs.replace(BUSY_P, present=3)).prefill.wanted == 4


def test_one_interval_in_between_begins_the_count_anew():
    clocked = Clocked()
    assert all(clocked.see(reading).prefill.wanted == 2 for reading in (BUSY_P, P) * 5)


def test_what_was_wanted_stays_until_it_was_enough_for_long():
    clocked = Clocked()
    assert clocked.see(BUSY_P, intervals=2).prefill.wanted == 3
    between = PrefillReading(2, busy=0.7)  # below 1, and not well below
    assert clocked.see(between, intervals=50).prefill.wanted == 3
    assert clocked.see(IDLE_P).prefill.wanted == 2


def test_one_less_is_wanted_after_a_long_time_only_and_never_none():
    clocked = Clocked()
    found = [clocked.see(IDLE_P, IDLE_D) for _ in range(12)]
    assert [one.prefill.wanted for one in found] == [one.decode.wanted for one in found] == [2] * 10 + [1] * 2
    one_each = [clocked.see(PrefillReading(1), DecodeReading(1)) for _ in range(50)]
    assert {(one.prefill.wanted, one.decode.wanted) for one in one_each} == {(1, 1)}


def test_one_less_is_not_wanted_where_the_rest_would_have_been_busy():
    """Half of the time of two is all of the time of one."""
    assert Clocked().see(P, intervals=50).prefill.wanted == 2


@pytest.mark.parametrize("unread", [1, 2])
def test_an_engine_that_was_not_read_is_not_taken_for_idle(unread):
    clocked = Clocked()
    idle = PrefillReading(2, unread), DecodeReading(2, unread)
    found = clocked.see(*idle, intervals=50)
    assert (found.prefill.wanted, found.decode.wanted, found.flip_to) == (2, 2, None)
    assert (found.prefill.unread, found.decode.unread) == (unread, unread)
    more = clocked.see(PrefillReading(2, unread, busy=2.0), DecodeReading(2, unread), intervals=50)
    assert more.prefill.wanted == 3, "what the others say counts"
    assert more.flip_to is None, "the decode engine that was not read may be busy"


def test_a_role_of_which_an_engine_was_not_read_a_minute_ago_gives_nothing():
    clocked = Clocked()
    clocked.see(P, IDLE_D, intervals=3)
    clocked.see(BUSY_P, DecodeReading(2, 1))
    found = [clocked.see(BUSY_P, IDLE_D).flip_to for _ in range(8)]
    assert found[:6] == [None] * 6 and found[7] is Role.PREFILL


def test_the_time_before_the_first_reading_counts_for_nothing():
    clocked = Clocked()
    clocked.see(PrefillReading(2, 2), DecodeReading(2, 2))
    assert clocked.see(BUSY_P, IDLE_D, intervals=2).flip_to is Role.PREFILL


def test_a_role_that_nobody_has_is_wanted_at_once():
    clocked = Clocked()
    found = clocked.see(PrefillReading(0), DecodeReading(3))
    assert found.prefill.wanted == 1 and found.flip_to is None, "a planner that has just begun changes nothing"
    assert clocked.see(PrefillReading(0), DecodeReading(3), intervals=2).flip_to is Role.PREFILL
    assert clocked.see(PrefillReading(0), DecodeReading(1), intervals=9).flip_to is None, "it is the last one"
    assert clocked.see(PrefillReading(0), DecodeReading(0)).flip_to is None


@pytest.mark.parametrize("prefill, decode, to", [
    (BUSY_P, IDLE_D, Role.PREFILL), (IDLE_P, SLOW_D, Role.DECODE), (BUSY_P, SLOW_D, None),
    (msgspec.structs.replace(BUSY_P, busy=3.0), SLOW_D, Role.PREFILL), (P, D, None), (IDLE_P, IDLE_D, None),
    (PrefillReading(2, busy=0.7), DecodeReading(2, itl_s=0.005), Role.PREFILL)])
def test_the_role_that_is_short_gains_from_the_one_that_can_do_without(prefill, decode, to):
    assert Clocked().see(prefill, decode, intervals=3).flip_to is to


def test_the_last_engine_of_a_role_stays():
    assert Clocked().see(BUSY_P, DecodeReading(1), intervals=20).flip_to is None
    assert Clocked().see(PrefillReading(1), SLOW_D, intervals=20).flip_to is None


def test_a_role_that_was_busy_a_minute_ago_gives_nothing():
    """As decode engines rest while their prompts wait for prefill engines."""
    clocked = Clocked()
    assert clocked.see(P, DecodeReading(2, itl_s=0.045), intervals=5).flip_to is None
    found = [clocked.see(BUSY_P, IDLE_D).flip_to for _ in range(8)]
    assert found[:6] == [None] * 6 and found[7] is Role.PREFILL


def test_after_a_change_there_is_none_for_a_cool_down():
    clocked = Clocked()
    assert clocked.see(BUSY_P, IDLE_D, intervals=3).flip_to is Role.PREFILL
    clocked.rule.role_changed(clocked.now)
    found = [clocked.see(msgspec.structs.replace(BUSY_P, present=3), DecodeReading(3)).flip_to for _ in range(3)]
    assert found == [None, None, Role.PREFILL]
