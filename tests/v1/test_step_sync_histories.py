# SPDX-License-Identifier: Apache-2.0
"""The step sync through drawn histories (B20, B70, B94, B118): requests with common beginnings, local and remote,
clients that leave at any time, also right at the resume of a parked prompt, preemption, calls and pauses of all ranks,
late messages. `lockstep_histories` checks each. Defects that are planted must be found."""
import contextlib

import pytest

from tests.v1 import step_sync_group
from tests.v1.lockstep_histories import FORMS, PER_FLEET, HistoryFleet, draw_history
from tests.v1.step_sync_group import CountedGroup
from vllm_pd.dp.interface import StepDecision
from vllm_pd.dp.member import BaseMember
from vllm_pd.v1.lockstep.sync import StepSync
from vllm_pd.v1.scheduler import HandoverScheduling

BROKEN_AFTER_S = 2.0
FLEETS = len(FORMS)
MANY = 1000 // PER_FLEET  # fleets


@pytest.fixture
def fleet(model_folder, request):
    """With the number in the place of a parameter."""
    fleet = HistoryFleet(model_folder, CountedGroup, request.param % len(FORMS), request.param)
    yield fleet
    fleet.close()


@pytest.mark.search
@pytest.mark.parametrize("fleet", [*range(FLEETS), *(pytest.param(number, marks=pytest.mark.heavy)
                                                     for number in range(FLEETS, MANY))], indirect=True)
def test_b20_b70_b94_b118_drawn_histories(fleet, request):
    first = PER_FLEET * request.node.callspec.params["fleet"]
    for number in range(first, first + PER_FLEET):
        fleet.run(draw_history(number, calls=True))
    executors = [loop.executor for loop in fleet.wires.d.ranks]
    print(f"{first}: {fleet.figures()}, {fleet.ended}, jobs {sum(fleet.wires.done)}, reads {fleet.wires.reads}, "
          f"left at their resume {fleet.wires.left_at_resume}, preempted {sum(one.preempted for one in executors)}, "
          f"late messages {fleet.late_messages}")
    assert fleet.ended["length"] and fleet.ended["aborted"] and sum(fleet.wires.done) and fleet.wires.left_at_resume
    assert all(one.calls for one in executors), "no call was made"


def find(folder, monkeypatch, form: int = 0, most: int = 20) -> str:
    """Run histories until one fails. Returns what has ended a rank, or failed."""
    monkeypatch.setattr(step_sync_group, "BARRIER_S", BROKEN_AFTER_S)
    monkeypatch.setattr("tests.v1.lockstep_histories.LIMIT_S", 2 * BROKEN_AFTER_S)
    monkeypatch.setattr(StepSync, "_abort", lambda sync, error: print("this process would end:", error))
    fleet = HistoryFleet(folder, CountedGroup, form, 0)
    try:
        with pytest.raises(AssertionError) as failed:
            for number in range(most):
                fleet.run(draw_history(number, calls=True))
    finally:
        fleet.end()
    errors = [loop.error for group in fleet.groups for loop in group.ranks if loop.error is not None]
    print(number, errors, failed.value)
    return " ".join(map(repr, errors)) or str(failed.value)


@pytest.mark.parametrize("form", [0, 1], ids=["sync", "async"])
def test_a_rank_that_does_not_keep_up_is_found(model_folder, monkeypatch, form):
    before_step = BaseMember.before_step
    monkeypatch.setattr(BaseMember, "before_step", lambda member, has_work, *most: before_step(member, has_work, *most)
                        if has_work or member.rank == 0 else StepDecision.IDLE)
    assert "BrokenBarrierError" in find(model_folder, monkeypatch, form)


@pytest.mark.parametrize("form", [0, 1], ids=["sync", "async"])
def test_a_step_that_is_not_requested_is_found(model_folder, monkeypatch, form):
    """As if `start_wave` were gone, and nothing in its place."""
    monkeypatch.setattr(StepSync, "forward", lambda sync, run, *args: run(*args))
    assert "BrokenBarrierError" in find(model_folder, monkeypatch, form)


def test_a_step_after_a_resume_that_is_not_requested_is_found(model_folder, monkeypatch):
    """Only the first one, and only of a rank that has nothing else in it. All other steps are requested."""
    forward, resume, resumed = StepSync.forward, HandoverScheduling.resume_parked, set()

    def note(scheduler, request):
        resumed.add(request.request_id)
        resume(scheduler, request)

    def skip(sync, run, output):
        first = resumed & output.num_scheduled_tokens.keys()
        resumed.difference_update(first)
        return run(output) if len(first) == len(output.num_scheduled_tokens) else forward(sync, run, output)

    monkeypatch.setattr(HandoverScheduling, "resume_parked", note)
    monkeypatch.setattr(StepSync, "forward", skip)
    assert "BrokenBarrierError" in find(model_folder, monkeypatch)


@pytest.mark.parametrize("form", [0, 1], ids=["sync", "async"])
def test_a_rank_that_rests_for_a_call_and_schedules_all_the_same_is_found(model_folder, monkeypatch, form):
    class Unbound:
        """A rank for which every step is a step."""
        may_step = True

        def __init__(self, member):
            self.member = member

        def __getattr__(self, name):
            return getattr(self.member, name)

    step = StepSync.step

    @contextlib.contextmanager
    def unbound(sync, make):
        member = sync.member
        sync.member = Unbound(member)
        try:
            with step(sync, make):
                sync.member = member
                yield
        finally:
            sync.member = member

    monkeypatch.setattr(StepSync, "step", unbound)
    assert "no rank has requested it and this rank waits for a call" in find(model_folder, monkeypatch, form, 60)
