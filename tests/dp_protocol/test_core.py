# SPDX-License-Identifier: Apache-2.0
"""The step sync by hand: single rules, the horizon's costs, who counts as dead, frames."""
import msgspec
import pytest

from vllm_pd.dp import messages
from vllm_pd.dp.calls import CallAction, CallRegisters, CallState
from vllm_pd.dp.core import Coordinator, Lookahead, Participant, RankState, StepRequest
from vllm_pd.dp.horizon import Meter
from vllm_pd.dp.interface import StepDecision
from vllm_pd.dp.liveness import GroupLiveness
from vllm_pd.rpc.codec import BadFrame, FrameFault

NEXT = Lookahead(1, 1)


def test_b70_work_is_never_waited_for_and_is_asked_for_first():
    rank = Participant()
    assert rank.begin(True, None, NEXT) == (StepDecision.FORWARD, StepRequest(2, urgent=True))
    rank.end()
    assert rank.begin(True, 2, NEXT) == (StepDecision.FORWARD, StepRequest(3, urgent=False))
    rank.end()
    assert rank.begin(True, 1, NEXT) == (StepDecision.FORWARD, None)
    rank.end()
    assert rank.begin(False, None, NEXT) == (StepDecision.IDLE, None)


def test_b70_what_a_rank_asks_of_others_it_does_itself():
    rank = Participant()
    rank.begin(True, None, Lookahead(2, 2))  # asks for 4
    assert [rank.begin(False, None, NEXT)[0] for _ in range(4)] == [StepDecision.DUMMY] * 3 + [StepDecision.IDLE]


def test_b71_old_news_change_nothing():
    rank = Participant()
    assert rank.update(3, False)
    assert not rank.update(3, False)
    assert not rank.update(1, False)
    assert [rank.begin(False, None, NEXT)[0] for _ in range(4)] == [StepDecision.DUMMY] * 3 + [StepDecision.IDLE]
    assert not rank.update(2, False)
    assert not rank.due


def test_a_rank_that_has_left_has_no_work():
    rank = Participant()
    rank.leave()
    with pytest.raises(ValueError, match="has left"):
        rank.begin(True, 1, NEXT)


def test_others_need_a_rank_that_is_ready_for_a_call_and_rank_0_while_one_is_open():
    ranks = [Participant(call_state=CallState(leads=True)), Participant()]
    for rank in ranks:
        rank.hold(9)
    assert not any(rank.engaged for rank in ranks)
    ranks[0].advance()
    ranks[1].update(0, False, registers=ranks[0].call_state.registers)
    ranks[1].advance()
    assert all(rank.engaged for rank in ranks)
    assert ranks[0].give_up(9)
    ranks[1].update(0, False, registers=ranks[0].call_state.registers)
    ranks[1].advance()
    assert not any(rank.engaged for rank in ranks)


def test_a_call_is_watched_until_the_last_rank_has_made_it():
    ranks, coordinator = [Participant(call_state=CallState(leads=True)), Participant()], Coordinator.of(2)

    def talk():
        for _ in range(2):
            for number, rank in enumerate(ranks):
                coordinator.receive(number, rank.state())
                rank.update(coordinator.step, coordinator.over, registers=coordinator.registers,
                            ready=rank.call_state.ready)

    def turn():
        talk()
        return [rank.advance() for rank in ranks]

    for rank in ranks:
        rank.hold(9)
    moves = [turn() for _ in range(4)]
    assert moves[-1] == [(CallAction.MAKE, 9), None] or moves[-1] == [(CallAction.MAKE, 9)] * 2
    talk()
    assert [rank.call_pending for rank in ranks] == [True, True]
    assert not coordinator.quiet and not coordinator.registers.open
    assert [coordinator.needs(rank) for rank in range(2)] == [True, True]
    ranks[0].made()
    talk()
    assert not ranks[0].call_pending and not coordinator.needs(0) and coordinator.needs(1) and not coordinator.quiet
    ranks[1].advance()
    ranks[1].made()
    talk()
    assert not coordinator.needs(1) and coordinator.quiet


def test_b72_the_coordinator_is_a_register_that_whoever_is_late_can_read():
    coordinator = Coordinator.of(2)
    coordinator.receive(0, RankState(5, -1, 0, False, False))
    coordinator.receive(0, RankState(3, -1, 0, False, False))
    assert coordinator.step == 5
    assert coordinator.outdated_ranks() == [0]
    coordinator.receive(1, RankState(0, -1, 0, False, False))
    assert coordinator.outdated_ranks() == [0, 1]
    coordinator.receive(0, RankState(5, 5, 5, False, False))
    coordinator.receive(1, RankState(5, 5, 4, False, False))
    assert coordinator.outdated_ranks() == []
    assert not coordinator.quiet
    coordinator.receive(1, RankState(5, 5, 5, False, False))
    assert coordinator.quiet


def test_all_is_over_only_when_all_have_left_and_it_is_owed_to_all():
    coordinator = Coordinator.of(2)
    coordinator.receive(0, RankState(2, 2, 2, True, False))
    assert not coordinator.over
    coordinator.receive(1, RankState(2, 2, 2, True, False))
    assert coordinator.over
    assert coordinator.outdated_ranks() == [0, 1]
    coordinator.receive(1, RankState(2, 2, 2, True, True))
    assert coordinator.outdated_ranks() == [0]


