# SPDX-License-Identifier: Apache-2.0
"""Groups of real processes, over both backends: requests anywhere (B70, B71), late ranks (B72), deaths (B73), rest."""
import ctypes
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from tests.dp_protocol.rank_process import BOUND_S, CALM, FAILED, QUICK, SLOW_CALL, SLOW_S, Group
from vllm_pd.dp import shm
from vllm_pd.v0.dp.engine import EngineSync, ends_at_signals

STALL_S = 2.0


@pytest.fixture(params=[True, False], ids=["memory", "network"])
def shared(request):
    return request.param


@pytest.fixture
def make(tmp_path, shared):
    groups = []

    def group(size, **options):
        groups.append(Group(size, tmp_path, shared, **options))
        return groups[-1]

    yield group
    for one in groups:
        one.close()


def test_b70_b71_requests_at_any_rank_are_served_in_equally_many_forwards(make):
    group = make(3)
    chance = random.Random(7)
    for _ in range(15):
        ranks = [chance.randrange(3) for _ in range(chance.randint(1, 3))]
        for rank in ranks:
            group.ask(rank, "request", chance.randint(1, 9))
        if chance.random() < 0.5:
            time.sleep(chance.random() * 0.02)
        else:
            for rank in ranks:
                group.wait(rank, "served")
    states = group.states()
    assert len({counters.forwards for counters, _, _ in states}) == 1
    for rank in range(3):
        group.ask(rank, "leave")
    ended = [group.wait(rank, "ended")[1] for rank in range(3)]
    assert group.exit_codes(0, 1, 2) == [0, 0, 0]
    assert len({counters.forwards for counters in ended}) == 1


def test_calls_are_made_by_all_after_the_same_forward(make):
    """Calls that come to each rank in its own time, while requests come to any: each waits for all ranks, as a forward
    does, so one in a call and another in a forward would hang."""
    group = make(3)
    chance = random.Random(36608)
    for number in range(40):
        for rank in chance.sample(range(3), 3):
            group.ask(rank, "call", 1 + number % 2)
            if chance.random() < 0.5:
                group.ask(chance.randrange(3), "request", chance.randint(1, 9))
            time.sleep(chance.choice([0, 0, 0.002]))
    made = [sorted(group.wait(rank, "made")[1:] for _ in range(40)) for rank in range(3)]
    assert made[0] == made[1] == made[2]
    assert {counters.calls for counters, _, _ in group.states()} == {40}


def test_a_call_that_not_all_hear_of_is_made_by_none(make):
    """Rank 0 decides; whoever has said that it is ready waits for that. Later calls are made, in whatever order."""
    group = make(3)
    for rank in (0, 1):
        group.ask(rank, "call", 5)
    group.wait_engaged(1)
    group.ask(1, "give up", 5)
    assert group.wait(1, "given up")[1] is False
    group.ask(2, "request", 5)
    group.wait(2, "served")
    group.ask(0, "give up", 5)
    assert group.wait(0, "given up")[1] is True
    assert group.wait(1, "put off")[1] == 5
    group.ask(1, "give up", 5)
    assert group.wait(1, "given up")[1] is True
    group.ask(2, "call", 5)
    group.ask(2, "give up", 5)
    if not group.wait(2, "given up")[1]:  # the word that it is dropped may be late
        assert group.wait(2, "put off")[1] == 5
        group.ask(2, "give up", 5)
        assert group.wait(2, "given up")[1] is True
    for rank, names in ((0, (6, 7)), (1, (7, 6)), (2, (7, 6))):
        for name in names:
            group.ask(rank, "call", name)
    made = [[group.wait(rank, "made")[1:] for _ in range(2)] for rank in range(3)]
    assert made[0] == made[1] == made[2]


def test_a_call_that_not_all_hear_of_does_not_stand_in_the_way_of_others(make):
    """The front end that has sent it to some died; others' calls, which all hear of, are made before its time is over.
    """
    group = make(3, settings=CALM)
    for rank in (0, 1):
        group.ask(rank, "call", 5)
    for rank in (2, 1, 0):
        group.ask(rank, "call", 6)
    assert {group.wait(rank, "made")[1] for rank in range(3)} == {6}
    group.ask(2, "call", 5)  # it was late, but none has given it up
    assert {group.wait(rank, "made")[1] for rank in range(3)} == {5}


