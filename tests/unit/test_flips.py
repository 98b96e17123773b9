# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd planner --flip` without a socket: which engine changes its role, when none does, and when a change is over.
The number of prefill engines that is wanted is given, whichever rule would say it.
"""
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from vllm_pd.decisions.splits import SplitChoice
from vllm_pd.errors import ConfigError
from vllm_pd.ops import planner as planner_module
from vllm_pd.ops.fleet_looks import WANTED
from vllm_pd.ops.flip_orders import OrderResult
from vllm_pd.ops.flips import ASKED_AT_ONCE, LATE_S, Flip, FlipBounds, FlipOutcome, is_over, roles_of
from vllm_pd.ops.options import PlannerOptions
from vllm_pd.ops.planner import FleetPlanner, PlannerFamilies
from vllm_pd.ops.scrape import parse
from vllm_pd.ops.top import FleetReading, MemberReading, wanted_lines
from vllm_pd.protocol import messages as m

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
BOTH, PREFILL, DECODE = m.Role.BOTH, m.Role.PREFILL, m.Role.DECODE
STEP_S, COOL_DOWN_S = 10.0, 30.0
COOL_DOWNS = int(COOL_DOWN_S / STEP_S) + 1  # looks
FOUR = {"p": PREFILL, "a": DECODE, "b": DECODE, "c": DECODE}


class GivenSplits:
    """In place of the rule: it wants `wanted`."""
    wanted = 1
    made: list[tuple] = []

    def __init__(self, count, prefills, targets, change_s=30.0, at_once=1, least_prefills=1, least_decodes=1):
        if least_prefills + least_decodes > count or count < 2:
            raise ValueError("not possible")
        self.made.append((count, prefills, least_prefills, least_decodes))
        self.bounds = least_prefills, count - least_decodes

    def receive(self, look, demand, prefills):
        assert self.bounds[0] <= prefills <= self.bounds[1]
        return SplitChoice(min(max(self.wanted, self.bounds[0]), self.bounds[1]), "as given")


@pytest.fixture(autouse=True)
def given(monkeypatch):
    monkeypatch.setattr(planner_module, "SplitPlanner", GivenSplits)
    monkeypatch.setattr(GivenSplits, "wanted", 1)
    monkeypatch.setattr(GivenSplits, "made", [])
    return GivenSplits


class PlayedEngine:
    """What an engine says of itself. `born`: as it was started. `open_requests` and `open_jobs` end when a test says
    so. `silent`: it does not answer questions; `deaf`: it refuses orders."""

    def __init__(self, role: m.Role, born: m.Role = BOTH) -> None:
        self.role, self.born = role, born
        self.open_requests = self.open_jobs = 0
        self.draining, self.unread, self.silent, self.deaf = False, False, False, False
        self.http = True
        self.figures = ""

    def gauges(self) -> dict[str, int]:
        return {"running": self.open_requests + self.open_jobs, "waiting": 0, "clients": self.open_requests,
                "prefill_jobs": self.open_jobs, "unproven_jobs": 0, "changes_role": int(self.born is BOTH)}


class PlayedFleet:
    """Engines, and a planner of them that reads them every `STEP_S`. `orders`: (time, engine, role)."""

    def __init__(self, roles: dict[str, m.Role], **options) -> None:
        self.now, self.said, self.fault = 0.0, [], ""
        self.engines = {name: PlayedEngine(role) for name, role in roles.items()}
        self.orders: list[tuple[float, str, m.Role]] = []
        self.later: list[tuple[float, str, m.Role]] = []
        self.lag_s = 0.0
        self.families: list[PlannerFamilies] = []
        self.asked: dict[int, set[str]] = {}  # by planner
        self.planner = self.add_planner(**options)
        self.before_order = lambda: None

    def add_planner(self, **options) -> FleetPlanner:
        """One more; the first is the fleet's own."""
        families = PlannerFamilies()
        self.families.append(families)
        options = {"flip": True, "cool_down_s": COOL_DOWN_S, "at_once": 1, **options}
        return FleetPlanner(PlannerOptions(**options).checked(), families, self.said.append, lambda: self.now)

    def members(self) -> list[m.Member]:
        return [m.Member(name, one.role, f"tcp://127.0.0.1:{1 + sum(name.encode())}", FINGERPRINT,
                         draining=one.draining, http=f"http://{name}" * one.http) for name, one in self.engines.items()]

    def reading(self) -> FleetReading:
        found = []
        for member in self.members():
            one = self.engines[member.incarnation]
            page = one.figures or f"vllm:num_requests_running {one.open_requests}.0\n"
            if one.unread or not one.http:
                found.append(MemberReading(member, self.now, fault="no answer" * one.unread))
            else:
                found.append(MemberReading(member, self.now, parse(wanted_lines(page, WANTED))))
        return FleetReading(tuple(found), 0, self.fault)

    async def order(self, flip: Flip, seen: dict) -> OrderResult:
        """As `FlipOrders.order`."""
        return self.give(flip, seen)

    def give(self, flip: Flip, seen: dict) -> OrderResult:
        name, to = flip.member.incarnation, flip.to
        self.before_order()
        if roles_of(self.members()) != seen:
            return OrderResult(False, "the registry has changed since the reading")
        self.orders.append((self.now, name, to))
        if self.engines[name].deaf:
            return OrderResult(True, "this engine was started as kv_consumer")
        self.later.append((self.now + self.lag_s, name, to))
        self.show()
        return OrderResult(True, "the registry does not show the new role yet" * bool(self.lag_s))

    def show(self) -> None:
        """The registry shows what was changed `lag_s` ago."""
        for one in [one for one in self.later if one[0] <= self.now]:
            self.later.remove(one)
            self.engines[one[1]].role = one[2]

    def look(self, planner: FleetPlanner | None = None) -> None:
        """One reading, and what the planner does about it."""
        planner = planner or self.planner
        reading = self.reading()
        asked = self.asked.get(id(planner), set())
        statuses = {one.incarnation: m.StatusReply(one, "", self.engines[one.incarnation].gauges())
                    for one in self.members() if one.incarnation in asked
                    and not self.engines[one.incarnation].silent}
        planner.receive(reading, statuses)
        orders = planner_module._order(planner, self, roles_of(one.member for one in reading.engines))
        with pytest.raises(StopIteration):  # nothing in it waits
            orders.send(None)
        self.asked[id(planner)] = {one.incarnation for one in planner.to_ask(reading)}

    def run(self, looks: int) -> None:
        for _ in range(looks):
            self.now += STEP_S
            self.show()
            self.look()

    def run_until_order(self, count: int = 1) -> None:
        for _ in range(40):
            if len(self.orders) >= count:
                return
            self.run(1)
        raise AssertionError(self.said)

    def flips(self, outcome: FlipOutcome, to: str = "prefill") -> float:
        return self.families[0].flips.labels(to, outcome.value)._value.get()

    def decodes(self) -> list[str]:
        return [name for name, one in self.engines.items() if one.role.decodes]

    def names(self) -> list[str]:
        return [name for _, name, _ in self.orders]


