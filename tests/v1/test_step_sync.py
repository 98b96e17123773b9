# SPDX-License-Identifier: Apache-2.0
"""V1's engine loop with the step sync in the place of waves (B70, B94, B118): two to four real loops, whose forward
passes wait for each other, with prompts that peers prefill, calls, pauses, and ends."""
import random
import threading
import time

import cloudpickle
import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType

from tests.v1 import step_sync_group
from tests.v1.step_sync_group import CountedGroup
from tests.v1.test_hazards import prompt
from vllm_pd.dp.interface import StepDecision
from vllm_pd.protocol.actions import Released
from vllm_pd.protocol.messages import Attempt
from vllm_pd.v1.lockstep.options import StepSyncOptions
from vllm_pd.v1.lockstep.sync import common_name

QUIET_S = 0.1
IN_FLIGHT = pytest.mark.parametrize("in_flight", [1, 2], ids=["sync", "async"])


@pytest.fixture
def make(model_folder):
    groups = []

    def group(ranks: int = 2, options: StepSyncOptions | None = None, **settings) -> CountedGroup:
        groups.append(CountedGroup(model_folder, ranks, options, **settings))
        return groups[-1]

    yield group
    for one in groups:
        one.close()


def check(group: CountedGroup) -> None:
    """All answers are right, nothing is held, no rank makes a step any more, and nobody spoke of waves."""
    group.wait(group.rests)
    before = group.forwards()
    time.sleep(QUIET_S)
    group.follow()
    assert group.forwards() == before and len(set(before)) == 1
    for loop in group.ranks:
        loop.engine.check_answers()
        assert not [one for one in loop.waves if one.start_wave is not None or one.wave_complete is not None]


def park(group: CountedGroup, name: str = "a") -> Attempt:
    """A prompt at rank 1 goes to a peer."""
    loop = group.ranks[1]
    loop.add(name, prompt(100))
    group.wait(lambda: any(attempt.request_id == name for attempt in list(loop.engine.protocol.jobs)))
    return loop.engine.attempt(name)


def all_ended(group: CountedGroup) -> bool:
    return all(set(loop.engine.ended) == set(loop.engine.prompts) for loop in group.ranks)


@IN_FLIGHT
@pytest.mark.parametrize("rank", [0, 1])
def test_b70_b118_a_request_at_one_rank_is_all_that_the_others_need(make, rank, in_flight):
    """Between bursts the group is at rest. A request that ends by its length leaves no dummy behind."""
    group = make(threshold=10_000, in_flight=in_flight)
    busy, idle = group.ranks[rank], group.ranks[1 - rank]
    for burst in range(3):
        before = group.forwards()[rank]
        busy.add(f"r{burst}", prompt(200), 10)  # two steps of the prompt, nine of the other tokens
        group.wait(lambda name=f"r{burst}": name in busy.engine.ended)
        check(group)
        assert group.forwards()[rank] == before + 11
    assert idle.executor.dummies == group.forwards()[0] and not busy.executor.dummies


@IN_FLIGHT
@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (4, 2)])
def test_b72_b118_the_first_request_of_all_at_a_rank_without_a_front_end_54762(make, ranks, rank, in_flight):
    """B72: as on a host with `--headless`. It is there before any loop has begun, with the number of a wave that nobody
    else knows, and no other rank is sent anything."""
    group = make(ranks, first=lambda group: group.ranks[rank].add("a", prompt(50), 6, wave=3), threshold=10_000,
                 in_flight=in_flight)
    group.wait(lambda: "a" in group.ranks[rank].engine.ended)
    check(group)
    assert group.forwards() == [6] * ranks
    assert [loop.executor.dummies for loop in group.ranks] == [0 if one == rank else 6 for one in range(ranks)]


@IN_FLIGHT
@pytest.mark.parametrize(("seed", "ranks"), [(0, 2), (1, 2), (2, 4)])
def test_b70_b118_requests_at_all_ranks_at_any_time(make, seed, ranks, in_flight):
    group, draw = make(ranks, threshold=10_000, in_flight=in_flight), random.Random(seed)
    for burst in range(4):
        for number in range(draw.randint(1, 6)):
            group.ranks[draw.randrange(ranks)].add(f"{burst}-{number}", prompt(draw.randint(1, 300)),
                                                   draw.randint(1, 12))
            time.sleep(draw.choice([0, 0, 0.001, 0.01]))
        group.wait(lambda: all_ended(group))
        check(group)