def test_b73_rank_0_stops_while_a_call_waits_and_ends_the_others(make):
    group = make(3, settings=QUICK)
    for rank in (0, 1):
        group.ask(rank, "call", 5)
    group.wait_engaged(1)
    group.signal(0, signal.SIGSTOP)
    assert set(group.exit_codes(1, 2)) <= {FAILED, 1}


def test_a_call_may_take_longer_than_a_rank_may_be_silent(make):
    group = make(3, settings=replace(CALM, timeout_s=0.7 * SLOW_S))
    for rank in range(3):
        group.ask(rank, "call", SLOW_CALL)
    for rank in range(3):
        group.wait(rank, "makes")
    group.ask(2, "request", 3)
    assert len({group.wait(rank, "made")[1:] for rank in range(3)}) == 1
    group.wait(2, "served")


@pytest.mark.parametrize("victim", [0, 1])
def test_b73_a_process_that_stops_in_a_call_ends_the_others(make, victim):
    """They wait for it in a collective, no step is to be run, and nobody can ask for one."""
    group = make(3, settings=QUICK)
    for rank in range(3):
        group.ask(rank, "call", SLOW_CALL)
    for rank in range(3):
        group.wait(rank, "makes")
    group.signal(victim, signal.SIGSTOP)
    others = [rank for rank in range(3) if rank != victim]
    assert set(group.exit_codes(*others)) <= {FAILED, 1}


@pytest.mark.parametrize("victim", [0, 1])
def test_b73_a_loop_that_is_stuck_while_a_call_waits_for_it_ends_the_others(make, victim):
    """Rank 0, which is to decide, or one that has yet to begin the call that the others are in."""
    group = make(3, settings=replace(CALM, grace_s=0.3, stall_s=STALL_S))
    for rank in (0, 1):
        group.ask(rank, "call", 5)
    time.sleep(1.5 * STALL_S)  # nobody is stuck: this is no fault
    group.ask(victim, "stick")
    group.wait(victim, "sticks")
    group.ask(2, "call", 5)
    others = [rank for rank in range(3) if rank != victim]
    assert set(group.exit_codes(*others)) <= {FAILED, 1}


def test_b71_a_lone_request_costs_no_forward_after_its_last(make):
    group = make(2)
    for _ in range(5):
        group.ask(1, "request", 6)
        group.wait(1, "served")
        group.states()
    (idle, _, _), (busy, _, _) = group.states()
    assert (busy.forwards, busy.dummies) == (30, 0)
    assert (idle.forwards, idle.dummies) == (30, 30)


def test_b72_a_request_before_the_last_rank_is_there_is_served(make):
    group = make(3, start=False)
    group.start(0)
    group.start(2)
    group.ask(2, "request", 3)
    time.sleep(0.3)
    group.start(1)
    group.wait(2, "served")
    assert {counters.forwards for counters, _, _ in group.states()} == {3}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_b73_a_killed_process_ends_the_others(make, victim, busy):
    group = make(3, settings=replace(CALM, grace_s=0.3) if busy else CALM)
    if busy:
        group.ask(2, "request", 100_000)
        time.sleep(0.2)
    else:
        group.states()
    group.signal(victim, signal.SIGKILL)
    others = [rank for rank in range(3) if rank != victim]
    if not busy:
        said = [group.wait(rank, "failed")[1] for rank in others]
        # Rank 0 may be gone, and the coordinator with it, before its last word has left.
        assert all(f"rank {victim}: its" in text or "coordinator (rank 0): its" in text for text in said), said
    # The loop is told, or, where it is stuck in the collective, the process is ended.
    assert set(group.exit_codes(*others)) <= ({FAILED, 1} if busy else {FAILED})


@pytest.mark.parametrize("victim", [0, 1])
def test_b73_a_stopped_process_ends_the_others(make, victim, shared):
    group = make(3, settings=QUICK)
    group.states()
    group.signal(victim, signal.SIGSTOP)
    others = [rank for rank in range(3) if rank != victim]
    if shared:
        time.sleep(2.0)  # more than timeout_s: here nobody minds as long as nobody needs it
        assert all(group.processes[rank].is_alive() for rank in others)
    group.ask(2, "request", 3)
    assert set(group.exit_codes(*others)) <= {FAILED, 1}
    group.signal(victim, signal.SIGCONT)
    assert set(group.exit_codes(victim)) <= {FAILED, 1}