def test_one_engine_at_a_time_changes_until_the_split_is_as_wanted(given):
    """The one with the least to do, first."""
    given.wanted = 3
    fleet = PlayedFleet(FOUR)
    fleet.engines["a"].open_requests = 0
    fleet.engines["b"].figures = "vllm:num_requests_running 5.0\n"
    fleet.engines["c"].figures = "vllm:num_requests_running 2.0\n"
    fleet.run(30)
    assert [(name, role) for _, name, role in fleet.orders] == [("a", PREFILL), ("c", PREFILL)]
    assert fleet.orders[0][0] >= COOL_DOWN_S, "it does not know what was changed before it began"
    assert fleet.orders[1][0] - fleet.orders[0][0] == COOL_DOWN_S, "what it has changed itself is no other change"
    assert fleet.decodes() == ["b"] and fleet.flips(FlipOutcome.DONE) == 2
    assert [one for one in fleet.said if one.startswith("split: 3 prefill, 1 decode of 4 engines; as now")]
    given.wanted = 2
    fleet.run(10)
    assert fleet.orders[2:] and fleet.orders[2][2] is DECODE and len(fleet.orders) == 3
    assert fleet.flips(FlipOutcome.DONE, "decode") == 1


def test_half_of_the_engines_change_at_a_time_and_one_is_left(given):
    """As many as lack, those with the least to do; and no more than that leaves one of their role."""
    given.wanted = 3
    eight = {"p": PREFILL, **dict.fromkeys("abcdefg", DECODE)}
    fleet = PlayedFleet(eight, at_once=0)
    for number, name in enumerate("abcdefg"):
        fleet.engines[name].figures = f"vllm:num_requests_running {number}.0\n"
    fleet.run(COOL_DOWNS)
    assert fleet.names() == ["a", "b"] and len({at_s for at_s, _, _ in fleet.orders}) == 1
    given.wanted = 7
    fleet.run(COOL_DOWNS)
    assert fleet.names() == [*"abcdef"], "one is left"
    fleet.run(COOL_DOWNS)
    assert fleet.decodes() == ["g"] and fleet.flips(FlipOutcome.DONE) == 6
    three = PlayedFleet({"p": PREFILL, "a": DECODE, "b": DECODE}, at_once=64)
    given.wanted = 2
    three.run(20)
    assert three.names() == ["a"]


