# SPDX-License-Identifier: Apache-2.0
"""Which utility calls an engine keeps until all ranks make them, and what becomes of them."""
import functools
import queue
import signal
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from tests.waiting import wait_for
from vllm_pd.dp import utility
from vllm_pd.dp.calls import CallAction, CallState
from vllm_pd.dp.core import Participant
from vllm_pd.dp.forwards import Forwards
from vllm_pd.dp.interface import CallOutcome, GroupFailed, StepDecision
from vllm_pd.dp.utility import UtilityCalls, kind_of, name_of
from vllm_pd.errors import ConfigError
from vllm_pd.v0.dp import engine as engine_module
from vllm_pd.v0.dp.engine import DpSyncOptions, EngineSync, common_name, settings_of


class Sync:
    """A step sync that says what it is told to say."""

    def __init__(self):
        self.rank, self.held, self.ends, self.decides = 1, [], [], True

    def hold(self, name):
        self.held.append(name)

    def next_call(self):
        return self.ends.pop(0) if self.ends else None

    def give_up(self, name):
        return self.decides


@pytest.fixture
def sync():
    return Sync()


@pytest.fixture
def make(sync):
    """Makes UtilityCalls; `done` has what they made, and what failed."""
    shared = []

    def calls(wait_s=60.0, wake=lambda: None, member=sync, numbered=False):
        done = [] if member is not sync else shared
        one = UtilityCalls(member, wait_s, wake, functools.partial(common_name, numbered=numbered),
                           lambda request, why: done.append(("failed", request)))
        one.done = done
        one.turn = lambda: one.carry_out(lambda request: done.append(("made", request)))
        return one

    yield calls


def test_only_what_reaches_the_workers_waits_and_what_comes_behind_it(sync, make):
    calls = make()
    assert not calls.hold((0, 1, "reset_prefix_cache", ()))
    update, look = (0, 2, "collective_rpc", ("update", None)), (0, 3, "is_sleeping", ())
    other = (1, 4, "is_sleeping", ())
    assert calls.hold(update) and calls.hold(look) and not calls.hold(other)
    calls.turn()
    assert calls.done == [] and calls
    sync.ends = [(CallOutcome.MAKE, sync.held[0])]
    calls.turn()
    assert calls.done == [("made", update), ("made", look)] and not calls


def test_calls_of_two_front_ends_are_made_in_the_order_that_rank_0_gives(sync, make):
    calls = make()
    first, second, behind = (0, 1, "sleep", (1,)), (1, 2, "sleep", (1,)), (0, 3, "is_sleeping", ())
    assert all(calls.hold(request) for request in (first, second, behind))
    sync.ends = [(CallOutcome.POSTPONED, sync.held[0]), (CallOutcome.MAKE, sync.held[1])]
    calls.turn()
    assert calls.done == [("made", second)] and calls
    sync.ends = [(CallOutcome.MAKE, sync.held[0])]
    calls.turn()
    assert calls.done == [("made", second), ("made", first), ("made", behind)] and not calls


def test_what_was_overdue_when_rank_0_puts_it_off_is_given_up_before_this_rank_is_ready_again(sync, make):
    calls = make()
    request = (0, 1, "sleep", (1,))
    assert calls.hold(request)
    sync.decides = False
    calls.expire()
    calls.turn()
    assert calls.done == [] and not calls.overdue
    sync.decides, sync.ends = True, [(CallOutcome.POSTPONED, sync.held[0]), (CallOutcome.MAKE, sync.held[0])]
    calls.turn()
    assert calls.done == [("failed", request)] and len(sync.ends) == 1


def test_rank_0_holds_the_calls_of_one_front_end_one_after_another(sync, make):
    """Or it could put the first off and make the second before it."""
    sync.rank = 0
    calls = make()
    requests = [(0, 1, "sleep", (1,)), (0, 2, "wake_up", (None,)), (1, 3, "sleep", (1,)), (0, 4, "sleep", (2,))]
    assert all(calls.hold(request) for request in requests)
    assert sync.held == [name_of(kind_of(*request[::2][:2], request[3])) for request in (requests[0], requests[2])]
    sync.ends = [(CallOutcome.MAKE, sync.held[0])]
    calls.turn()
    assert calls.done == [("made", requests[0])] and len(sync.held) == 3
    calls.expire()
    calls.turn()
    assert calls.done[1:] == [("failed", request) for request in requests[1:]] and not calls