@IN_FLIGHT
def test_b94_b118_a_prompt_that_a_peer_prefills_costs_the_group_no_step(make, in_flight):
    """What the peer says reaches one rank alone. The others learn of it by the step that this one requests."""
    group = make(in_flight=in_flight)
    park(group)
    group.wait(group.rests)
    before = group.forwards()
    time.sleep(QUIET_S)
    assert group.forwards() == before
    group.ranks[1].engine.prefilled("a")
    group.wait(lambda: "a" in group.ranks[1].engine.ended)
    check(group)
    assert group.forwards()[0] > before[0]


def test_b20_b94_b118_a_parked_prompt_is_aborted_at_the_moment_of_its_resume(make):
    """In both orders, again and again: nothing is held, and no rank waits for a pass that the other does not make."""
    group = make()
    loop = group.ranks[1]
    for number in range(40):
        name = f"r{number}"
        attempt = park(group, name)
        group.wait(group.rests)
        abort = lambda name=name: loop.core.input_queue.put_nowait((EngineCoreRequestType.ABORT, [name]))
        if number % 2:
            abort()
            loop.engine.tell(Released(attempt))
        else:
            loop.engine.prefilled(name)
            abort()
        group.wait(lambda name=name: name not in loop.engine.scheduler.requests)
        loop.engine.ended.setdefault(name, "aborted")
        group.wait(lambda: not len(loop.engine.binding.fence))
    check(group)
    loop.engine.check_at_rest()


@IN_FLIGHT
def test_a_call_of_the_workers_comes_after_the_same_forward_on_all_ranks(make, in_flight):
    """Its collectives meet those of the other ranks' calls, and no forward pass. It reaches the ranks at any time."""
    group, draw = make(threshold=10_000, in_flight=in_flight), random.Random(3)
    for number in range(12):
        for loop in group.ranks:
            loop.add(f"{number}", prompt(draw.randint(1, 200)), draw.randint(1, 20))
        for loop in draw.sample(group.ranks, 2):
            loop.call(number, "collective_rpc", "meet")
            time.sleep(draw.choice([0, 0.002]))
        group.wait(lambda number=number: len(group.answers[number]) == 2)
        assert group.answers[number] == [None, None]
    group.wait(lambda: all_ended(group))
    check(group)
    assert group.ranks[0].executor.calls == group.ranks[1].executor.calls and group.ranks[0].executor.calls


def test_a_call_that_one_rank_never_gets_fails_by_its_deadline_and_nothing_else_waits(make):
    group = make(options=StepSyncOptions(shared_memory=False, call_wait_s=0.3), threshold=10_000)
    group.ranks[0].call(1, "collective_rpc", "meet")
    group.ranks[1].add("a", prompt(50))
    group.wait(lambda: "a" in group.ranks[1].engine.ended and len(group.answers[1]) == 1)
    assert "was made by no rank" in group.answers[1][0]
    check(group)


def test_calls_of_one_kind_with_other_arguments_are_not_taken_for_each_other(make):
    """A rank that was away while the others gave one up must not make it together with the next one."""
    group = make(options=StepSyncOptions(shared_memory=False, call_wait_s=0.5))
    group.ranks[0].call(1, "collective_rpc", "meet", None, (1, ))
    group.ranks[1].call(2, "collective_rpc", "meet", None, (2, ))
    group.wait(lambda: len(group.answers[1]) == len(group.answers[2]) == 1)
    assert all("was made by no rank" in group.answers[number][0] for number in (1, 2))
    assert not group.ranks[0].executor.calls and not group.ranks[1].executor.calls


@IN_FLIGHT
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_is_complete_when_all_ranks_have_come_to_it(make, mode, in_flight):
    """Then no rank makes a forward pass until all are resumed, which they are after the same one."""
    group = make(threshold=10_000, in_flight=in_flight)
    for loop in group.ranks:
        loop.add("a", prompt(100), 300)
    group.wait(lambda: min(group.forwards()) > 3)
    group.ranks[0].call(1, "pause_scheduler", mode, False)
    time.sleep(0.02)
    assert group.answers[1] == []
    group.ranks[1].call(1, "pause_scheduler", mode, False)
    group.wait(lambda: len(group.answers[1]) == 2)
    assert group.answers[1] == [None, None]
    group.ranks[0].add("b", prompt(60), 5)
    before = group.forwards()
    time.sleep(QUIET_S)
    assert group.forwards() == before and before[0] == before[1]
    group.ranks[0].call(2, "resume_scheduler")
    time.sleep(QUIET_S)
    assert group.forwards() == before, "one rank was resumed alone"
    group.ranks[1].call(2, "resume_scheduler")
    group.wait(lambda: len(group.answers[2]) == 2 and "b" in group.ranks[0].engine.ended)
    if mode == "abort":
        for loop in group.ranks:
            assert loop.engine.ended["a"] != "length"
            del loop.engine.prompts["a"], loop.engine.ended["a"]
    group.wait(lambda: all_ended(group))
    check(group)