def test_while_some_change_others_to_the_same_role_may_and_none_to_the_other(given):
    given.wanted = 2
    fleet = PlayedFleet({"p": PREFILL, **dict.fromkeys("abcd", DECODE)}, at_once=2)
    for name in "abcd":
        fleet.engines[name].open_requests = 1
    fleet.run_until_order()
    given.wanted = 4
    fleet.run(7)
    assert fleet.names() == ["a", "b"], "a third one has no room"
    given.wanted = 1
    fleet.run(7)
    assert fleet.names() == ["a", "b"] and any("no flip: a at http://a" in one for one in fleet.said)
    fleet.engines["b"].open_requests = 0
    fleet.run(7)
    assert fleet.flips(FlipOutcome.DONE) == 1 and fleet.names() == ["a", "b"]
    fleet.engines["a"].open_requests = 0
    fleet.run(7)
    assert len(fleet.orders) == 4 and {role for _, _, role in fleet.orders[2:]} == {DECODE}


def test_orders_that_come_after_one_that_failed_are_not_given(given):
    """They are decided anew."""
    given.wanted = 3
    fleet = PlayedFleet({"p": PREFILL, **dict.fromkeys("abcd", DECODE)}, at_once=2)
    fleet.engines["a"].deaf = True
    fleet.run_until_order()
    assert fleet.names() == ["a"] and fleet.decodes() == [*"abcd"]
    fleet.run(20)
    assert fleet.flips(FlipOutcome.FAILED) >= 1 and fleet.decodes() == ["a", "d"]
    changed = PlayedFleet({"p": PREFILL, **dict.fromkeys("abcd", DECODE)}, at_once=2)
    changed.before_order = lambda: setattr(changed.engines["d"], "draining", len(changed.orders) == 1)
    changed.run_until_order()
    assert changed.names() == ["a"] and changed.flips(FlipOutcome.SKIPPED) == 1


def test_after_an_order_that_the_registry_shows_late_no_other_one_of_the_look_is_given(given):
    given.wanted = 3
    fleet = PlayedFleet({"p": PREFILL, **dict.fromkeys("abcd", DECODE)}, at_once=3)
    fleet.lag_s = 25.0
    fleet.run(30)
    times = [at_s for at_s, _, _ in fleet.orders]
    assert len(fleet.names()) == len(set(fleet.names())) == 2 and len(set(times)) == 2
    assert fleet.flips(FlipOutcome.DONE) == 2 and not fleet.flips(FlipOutcome.SKIPPED)