def test_a_call_waits_no_longer_than_it_may_unless_rank_0_has_yet_to_decide(sync, make):
    woken = []
    calls = make(0.05, lambda: woken.append(calls.overdue))
    request = (0, 1, "wake_up", (None,))
    sync.decides = False
    began = time.monotonic()
    assert calls.hold(request)
    assert not calls.overdue or time.monotonic() > began + 0.05
    wait_for(lambda: woken)
    assert woken == [True]
    calls.turn()
    assert calls and not calls.overdue  # or the loop would spin
    sync.decides = True
    calls.expire()
    assert calls.overdue
    calls.turn()
    assert calls.done == [("failed", request)] and not calls.overdue


def test_no_more_calls_wait_than_may(make, monkeypatch):
    monkeypatch.setattr(utility, "MOST_WAITING", 2)
    calls = make()
    requests = [(0, number, "sleep", (1,)) for number in range(3)]
    assert all(calls.hold(request) for request in requests)
    assert calls.done == [("failed", requests[2])]


def test_with_no_wait_every_call_is_made_at_once(make):
    assert not make(0.0).hold((0, 1, "collective_rpc", ("update",)))


def test_ranks_know_a_call_by_front_end_method_and_what_is_called_inside():
    kinds = [kind_of(0, "sleep", (1,)), kind_of(1, "sleep", (1,)), kind_of(0, "wake_up", ()),
             kind_of(0, "collective_rpc", ("a",)), kind_of(0, "collective_rpc", ("b",)),
             kind_of(0, "collective_rpc", (b"code",))]  # fmt: skip
    names = [name_of(kind, number) for kind in kinds for number in range(3)]
    assert len(set(names)) == 18 and all(0 < name < 1 << 40 for name in names)
    assert kind_of(0, "sleep", (1,)) == kind_of(0, "sleep", (2,))


class Rank:
    """A member that hears of the others at once and makes no forwards. If told to be impatient it puts a call off once.
    """
    impatient = False

    def __init__(self, group):
        self.rank = len(group)
        self.participant = Participant(call_state=CallState(leads=not group))
        self.group = group
        group.append(self)
        self.hold, self.give_up = self.participant.hold, self.participant.give_up

    def next_call(self):
        self.participant.made()
        while True:
            calls = self.group[0].participant.call_state.registers
            ready = min(other.participant.call_state.ready for other in self.group[1:])
            self.participant.update(0, False, registers=replace(calls, ready=ready))
            self.impatient = self.impatient and not self.participant.postpone()
            moved = self.participant.advance()
            if not moved or moved[0] in (CallAction.MAKE, CallAction.RESUME):
                return moved and (CallOutcome.MAKE if moved[0] is CallAction.MAKE else CallOutcome.POSTPONED, moved[1])


def test_a_call_that_not_all_are_told_of_does_not_keep_another_front_ends_waiting(make):
    """Nor does that one expire with it."""
    group = []
    leader, other = (make(member=Rank(group)) for _ in range(2))
    lone, told = (0, 1, "sleep", (1,)), (1, 2, "sleep", (1,))
    assert leader.hold(lone) and leader.hold(told) and other.hold(told)
    leader.turn()
    other.turn()
    leader.turn()
    assert leader.done == other.done == []
    group[0].impatient = True
    for calls in (leader, other, leader, other):
        calls.turn()
    assert leader.done == other.done == [("made", told)] and leader and not other
    leader.expire()
    leader.turn()
    assert leader.done[1:] == [("failed", lone)]


def test_a_rank_that_was_away_does_not_make_a_call_that_was_given_up_beside_the_next_one(make):
    """The others gave the first up and were called again, by the same name and with other arguments."""
    group = []
    here, away = (make(member=Rank(group), numbered=True) for _ in range(2))
    first, second = ((0, number << 16, "collective_rpc", ("update", None, (number,))) for number in (1, 2))
    assert here.hold(first)
    here.turn()
    here.expire()
    here.turn()
    assert here.done == [("failed", first)]
    assert here.hold(second)
    here.turn()
    assert away.hold(first) and away.hold(second)
    for calls in (away, here, away, here):
        calls.turn()
    assert here.done == [("failed", first), ("made", second)]
    assert away.done == [("made", second)]
    away.expire()
    away.turn()
    assert away.done == [("made", second), ("failed", first)] and not away and not here


def test_a_call_to_a_single_rank_does_not_spoil_those_to_all(make):
    """It is made by no rank, and theirs are: they are known by the number that their front end gave them."""
    group = []
    ranks = [make(member=Rank(group), numbered=True) for _ in range(2)]
    private = (0, 1 << 63 | 12345, "collective_rpc", ("update",))
    assert ranks[1].hold(private)
    for number in (1, 2):
        asked = [(0, number << 16 | rank, "collective_rpc", ("update",)) for rank in (0, 1)]
        assert [calls.hold(request) for calls, request in zip(ranks, asked, strict=True)] == [True, True]
        for calls in (*ranks, *ranks, *ranks):
            calls.turn()
        assert [calls.done[-1] for calls in ranks] == [("made", request) for request in asked]
    ranks[1].expire()
    ranks[1].turn()
    assert ranks[1].done[-1] == ("failed", private)