@IN_FLIGHT
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_b118_all_ranks_sleep_after_the_same_pass_and_wake_together(make, mode, in_flight):
    """B118: `sleep` is a pause and what follows it: no rank's weights go while another one may make a pass, and none
    makes one before all have theirs again."""
    group = make(threshold=10_000, in_flight=in_flight)
    for loop in group.ranks:
        loop.add("a", prompt(100), 300)
    group.wait(lambda: min(group.forwards()) > 3)
    group.ranks[0].call(1, "sleep", 1, mode)
    time.sleep(0.02)
    group.follow()
    assert group.answers[1] == [] and not any(loop.executor.calls for loop in group.ranks)
    group.ranks[1].call(1, "sleep", 1, mode)
    group.wait(lambda: len(group.answers[1]) == 2)
    before = group.forwards()
    assert group.answers[1] == [None, None] and before[0] == before[1]
    assert [loop.executor.calls for loop in group.ranks] == [[("sleep", before[0])]] * 2
    if mode == "wait":
        assert all(loop.engine.ended["a"] == "length" for loop in group.ranks)
    group.ranks[0].add("b", prompt(60), 5)
    group.ranks[0].call(2, "wake_up")
    time.sleep(QUIET_S)
    group.follow()
    assert group.forwards() == before and group.answers[2] == [], "one rank has woken alone"
    assert all(len(loop.executor.calls) == 1 for loop in group.ranks)
    group.ranks[1].call(2, "wake_up")
    group.wait(lambda: len(group.answers[2]) == 2 and "b" in group.ranks[0].engine.ended)
    assert group.answers[2] == [None, None]
    assert [loop.executor.calls[1] for loop in group.ranks] == [("wake_up", before[0])] * 2
    if mode == "abort":
        for loop in group.ranks:
            assert loop.engine.ended["a"] != "length"
            del loop.engine.prompts["a"], loop.engine.ended["a"]
    group.wait(lambda: all_ended(group))
    check(group)
    # The same from rest, where a rank has nothing to wait for but the other one.
    group.ranks[1].call(3, "sleep", 1, mode)
    time.sleep(QUIET_S)
    assert all(len(loop.executor.calls) == 2 for loop in group.ranks), "one rank sleeps alone"
    group.ranks[0].call(3, "sleep", 1, mode)
    group.call(4, "wake_up")
    group.wait(lambda: len(group.answers[4]) == 2)
    assert group.answers[3] == group.answers[4] == [None, None]
    assert len({tuple(loop.executor.calls) for loop in group.ranks}) == 1
    check(group)


def begin_pause(group: CountedGroup) -> None:
    group.call(1, "pause_scheduler", "wait", False)


def begin_drain(group: CountedGroup) -> None:
    for loop in group.ranks:
        loop.core.vllm_config.shutdown_timeout = 60
        loop.core.shutdown_state = step_sync_group.EngineShutdownState.REQUESTED
        loop.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


@IN_FLIGHT
@pytest.mark.parametrize("begin", [begin_pause, begin_drain])
def test_b94_b96_a_rank_that_waits_for_a_peer_makes_the_passes_of_the_others(make, begin, in_flight):
    """Also while it makes steps without tokens, of which some are always in flight."""
    group = make(in_flight=in_flight)
    waiting, other = group.ranks[1], group.ranks[0]
    park(group)
    other.add("b", prompt(10), 100)
    group.wait(lambda: group.forwards()[0] > 3)
    begin(group)
    group.wait(lambda: "b" in other.engine.ended)
    assert "a" not in waiting.engine.ended and group.answers[1] == []
    waiting.engine.prefilled("a")
    group.wait(lambda: "a" in waiting.engine.ended)
    for loop in group.ranks:
        loop.engine.check_answers()