def test_orders_take_a_limited_time_of_a_look(given, monkeypatch):
    """What was read is old then. The others are decided anew."""
    given.wanted = 4
    fleet = PlayedFleet({"p": PREFILL, **dict.fromkeys("abcdef", DECODE)}, at_once=3)
    clock = itertools.count(0, planner_module.ORDERS_S / 2)
    monkeypatch.setattr(planner_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    fleet.run(30)
    times = [at_s for at_s, _, _ in fleet.orders]
    assert len(times) == 3 and len(set(times)) == 3


def test_an_engine_that_is_well_is_left_in_the_role(given):
    """Of five decode engines three are degraded, which don't change and don't count."""
    given.wanted = 5
    fleet = PlayedFleet({"p": PREFILL, **dict.fromkeys("abcde", DECODE)}, at_once=5)
    for name in "ace":
        fleet.engines[name].figures = 'vllm:pd_degraded{reason="broker"} 1.0\nvllm:num_requests_running 0.0\n'
    fleet.run(60)
    assert fleet.names() == ["b"]


def test_many_that_change_are_asked_in_turns(given):
    """Also if the first ones never end."""
    given.wanted = 41
    fleet = PlayedFleet({"p": PREFILL, **{f"e{number}": DECODE for number in range(63)}}, at_once=40)
    for one in fleet.engines.values():
        one.open_requests = 1
    fleet.run_until_order(40)
    asked = set()
    for _ in range(4):
        fleet.run(1)
        now = fleet.asked[id(fleet.planner)] & set(fleet.names())
        assert len(now) <= ASKED_AT_ONCE
        asked |= now
    assert asked == set(fleet.names())


def test_as_many_may_change_as_orders_are_left_in_this_hour(given):
    given.wanted = 6
    fleet = PlayedFleet({"p": PREFILL, **dict.fromkeys("abcdefg", DECODE)}, at_once=0, flips_per_hour=3)
    fleet.run(60)
    assert len(fleet.orders) == 3
    fleet.run(360)
    assert len(fleet.orders) == 5


def test_bounds_say_how_many_may_change_at_a_time():
    assert [FlipBounds().most_at_once(engines) for engines in (1, 2, 3, 8, 64)] == [1, 1, 1, 4, 32]
    assert FlipBounds(at_once=3).most_at_once(64) == 3


def test_those_that_act_as_both_count_as_decode_engines_and_change_first(given):
    given.wanted = 1
    fleet = PlayedFleet({"a": DECODE, "b": BOTH, "c": DECODE})
    fleet.run(20)
    assert fleet.orders[0][1:] == ("b", PREFILL) and len(fleet.orders) == 1
    assert given.made[-1] == (3, 1, 1, 1)


def test_a_dry_run_says_what_it_would_change_once_for_each_decision(given):
    given.wanted = 2
    fleet = PlayedFleet(FOUR, flip=False)
    fleet.run(20)
    would = [one for one in fleet.said if "would flip" in one]
    assert not fleet.orders and len(would) == 1 and "a at http://a from kv_consumer to kv_producer" in would[0]
    given.wanted = 3
    fleet.run(5)
    assert sum("would flip" in one for one in fleet.said) == 2
    page = fleet.families[0].registry
    assert page.get_sample_value("vllm:pd_split_engines", {"role": "prefill"}) == 3
    assert page.get_sample_value("vllm:pd_split_engines", {"role": "decode"}) == 1


def test_engines_that_were_started_with_one_role_keep_it(given):
    """They say so themselves; and where nothing can change there is nothing to divide."""
    given.wanted = 3
    fleet = PlayedFleet(FOUR)
    for name in "pab":
        fleet.engines[name].born = fleet.engines[name].role
    fleet.run(20)
    assert fleet.names() == ["c"] and given.made[-1] == (4, 1, 1, 2)
    given.wanted = 1
    fleet.run(10)
    assert fleet.names() == ["c", "c"], "back again"
    fixed = PlayedFleet(FOUR)
    for one in fixed.engines.values():
        one.born = one.role
    fixed.run(20)
    assert not fixed.orders and not any(one.startswith("split") for one in fixed.said)
    assert fixed.families[0].registry.get_sample_value("vllm:pd_split_engines", {"role": "prefill"}) is None


def test_an_engine_whose_answer_is_not_there_yet_keeps_its_role(given):
    given.wanted = 2
    fleet = PlayedFleet(FOUR)
    fleet.engines["a"].silent = True
    fleet.run(20)
    assert fleet.names() == ["b"]


@pytest.mark.parametrize("harm", ["http", "ranks"])
def test_ranks_of_one_server_keep_their_role(given, harm):
    """Its front end gives clients' requests to all of them."""
    given.wanted = 2
    fleet = PlayedFleet(FOUR)
    if harm == "http":
        fleet.engines["a"].http = False
    else:
        fleet.engines["a"].figures = "".join(f'vllm:num_requests_running{{engine="{rank}"}} 0.0\n' for rank in (0, 1))
    fleet.run(20)
    assert fleet.names() == ["b"]


@pytest.mark.parametrize("to", [PREFILL, DECODE])
def test_the_last_engine_of_a_role_is_not_changed(given, to):
    """Neither the last one that is well, whatever the rule says."""
    roles = {"a": DECODE, "b": PREFILL, "c": PREFILL} if to is PREFILL else {"a": PREFILL, "b": DECODE, "c": DECODE}
    given.wanted = 1 if to is DECODE else 2
    given.receive, kept = (lambda self, *_: SplitChoice(3 if to is PREFILL else 0, "wrong")), given.receive
    try:
        fleet = PlayedFleet(roles)
        fleet.run(20)
        assert not fleet.orders and any("no flip: only one engine that" in one for one in fleet.said)
        ill = PlayedFleet({"a": roles["a"], "d": roles["a"], "b": roles["b"]})
        ill.engines["d"].figures = 'vllm:pd_degraded{reason="broker"} 1.0\nvllm:num_requests_running 0.0\n'
        ill.run(20)
        assert not ill.orders
    finally:
        given.receive = kept


def test_an_engine_without_anybody_to_work_with_changes_where_that_helps(given):
    alone = 'vllm:pd_degraded{reason="peer"} 1.0\nvllm:num_requests_running 0.0\n'
    for roles, count in (({"a": DECODE, "b": DECODE}, 1), ({"a": DECODE, "b": DECODE, "p": PREFILL}, 0)):
        given.wanted = 2 if count == 0 else 1
        fleet = PlayedFleet(roles)
        for name in "ab":
            fleet.engines[name].figures = alone
        fleet.run(20)
        assert len(fleet.orders) == count


def test_none_changes_while_a_page_or_the_broker_is_missing(given):
    given.wanted = 2
    fleet = PlayedFleet(FOUR)
    fleet.engines["c"].unread = True
    fleet.run(10)
    assert not fleet.orders and any("no flip: http://c was not read" in one for one in fleet.said)
    fleet.engines["c"].unread, fleet.fault = False, "no broker answers"
    fleet.run(10)
    assert not fleet.orders and any("no flip: the broker does not answer" in one for one in fleet.said)
    fleet.fault = ""
    fleet.run(1)
    assert len(fleet.orders) == 1


def test_an_engine_that_drains_is_not_counted_and_may_be_unread(given):
    given.wanted = 2
    fleet = PlayedFleet(FOUR)
    fleet.engines["a"].draining = fleet.engines["a"].unread = True
    fleet.run(20)
    assert fleet.names() == ["b"] and given.made[-1][0] == 3
    assert fleet.decodes() == ["a", "c"]


def test_a_change_is_over_when_nothing_of_the_old_role_is_open(given):
    """Before that no other engine changes, for as long as it takes."""
    given.wanted = 3
    fleet = PlayedFleet({**FOUR, "d": DECODE})
    for name in "abcd":
        fleet.engines[name].open_requests = 1
    fleet.run_until_order()
    fleet.engines[fleet.names()[0]].open_jobs = 2
    fleet.run(20)
    assert len(fleet.orders) == 1 and fleet.flips(FlipOutcome.DONE) == 0
    assert any("is not over" in one for one in fleet.said)
    fleet.engines[fleet.names()[0]].open_requests = 0
    fleet.run(2)
    assert fleet.flips(FlipOutcome.DONE) == 1, "what others have it prefill is its new role"
    fleet.run(5)
    assert len(fleet.orders) == 2


def test_of_a_prefill_engine_the_jobs_must_have_ended(given):
    fleet = PlayedFleet({"p": PREFILL, "q": PREFILL, "a": DECODE})
    fleet.engines["p"].open_jobs = fleet.engines["q"].open_jobs = 1
    fleet.run_until_order()
    assert fleet.orders[0][2] is DECODE
    fleet.engines[fleet.names()[0]].open_requests = 3
    fleet.run(10)
    assert fleet.flips(FlipOutcome.DONE, "decode") == 0
    fleet.engines[fleet.names()[0]].open_jobs = 0
    fleet.run(2)
    assert fleet.flips(FlipOutcome.DONE, "decode") == 1, "new requests of clients are its new role"


def test_a_change_that_never_ends_is_said_once_and_holds_up_others_for_a_while(given):
    """Also to the other role. It is not changed back before its end."""
    given.wanted = 2
    fleet = PlayedFleet({**FOUR, "d": DECODE})
    for name in "abcd":
        fleet.engines[name].open_requests = 1
    fleet.run_until_order()
    given.wanted = 3
    fleet.run(int(LATE_S / STEP_S) - 2)
    assert fleet.names() == ["a"] and fleet.flips(FlipOutcome.LATE) == 0
    fleet.run(10)
    assert fleet.names() == ["a", "b"] and fleet.flips(FlipOutcome.LATE) == 1
    fleet.engines["b"].open_requests = 0
    given.wanted = 1
    fleet.run(int(2 * LATE_S / STEP_S))
    assert sum("flip late" in one for one in fleet.said) == 1
    assert fleet.names() == ["a", "b", "b", "p"] and {role for _, _, role in fleet.orders[2:]} == {DECODE}
    fleet.engines["a"].open_requests = 0
    fleet.run(3)
    assert fleet.flips(FlipOutcome.DONE) == 2


@pytest.mark.parametrize("leave", ["dies", "drains"])
def test_an_engine_that_leaves_during_its_change_ends_it(given, leave):
    given.wanted = 3
    fleet = PlayedFleet({**FOUR, "d": DECODE})
    for name in "abcd":
        fleet.engines[name].open_requests = 1
    fleet.run_until_order()
    name = fleet.names()[0]
    if leave == "dies":
        fleet.engines[name].unread = fleet.engines[name].silent = True
        fleet.run(3)
        assert fleet.flips(FlipOutcome.LOST) == 0, "the registry has it for a while"
        del fleet.engines[name]
    else:
        fleet.engines[name].draining = True
        fleet.run(2)
        assert fleet.flips(FlipOutcome.LOST) == 0, "it may be paused"
        fleet.run(COOL_DOWNS)
    fleet.run(1)
    assert fleet.flips(FlipOutcome.LOST) == 1
    fleet.run(2 * COOL_DOWNS)
    assert len(fleet.orders) == 2


def test_a_number_of_engines_that_changes_for_a_moment_ends_nothing_that_is_known(given):
    """A prefill engine that is paused, or hangs, is listed as draining meanwhile."""
    given.wanted = 1
    fleet = PlayedFleet({**FOUR, "p": PREFILL})
    fleet.run(3 * COOL_DOWNS)
    made = len(given.made)
    for _ in range(10):
        fleet.engines["p"].draining = not fleet.engines["p"].draining
        fleet.run(1)
    assert len(given.made) == made and not fleet.orders
    fleet.engines["p"].draining = True
    fleet.run(3 * COOL_DOWNS)
    assert len(given.made) == made + 1 and len(fleet.orders) == 1
    fleet.engines["p"].draining = False
    fleet.run(3 * COOL_DOWNS)
    assert len(given.made) == made + 1, "what is known of so many engines is kept"


def test_where_no_engine_decodes_any_more_one_does(given):
    """The last one has died. Clients come before prefills."""
    given.wanted = 1
    fleet = PlayedFleet({"a": DECODE, "b": DECODE})
    fleet.run_until_order()
    fleet.run(3 * COOL_DOWNS)
    [survivor] = set(fleet.names())
    for name in fleet.engines.keys() - {survivor}:
        del fleet.engines[name]
    fleet.run(3 * COOL_DOWNS)
    assert fleet.engines[survivor].role is DECODE


def test_an_engine_that_refuses_is_left_alone_for_longer_each_time_and_another_is_asked(given):
    given.wanted = 2
    fleet = PlayedFleet(FOUR)
    fleet.engines["a"].deaf = True
    fleet.run(15)
    assert fleet.names() == ["a", "b"] and fleet.orders[1][0] - fleet.orders[0][0] >= COOL_DOWN_S
    assert fleet.flips(FlipOutcome.FAILED) == 1
    assert any("flip failed: a at" in one and "started as kv_consumer" in one for one in fleet.said)
    alone = PlayedFleet({"p": PREFILL, "a": DECODE, "b": DECODE})
    alone.engines["a"].deaf = alone.engines["b"].deaf = True
    alone.run(300)
    gaps = [later - earlier for earlier, later in itertools.pairwise(
        at_s for at_s, name, _ in alone.orders if name == "a")]
    assert len(gaps) >= 4 and gaps == sorted(gaps) and gaps[-1] > 4 * gaps[0]


def test_an_order_without_an_answer_that_was_carried_out_is_a_change_as_any_other(given):
    given.wanted = 2
    fleet = PlayedFleet(FOUR)
    kept = fleet.give
    fleet.give = lambda *arguments: kept(*arguments)._replace(problem="the engine does not answer")
    fleet.run(20)
    assert fleet.names() == ["a"] and fleet.flips(FlipOutcome.DONE) == 1 and fleet.flips(FlipOutcome.FAILED) == 0


def test_a_registry_that_is_late_is_waited_for(given):
    """Meanwhile the engine counts at its new role, and is asked nothing."""
    given.wanted = 2
    fleet = PlayedFleet(FOUR)
    fleet.lag_s = 2 * STEP_S
    fleet.run_until_order()
    fleet.run(1)
    assert "split: 2 prefill, 2 decode of 4 engines; as now; as given" in fleet.said
    assert fleet.flips(FlipOutcome.FAILED) == 0 and not fleet.asked[id(fleet.planner)]
    fleet.run(10)
    assert len(fleet.orders) == 1 and fleet.flips(FlipOutcome.DONE) == 1 and fleet.flips(FlipOutcome.FAILED) == 0
    slow = PlayedFleet(FOUR)
    slow.lag_s = 1e6
    slow.run(10)
    assert slow.flips(FlipOutcome.FAILED) == 2 and slow.names() == ["a", "b", "c"]
    assert any("does not show the new role" in one for one in slow.said)


def test_what_an_operator_has_changed_is_waited_for(given):
    given.wanted = 2
    fleet = PlayedFleet({**FOUR, "d": DECODE})
    fleet.run(2)
    fleet.engines["d"].role = BOTH
    fleet.run(3)
    assert not fleet.orders and any("the cool-down is not over" in one for one in fleet.said)
    fleet.run(2)
    assert len(fleet.orders) == 1


def test_an_operator_who_changes_the_engine_back_ends_the_flip(given):
    given.wanted = 2
    fleet = PlayedFleet(FOUR)
    fleet.engines["a"].open_requests = fleet.engines["b"].open_requests = fleet.engines["c"].open_requests = 1
    fleet.run_until_order()
    fleet.run(1)
    name, at_s = fleet.names()[0], fleet.now
    fleet.engines[name].role = BOTH
    fleet.run(1)
    assert fleet.flips(FlipOutcome.LOST) == 1 and any("somebody has made it kv_both" in one for one in fleet.said)
    fleet.run_until_order(2)
    assert fleet.orders[1][0] - at_s >= COOL_DOWN_S


@pytest.mark.parametrize("change", ["role", "drain", "new"])
def test_no_order_is_given_where_the_registry_has_changed_since_the_reading(given, change):
    given.wanted = 2
    fleet = PlayedFleet(FOUR)

    def meanwhile() -> None:
        fleet.before_order = lambda: None
        if change == "role":
            fleet.engines["c"].role = PREFILL
        elif change == "drain":
            fleet.engines["c"].draining = True
        else:
            fleet.engines["e"] = PlayedEngine(DECODE)

    fleet.before_order = meanwhile
    fleet.run(4)
    assert not fleet.orders and fleet.flips(FlipOutcome.SKIPPED) == 1
    at_s = fleet.now
    fleet.run(20)
    assert all(ordered_s - at_s >= COOL_DOWN_S - STEP_S for ordered_s, _, _ in fleet.orders)


def test_two_planners_do_not_work_against_each_other(given):
    """Each sees what the other has changed, and waits."""
    given.wanted = 2
    fleet = PlayedFleet({**FOUR, "d": DECODE})
    second = fleet.add_planner()
    for _ in range(40):
        fleet.run(1)
        fleet.look(second)
    assert len(fleet.orders) == 1
    given.wanted = 3
    for _ in range(40):
        fleet.look(second)
        fleet.run(1)
    assert len(fleet.orders) == 2 and fleet.orders[1][0] - fleet.orders[0][0] >= COOL_DOWN_S


def test_there_are_so_many_flips_an_hour(given):
    fleet = PlayedFleet(FOUR, flips_per_hour=3)
    for number in range(int(3500 / STEP_S)):
        given.wanted = 1 + (number // 8) % 2
        fleet.run(1)
    assert len(fleet.orders) == 3
    assert any("as many flips in this hour as there may be" in one for one in fleet.said)
    for number in range(int(800 / STEP_S)):
        given.wanted = 1 + (number // 8) % 2
        fleet.run(1)
    assert 4 <= len(fleet.orders) <= 6
    assert fleet.orders[3][0] - fleet.orders[0][0] >= 3600


def test_a_rule_that_is_not_possible_is_said_once_and_changes_nothing(given):
    fleet = PlayedFleet({"a": DECODE})
    fleet.run(10)
    assert not fleet.orders and [one for one in fleet.said if "split" in one] == ["no split: not possible"]
    fleet.engines["b"] = PlayedEngine(DECODE)
    fleet.run(20)
    assert len(fleet.orders) == 1 and given.made[0][0] == 2, "another number of engines is a new split"


@pytest.mark.parametrize("to, role, gauges, over", [
    (PREFILL, PREFILL, {"running": 2, "clients": 0, "prefill_jobs": 2}, True),
    (PREFILL, PREFILL, {"running": 1, "clients": 1, "prefill_jobs": 9}, False),  # jobs that are no requests as yet
    (PREFILL, PREFILL, {"running": 1, "prefill_jobs": 1}, False),  # of an older release
    (DECODE, DECODE, {"prefill_jobs": 2, "unproven_jobs": 2}, True),
    (DECODE, DECODE, {"prefill_jobs": 2, "unproven_jobs": 1}, False),
    (PREFILL, DECODE, {}, False), (PREFILL, PREFILL, {}, True), (DECODE, DECODE, {"running": 9}, True),
    (DECODE, DECODE, {"running": 9, "prefill_jobs": 1}, False)])
def test_what_is_open_of_the_old_role(to, role, gauges, over):
    member = m.Member("a", role, "tcp://127.0.0.1:1", FINGERPRINT)
    assert is_over(m.StatusReply(member, "", gauges), to) is over


def test_an_engine_of_an_older_release_changes_only_if_it_acts_as_both(given):
    given.wanted = 2
    fleet = PlayedFleet({"p": PREFILL, "a": DECODE, "b": BOTH, "c": DECODE})
    for one in fleet.engines.values():
        one.gauges = lambda: {"running": 0}
    fleet.run(20)
    assert fleet.names() == ["b"]


@pytest.mark.parametrize("options, key", [
    ({"cool_down_s": 0.0}, "--cool-down-s"), ({"cool_down_s": float("nan")}, "--cool-down-s"),
    ({"flips_per_hour": 0}, "--flips-per-hour"), ({"at_once": 65}, "--at-once"),
    ({"flip": True, "once": True}, "--flip")])
def test_b80_options_that_can_not_be_used_are_refused(options, key):
    with pytest.raises(ConfigError, match=f"{key}=.* can't be used"):
        PlannerOptions(**options).checked()


def test_every_family_of_a_planner_is_described():
    document = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    ticked = set(re.findall(r"`(vllm:pd_\w+)[`{]", document))
    names = {f"{one.name}_total" if one.type == "counter" else one.name for one in PlannerFamilies().registry.collect()}
    assert len(names) == 5 and names <= ticked, names - ticked
    outcomes = {one.value for one in FlipOutcome}
    assert outcomes <= set(re.findall(r"`(\w+)`", document)), outcomes


def test_a_member_is_shown_by_its_page():
    """With its control address where it has no server."""
    member = m.Member("a" * 32, DECODE, "tcp://127.0.0.1:1", FINGERPRINT, http="http://h:1")
    flip = planner_module.Flip(member, PREFILL)
    assert str(flip) == "aaaaaaaaaaaa at http://h:1 from kv_consumer to kv_producer"
    assert "tcp://127.0.0.1:1" in str(planner_module.Flip(msgspec.structs.replace(member, http=""), PREFILL))