def test_of_two_calls_of_one_name_the_later_one_does_not_wait_for_ever(make):
    """Its time was over while rank 0 had yet to decide about the earlier one."""
    group = []
    leader, other = (make(member=Rank(group)) for _ in range(2))
    first, second = (0, 1, "sleep", (1,)), (0, 2, "sleep", (1,))
    assert leader.hold(first) and other.hold(first) and other.hold(second)
    leader.turn()
    other.turn()
    other.expire()
    other.turn()
    assert other.done == [] and not other.overdue
    leader.turn()
    other.turn()
    assert leader.done == [("made", first)] and other.done == [("made", first), ("failed", second)] and not other


def test_how_long_is_waited_depends_on_who_calls():
    assert DpSyncOptions().wait_s(one_front_end=True, offline=False) == 30
    assert DpSyncOptions(stall_s=77).wait_s(one_front_end=False, offline=True) == 77
    assert DpSyncOptions().wait_s(one_front_end=False, offline=False) == 0
    assert DpSyncOptions(call_wait_s=4).wait_s(one_front_end=False, offline=False) == 4


def test_b80_a_wait_that_cannot_be_is_refused():
    """B80: named, with what to take."""
    with pytest.raises(ConfigError, match="call_wait_s=-1"):
        settings_of({"dp_sync": {"call_wait_s": -1}})


class Lingering:
    """A member that no step wants."""
    engaged, due, may_step, ended = True, False, True, 0

    def before_step(self, has_work, most=None):
        return StepDecision.FORWARD if has_work else StepDecision.IDLE

    def after_step(self):
        self.ended += 1

    def leave(self):
        pass

    def expect_end(self):
        self.ending = True


def join(sync, member):
    """`EngineSync.join`, with this member of a group."""
    sync._member, sync._forwards = member, Forwards(member)
    sync.calls = UtilityCalls(member, 60.0, sync._wake, functools.partial(common_name, numbered=False), sync._fail)


@pytest.fixture
def leaving(monkeypatch):
    """An EngineSync that is leaving, behind a queue."""
    monkeypatch.setattr(engine_module, "LINGER_POLL_S", 0.02)
    sync = EngineSync(SimpleNamespace(input_queue=queue.Queue(), scheduler=SimpleNamespace(requests={}),
                                      batch_queue=None, abort_requests=lambda requests: None))  # fmt: skip
    join(sync, Lingering())
    sync._may_linger, sync._linger_s = True, 0.4
    assert sync.leave(signal.SIGTERM)
    return sync


def test_an_engine_that_leaves_does_not_end_while_it_is_ready_for_a_call(leaving):
    """Rank 0 may release the call later; the others would then wait in it for this rank."""
    leaving.keep_up(None)
    time.sleep(0.5)
    assert not leaving.due and leaving.leave(signal.SIGTERM)
    leaving.keep_up(None)
    leaving._member.engaged = False
    assert leaving.due
    with pytest.raises(SystemExit):
        leaving.keep_up(None)


def test_an_engine_that_leaves_drops_its_requests_at_once(leaving):
    """It would compute all that is queued first, for nobody; and only then wait for the others, if it still did."""
    aborted = []
    leaving._engine.scheduler.requests, leaving._engine.abort_requests = {"a": 1, "b": 2}, aborted.extend
    leaving._last_due_s -= 100  # SIGTERM came long ago
    leaving.make_calls(None)
    leaving.make_calls(None)
    assert aborted == ["a", "b"]
    leaving._member.engaged = False
    assert not leaving._leaves_now  # it waits for the others as long as any


def test_forwards_of_an_executor_that_was_shut_down_are_not_waited_for(leaving):
    cancelled = Future()
    cancelled.cancel()
    leaving._budget_tokens = 512
    leaving.forward(lambda: cancelled)
    leaving._forwards.wait()
    assert not leaving._in_flight


def test_an_engine_that_leaves_sleeps_until_it_has_something_to_do(leaving):
    """It leaves, waits at its queue like any idle one, and ends: two turns, not as many as the processor can."""
    leaving._member.engaged = False
    turns = 0
    with pytest.raises(SystemExit):
        while True:
            while not leaving.due:
                leaving._engine.input_queue.get(timeout=100)
            turns += 1
            leaving.keep_up(None)
    assert turns == 2


def test_an_engine_that_has_left_waits_for_the_others_however_long_they_need_no_step(leaving):
    """A rank that calls `generate` seconds after another has ended still needs it."""
    leaving._member.engaged = False
    leaving._linger_s = DpSyncOptions().stall_s
    leaving.keep_up(None)
    assert not leaving.due and leaving._last_due_s + leaving._linger_s > time.monotonic() + 200