def test_a_process_that_has_left_may_end_before_the_others(make):
    group = make(2)
    group.ask(0, "request", 40)
    group.ask(1, "leave")
    group.wait(0, "served")
    assert group.processes[1].is_alive()
    group.ask(0, "leave")
    assert group.exit_codes(0, 1) == [0, 0]


def test_a_process_that_has_left_is_there_for_one_that_works_later(make):
    """However long nobody needed it."""
    group = make(2, settings=CALM)
    group.ask(1, "leave")
    group.states()
    time.sleep(1.5 * CALM.timeout_s)
    group.ask(0, "request", 5)
    group.wait(0, "served")
    group.ask(0, "leave")
    assert group.exit_codes(0, 1) == [0, 0]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("left", [0, 2], ids=["nobody", "a rank"])
def test_b73_a_process_that_is_shut_down_in_order_ends_the_others(make, victim, left):
    """Also where nobody needs a step: they can't run another one. A rank that has left waits no longer, either. One
    that has been told to end, too, is not disturbed."""
    group = make(4, settings=CALM)
    group.states()
    if left:
        group.ask(left, "leave")
    group.ask(3, "end")
    group.ask(victim, "shut down")
    others = [rank for rank in range(3) if rank != victim]
    said = [group.wait(rank, "failed")[1] for rank in others]
    assert all(f"rank {victim}: it has been shut down" in text for text in said), said
    assert group.exit_codes(victim, *others) == [0, FAILED, FAILED]


def test_a_quiet_group_does_not_run(make):
    group = make(2, settings=CALM)
    group.ask(0, "request", 2)
    group.wait(0, "served")
    group.states()
    time.sleep(2.5 * CALM.timeout_s / 4)  # the watch goes to sleep after a beat or two
    polls = 2 * 4  # rounds of `states`, at both ends
    for _ in range(3):  # what is polled is so each time; what a busy machine does is not
        before = group.states()
        time.sleep(1.5)
        after = group.states()
        switches = [later - earlier for (_, _, earlier), (_, _, later) in zip(before, after, strict=True)]
        if max(switches) <= 6 * polls:
            return
    raise AssertionError(f"something polls: {switches}")


def join_alone(waits) -> None:
    """As a rank whose partner never starts: its rendezvous waits in C, where Python runs no signal handler."""
    def rendezvous() -> None:
        mutex = ctypes.create_string_buffer(256)  # of pthread, not locked
        waits.set()
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())  # as upstream's engine processes
    parallel = SimpleNamespace(stateless_init_dp_group=rendezvous, data_parallel_external_lb=False)
    sync = EngineSync.__new__(EngineSync)
    sync._engine = SimpleNamespace(publish_dp_lb_stats=False)
    sync.join(SimpleNamespace(parallel_config=parallel, kv_transfer_config=None, additional_config=None,
                              scheduler_config=SimpleNamespace(max_num_batched_tokens=1)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_b73_a_rank_whose_partner_never_starts_ends_at_a_signal(number):
    fork = multiprocessing.get_context("fork")
    waits = fork.Event()
    rank = fork.Process(target=join_alone, args=(waits, ), daemon=True)
    rank.start()
    assert waits.wait(BOUND_S)
    os.kill(rank.pid, number)
    rank.join(5)
    rank.kill()
    rank.join()
    assert rank.exitcode == -number


def test_handlers_are_back_after_the_rendezvous():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with ends_at_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_nothing_is_left_behind_in_memory(make, shared, tmp_path, monkeypatch):
    """In a folder that this group alone uses."""
    if not shared:
        return
    memory, made = tmp_path / "memory", tempfile.mkdtemp
    memory.mkdir()
    made_ns = memory.stat().st_mtime_ns
    monkeypatch.setattr(shm, "tempfile", SimpleNamespace(mkdtemp=lambda prefix, dir: made(prefix=prefix, dir=memory)))
    group = make(2)
    assert memory.stat().st_mtime_ns != made_ns and not list(memory.iterdir())
    for rank in range(2):
        os.kill(group.processes[rank].pid, signal.SIGKILL)