@pytest.mark.parametrize("lookahead, agreed, remaining, target", [
    (NEXT, 9, None, 11),  # the step itself is not agreed yet, so it is asked for too
    (NEXT, 10, None, 11),
    (NEXT, 11, None, None),
    (NEXT, 10, 1, None),  # the last: none after it
    (NEXT, 9, 1, 10),
    (NEXT, 9, 0, 10),
    (Lookahead(2, 3), 10, None, 14),
    (Lookahead(2, 3), 12, None, None),
    (Lookahead(2, 3), 11, 3, 12),
    (Lookahead(2, 3), 12, 3, None),
])
def test_how_far_is_asked(lookahead, agreed, remaining, target):
    assert lookahead.target(10, agreed, remaining) == target


def meter(step_s, answer_s, horizon=64, size=2):
    one = Meter(size, horizon)
    for _ in range(200):
        one.stepped(step_s)
        one.answered(answer_s)
    return one


def test_the_lead_covers_the_time_that_the_word_takes():
    assert meter(0.020, 0.001).lookahead.lead == 1
    assert meter(0.010, 0.035).lookahead.lead == 4
    assert meter(0.010, 0.035, horizon=3).lookahead.lead == 3


def test_nothing_measured_only_the_next_step():
    assert Meter(2, 8).lookahead == NEXT


def test_the_stride_is_where_asks_and_dummies_cost_the_same():
    many, few = meter(0.001, 0.0001), meter(0.001, 0.0001)
    for _ in range(100):
        for one, run in ((many, 10), (few, 1000)):
            for _ in range(run):
                one.worked()
            one.ran_out(early=True)
    assert many.lookahead.stride < few.lookahead.stride
    assert many.lookahead.stride == round((2 * 3 * 60e-6 * 10 / 0.001) ** 0.5)


def test_ends_that_were_expected_cost_nothing_and_count_for_nothing():
    one = meter(0.001, 0.0001)
    before = one.lookahead
    for _ in range(100):
        one.worked()
        one.ran_out(early=False)
    assert one.lookahead == before


def test_slow_steps_keep_the_horizon_short():
    assert meter(0.050, 0.001).lookahead == NEXT


def test_the_horizon_is_bounded():
    one = meter(0.0001, 0.01, horizon=8)
    assert one.lookahead.lead + one.lookahead.stride - 1 == 8


class TestGroupLiveness:
    """A rank is dead when it is silent while there is something to do."""

    def test_b73_who_is_silent_is_found(self):
        liveness = GroupLiveness([1, 2], timeout_s=4.0, stall_s=100.0)
        for now in range(4):
            assert liveness.check(float(now), now) is None
            liveness.heard(2, float(now))
        assert liveness.check(4.0, 4) is None
        assert liveness.check(4.5, 5).rank == 1

    def test_who_was_stopped_itself_blames_nobody(self):
        liveness = GroupLiveness([1], timeout_s=4.0, stall_s=100.0)
        assert liveness.check(0.0, 0) is None
        assert liveness.check(50.0, 0) is None
        assert liveness.check(51.0, 0) is None

    def test_in_a_quiet_group_time_does_not_count(self):
        liveness = GroupLiveness([1], timeout_s=4.0, stall_s=100.0)
        liveness.check(0.0, 0)
        liveness.reset()
        assert liveness.check(1.9, 0) is None
        assert liveness.check(3.8, 0) is None
        assert liveness.check(5.7, 0) is None
        assert liveness.check(7.0, 0) is not None

    def test_b73_a_forward_that_never_ends_is_found_although_all_live(self):
        liveness = GroupLiveness([1], timeout_s=4.0, stall_s=10.0)
        found = None
        for now in range(12):
            liveness.heard(1, float(now))
            found = liveness.check(float(now), 7)
        assert found.rank is None
        assert "stall_s" in found.text


DP = b"DP" + bytes((messages.VERSION,))
SAY = messages.RankReport(1, RankState(5, -1, 3, True, False, 2, 1, CallRegisters(3, 77, 1, 2, 5, 2)), answer=True)
TELL = messages.CoordinatorUpdate(5, False, True, CallRegisters(3, 77, 1, 2, 5, 3), 3, False, "why")


LATE = messages.RankReport(1, RankState(5, 5, 5, False, False, 1 << 40, 1 << 40,
                                        CallRegisters(1 << 40, 77, 1, 1 << 40, 5, 2)))


@pytest.mark.parametrize("message", [SAY, TELL, LATE])
def test_messages_survive_the_wire(message):
    assert messages.decode([messages.encode(message)]) == message


@pytest.mark.parametrize("frames, fault", [
    ([], FrameFault.SHAPE),
    ([b"DP"], FrameFault.SHAPE),
    ([b"GET / HTTP/1.1"], FrameFault.SHAPE),
    ([messages.encode(SAY)] * 2, FrameFault.SHAPE),
    ([b"DP" + bytes(5000)], FrameFault.SIZE),
    ([b"DP\x63" + messages.encode(SAY)[3:]], FrameFault.VERSION),
    ([messages.encode(SAY)[:-1]], FrameFault.CONTENT),
    ([messages.encode(SAY) + b"\0"], FrameFault.CONTENT),
    ([DP + msgspec.msgpack.encode(["RankReport", 1, [-1, 0, 0, False, False]])], FrameFault.CONTENT),
    ([DP + msgspec.msgpack.encode(["RankReport", 1, [1 << 63, 0, 0, False, False]])], FrameFault.CONTENT),
    ([DP + msgspec.msgpack.encode(["CoordinatorUpdate", 1, 1, False])], FrameFault.CONTENT),
    ([DP + msgspec.msgpack.encode(["Nothing", 1])], FrameFault.CONTENT),
])
def test_b81_what_is_no_message_is_told_apart(frames, fault):
    with pytest.raises(BadFrame) as caught:
        messages.decode(frames)
    assert caught.value.fault is fault