def test_an_engine_that_has_left_ends_in_order_when_the_others_have_died(leaving):
    """Nobody needs it, and its own requests are done. One that has not left says that the group has failed."""
    def failed(*_):
        raise GroupFailed("rank 1: its process has ended")

    leaving._member.before_step = failed
    with pytest.raises(SystemExit):
        leaving.keep_up(None)
    leaving._leaving = leaving._left = False
    with pytest.raises(GroupFailed):
        leaving.keep_up(None)


def test_ctrl_c_ends_an_engine_that_is_leaving(leaving):
    """And others that end at the same time are no failure to it."""
    assert not leaving.leave(signal.SIGINT) and leaving._member.ending


@pytest.mark.parametrize("method, held", [("sleep", True), ("profile", False)])
def test_ctrl_c_during_a_call_ends_the_engine_after_it(leaving, method, held):
    """vLLM answers a call that raises, whatever it raises. The engine would go on, and an offline program wait a day
    for its end."""
    member, request, ends = leaving._member, (0, 1, method, ()), []
    leaving._leaving, member.engaged, member.rank = False, False, 1
    member.hold = lambda name: ends.append((CallOutcome.MAKE, name))
    member.next_call = lambda: ends.pop() if ends else None

    def interrupted(*_):
        assert not leaving.leave(signal.SIGINT)

    assert leaving.hold(request) is held
    if held:
        leaving.make_calls(interrupted)
    else:
        interrupted()  # the engine makes it at once
    assert leaving.due
    with pytest.raises(SystemExit):
        leaving.make_calls(None)


class Scheduler:
    """Of an engine with requests that have ended, for the next step to report."""
    max_num_scheduled_tokens, ended = 512, False

    def has_finished_requests(self):
        return self.ended


def test_while_ranks_come_to_rest_for_a_call_steps_have_no_tokens_but_still_give_what_there_is(make):
    """Batches of a pipeline that have ended, requests that have, and transfers of KV do not wait as long as the call.
    """
    waked, group = [], []
    made = []
    sync = EngineSync(SimpleNamespace(batch_queue=queue.Queue(), scheduler=Scheduler(),
                                      input_queue=SimpleNamespace(put_nowait=waked.append)))  # fmt: skip
    join(sync, Lingering())
    sync.calls = make(member=Rank(group))
    Rank(group)
    engine, calls = sync._engine, sync.calls
    sync.make_calls(made.append)
    assert engine.scheduler.max_num_scheduled_tokens == 512
    assert calls.hold((0, 1, "sleep", (1,)))
    sync._member.may_step = False
    sync.make_calls(made.append)
    assert engine.scheduler.max_num_scheduled_tokens == 0 and not sync.due
    engine.batch_queue.put("a batch")
    assert sync.due
    engine.batch_queue.get()
    assert not sync.due
    engine.scheduler.ended = True
    assert sync.due
    engine.scheduler.ended = False
    sync._has_transfers = True
    sync.make_calls(made.append)
    wait_for(lambda: waked)
    assert sync.due
    sync._member.may_step = True
    sync.make_calls(made.append)
    assert engine.scheduler.max_num_scheduled_tokens == 512 and not sync.due


def test_no_dummy_runs_while_a_pipeline_has_forwards_of_the_ranks_own():
    """It would be run instead of the work that these are about to give. The next step looks again."""
    batches, dummies = queue.Queue(), []
    sync = EngineSync(SimpleNamespace(batch_queue=batches, scheduler=SimpleNamespace(requests={})))
    join(sync, Lingering())
    sync._budget_tokens = 512
    sync._member.before_step = lambda *_: StepDecision.DUMMY
    batches.put("a batch")
    sync.make_calls(None)
    batches.get()  # the step takes its answer
    sync.keep_up(lambda: dummies.append("too early"))
    assert not dummies
    sync.make_calls(None)
    sync.keep_up(lambda: dummies.append("now"))
    assert dummies == ["now"] and sync._member.ended == 1


def test_the_last_forwards_of_a_pipeline_are_ended_before_the_loop_may_block():
    """Else the group would look busy, and after stall_s stuck."""
    batches = queue.Queue()
    sync = EngineSync(SimpleNamespace(batch_queue=batches, scheduler=SimpleNamespace(requests={})))
    join(sync, Lingering())
    sync._budget_tokens = 512
    assert not sync.due
    forward = Future()
    batches.put(sync.forward(lambda: forward))
    assert sync.due
    forward.set_result("tokens")
    batches.get()
    assert sync.due and sync._member.ended == 0
    sync.keep_up(None)
    assert not sync.due and sync._member.ended == 1