def test_a_client_that_asks_is_answered_while_another_call_waits(make):
    """With a server for each rank a resume may wait for minutes. A rank's own front end may ask meanwhile."""
    group = make()
    group.ranks[1].call(1, "resume_scheduler")
    group.ranks[1].call(2, "is_scheduler_paused")
    group.wait(lambda: group.answers[2] == [None])
    assert group.answers[1] == []
    group.ranks[0].call(1, "resume_scheduler")
    group.wait(lambda: group.answers[1] == [None, None])


def test_a_pause_that_never_came_to_all_ranks_keeps_none_from_its_end(make):
    group = make(threshold=10_000)
    group.ranks[0].call(1, "pause_scheduler", "wait", False)
    group.wait(lambda: group.ranks[0].core._paused)
    began = time.monotonic()
    group.close()
    group.follow()
    assert time.monotonic() - began < 4.0 and "the server shuts down" in group.answers[1][0]


def test_a_call_has_one_name_in_all_processes():
    """A function, or an object, that each has unpickled for itself; and calls with other arguments have others."""
    def update(worker):
        return worker

    first, second = (cloudpickle.loads(cloudpickle.dumps(update)) for _ in range(2))
    call = lambda *arguments: common_name((0, 1, "collective_rpc", arguments))
    assert first is not second and call(first, None, (1, )) == call(second, None, (1, ))
    assert call("load", None, (object(), b"a")) == call("load", None, (object(), b"a"))
    assert len({call("load", None, (1, )), call("load", None, (2, )), call("load", None, ([1], )), call("save")}) == 4
    assert common_name((0, 1, "is_sleeping", ())) == 0


def test_a_pause_of_one_rank_alone_keeps_the_other_serving_and_can_be_taken_back(make):
    """With a server for each rank. The rank that is paused makes the passes that the other needs."""
    group = make(threshold=10_000)
    paused, other = group.ranks
    paused.call(1, "pause_scheduler", "wait", False)
    group.wait(lambda: paused.core.scheduler.pause_state is PauseState.PAUSED_NEW)
    other.add("a", prompt(80), 6)
    group.wait(lambda: "a" in other.engine.ended)
    assert group.answers[1] == []
    group.call(2, "resume_scheduler")
    group.wait(lambda: len(group.answers[2]) == 2)
    assert group.answers[2] == [None, None] and "resumed before" in group.answers[1][0]
    paused.add("b", prompt(80), 6)
    group.wait(lambda: "b" in paused.engine.ended)
    check(group)


def test_a_rank_that_drains_gets_the_passes_of_those_that_have_no_work(make):
    """Those stay until all are to end. Without them it would wait for ever."""
    group = make(threshold=10_000)
    for loop in group.ranks:
        loop.core.vllm_config.shutdown_timeout = 30
    group.ranks[1].add("a", prompt(100), 60)
    group.wait(lambda: group.forwards()[1] > 3)
    group.close()
    group.follow()
    group.ranks[1].engine.check_answers()
    assert group.forwards()[0] == group.forwards()[1] >= 60


def test_a_rank_that_is_to_end_stays_no_longer_than_it_may(make, monkeypatch):
    """Where the others go on: their servers have got no signal."""
    monkeypatch.setattr("vllm_pd.v1.lockstep.sync.LINGER_S", 0.3)
    group = make(threshold=10_000)
    leaving, other = group.ranks
    leaving.core.shutdown_state = step_sync_group.EngineShutdownState.REQUESTED
    leaving.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    other.add("a", prompt(100), 3)
    group.wait(lambda: "a" in other.engine.ended)
    leaving.thread.join(5.0)
    assert not leaving.thread.is_alive()


def test_b70_b118_a_rank_that_does_not_keep_up_is_found(model_folder, monkeypatch):
    """The test can fail: a forward pass that the other rank does not make never ends."""
    group = CountedGroup(model_folder, threshold=10_000)
    monkeypatch.setattr(step_sync_group, "BARRIER_S", 1.0)
    idle = group.ranks[1].core.step_sync.member
    before_step = idle.before_step
    idle.before_step = lambda has_work, *most: before_step(True, *most) if has_work else StepDecision.IDLE
    group.ranks[0].add("a", prompt(20))
    with pytest.raises(AssertionError):
        group.wait(lambda: "a" in group.ranks[0].engine.ended)
    assert isinstance(group.ranks[0].error, threading.BrokenBarrierError)
    for loop in group.ranks:
        loop.core.step_sync.member.expect_end()
        loop.core.step_sync.close()
