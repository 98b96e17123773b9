# SPDX-License-Identifier: Apache-2.0
"""Models with the mistakes that such protocols are known for, one each. The explorer must find all of them."""
from collections.abc import Iterator

from msgspec.structs import replace

from tests.dp_protocol.models import At, Rank, RpcModel, Setting, ShmModel, State, astuple, put, without
from vllm_pd.dp.calls import CallState
from vllm_pd.dp.core import Coordinator, Lookahead, Participant, RankState
from vllm_pd.dp.interface import StepDecision


class HorizonOnOneSide(RpcModel):
    """The requesting rank runs up to the horizon, but has requested only the current step of the others."""

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        before = rank.says
        for what, after in super().decide(state, index, rank):
            rank = after.ranks[index]
            if len(rank.says) > len(before):
                said = (rank.participant[0], *astuple(Participant(*rank.participant).state())[1:], False)
                after = put(after, index, rank._replace(says=(*before, said)))
            yield what, after


class SenderExcluded(RpcModel):
    """The coordinator adds the horizon, and updates all ranks but the requesting one."""
    drops = False

    def __init__(self, setting: Setting):
        super().__init__(setting._replace(lookahead=Lookahead(0, 1)))
        self.horizon = 1

    def as_heard(self, known: RankState) -> RankState:
        return RankState(known.asked + 1, *astuple(known)[1:]) if known.asked else known

    def tells(self, to: int, because_of: int) -> bool:
        return to != because_of


class EdgeTriggeredWake(RpcModel):
    """A wakeup reaches only a loop that is already waiting, and the loop does not check again before it waits."""

    def loop(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if rank.at is At.CHECK and not self.works(rank):
            yield "waits", put(state, index, rank._replace(at=At.GET))
        else:
            yield from super().loop(state, index, rank)

    def wake_loop(self, rank: Rank) -> Rank:
        return rank._replace(woken=False, queue=rank.queue or rank.at is At.GET)


class LatchedRunning(RpcModel):
    """`latch` is a flag "the group is running": any update of the coordinator sets it, and it is reset when the agreed
    step has been run. A late update sets it again."""
    drops = False

    def told(self, rank: Rank, message: tuple | str) -> Rank:
        return super().told(rank, message)._replace(latch=True, queue=True)

    def due(self, state: State, rank: Rank) -> bool:
        return rank.latch or super().due(state, rank)

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        participant = Participant(*rank.participant)
        if rank.latch and not self.works(rank) and participant.local >= participant.agreed:
            participant.local += 1
            yield "dummy", put(state, index, rank._replace(participant=astuple(participant), at=At.DUMMY))
        else:
            yield from super().decide(state, index, rank)

    def ended(self, rank: Rank) -> Rank:
        participant = Participant(*rank.participant)
        return super().ended(rank)._replace(latch=participant.local < participant.agreed)


class ParkedIsWork(RpcModel):
    """A rank makes forwards for a request whose prompt a peer prefills."""

    def works(self, rank: Rank) -> bool:
        return super().works(rank) or bool(rank.parked)


class RunsForParked(RpcModel):
    """`latch` is a flag "this rank has requests": set when it gets one that is parked, and reset when none is left.
    While it is set, the rank makes dummy forwards."""

    def parks(self, rank: Rank, tokens: int) -> Rank:
        return super().parks(rank, tokens)._replace(latch=True)

    def due(self, state: State, rank: Rank) -> bool:
        return rank.latch or super().due(state, rank)

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        rank = rank._replace(latch=rank.latch and bool(rank.parked))
        participant = Participant(*rank.participant)
        if rank.latch and not self.works(rank):
            participant.local += 1
            yield "dummy", put(state, index, rank._replace(participant=astuple(participant), at=At.DUMMY))
        else:
            yield from super().decide(state, index, rank)


class ResumesBesideTheQueue(RpcModel):
    """What a peer says is noted, but it does not go through the queue of the loop, which may be about to wait."""

    def hears(self, rank: Rank, tokens: int) -> Rank:
        return super().hears(rank, tokens)._replace(queue=rank.queue)


class ResumesBesideTheQueueInMemory(ShmModel):
    """The same by shared memory."""

    def hears(self, rank: Rank, tokens: int) -> Rank:
        return super().hears(rank, tokens)._replace(queue=rank.queue)


class ResumesUnrequested(RpcModel):
    """`latch`: a request resumes. The next forward is begun without a request, as if the others had seen it, too."""

    def looked(self, rank: Rank) -> Rank:
        return super().looked(rank)._replace(latch=True)

    def begin(self, state: State, rank: Rank) -> tuple:
        participant = Participant(*rank.participant)
        if not (rank.latch and self.works(rank) and participant.local >= participant.agreed):
            return super().begin(state, rank._replace(latch=False))
        participant.local += 1
        begun = rank._replace(participant=astuple(participant), at=At.FORWARD, latch=False)
        return begun, StepDecision.FORWARD, None, False, max(state.last, participant.local)


class CachedStop(RpcModel):
    """`latch` is the decision to stop, made at the end of a forward and kept until the next one."""

    def ended(self, rank: Rank) -> Rank:
        participant = Participant(*rank.participant)
        return super().ended(rank)._replace(latch=participant.local >= participant.agreed)

    def due(self, state: State, rank: Rank) -> bool:
        return not rank.latch and super().due(state, rank)

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if rank.latch and not self.works(rank):
            yield "idle", put(state, index, rank._replace(at=At.CHECK))
        else:
            yield from super().decide(state, index, rank)


class LeavesAtOnce(RpcModel):
    """A rank ends as soon as it has left and has run all steps that it knows."""

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        participant = Participant(*rank.participant)
        if participant.left and participant.local >= participant.agreed:
            yield "end", put(state, index, rank._replace(at=At.ENDED))
        else:
            yield from super().decide(state, index, rank)


class NoWakeup(ShmModel):
    """The number on the page is right, but no rank is woken."""

    def wakes(self, urgent: bool) -> bool:
        return False


class OnlyLateWakeups(ShmModel):
    """Requests made ahead of need wake the others, and urgent ones do not."""

    def wakes(self, urgent: bool) -> bool:
        return not urgent


class EdgeTriggeredWakeInMemory(ShmModel):
    """A wakeup reaches only a loop that is already waiting, and the loop does not check again before it waits."""

    def loop(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if rank.at is At.CHECK and not self.works(rank):
            yield "waits", put(state, index, rank._replace(at=At.GET))
        else:
            yield from super().loop(state, index, rank)

    def of(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        for what, after in super().of(state, index, rank):
            if what == "is woken by another" and rank.at is not At.GET:
                after = put(after, index, rank._replace(woken=False))
            yield what, after


class ReadyRankRequests(ShmModel):
    """A rank that is ready for a call still requests steps."""

    def works(self, rank: Rank) -> bool:
        return rank.work > 0

    def begin(self, state: State, rank: Rank) -> tuple:
        participant = Participant(*rank.participant)
        call_state = participant.call_state
        participant.call_state = CallState()
        begun, *rest = super().begin(state, rank._replace(participant=astuple(participant)))
        participant = replace(Participant(*begun.participant), call_state=call_state)
        return begun._replace(participant=astuple(participant)), *rest


class CallsBeforeTheFinalStep(RpcModel):
    """A call that is released is made at once."""

    def advanced(self, state: State, rank: Rank) -> tuple[str, Rank] | None:
        call_state = Participant(*rank.participant).call_state
        if call_state.promised and call_state.registers.released == call_state.ready:
            call_state = replace(call_state, registers=replace(call_state.registers, final=rank.participant[0]))
            rank = rank._replace(participant=astuple(replace(Participant(*rank.participant), call_state=call_state)))
        return super().advanced(state, rank)


class IgnoresTheFinalStep(ShmModel):
    """A rank runs up to the agreed step until it has made its call, not up to the final step."""

    def refreshed(self, state: State, rank: Rank) -> Rank:
        participant = Participant(*super().refreshed(state, rank).participant)
        calls = participant.call_state.registers
        if participant.call_state.promised and calls.released == participant.call_state.ready:
            participant.call_state = replace(participant.call_state, registers=replace(calls, final=participant.agreed))
        return rank._replace(participant=astuple(participant))


class ReleasedBeforeAllAreReady(ShmModel):
    """Rank 0 assumes that the others are ready."""

    def refreshed(self, state: State, rank: Rank) -> Rank:
        participant = Participant(*super().refreshed(state, rank).participant)
        if participant.call_state.leads:
            calls = participant.call_state.registers
            participant.call_state = replace(participant.call_state, registers=replace(calls, ready=calls.proposed))
        return rank._replace(participant=astuple(participant))


class LeavesAfterItsPromise(ShmModel):
    """A rank ends when all have left, although it is ready for a call."""

    def begin(self, state: State, rank: Rank) -> tuple:
        participant = Participant(*rank.participant)
        if participant.over and participant.local >= participant.agreed:
            return rank._replace(at=At.ENDED), StepDecision.END, None, False, state.last
        return super().begin(state, rank)


class WatchesNoCall(ShmModel):
    """The watch ends when a call is released, as if all ranks had made it."""

    def watched(self, state: State) -> bool:
        calls, step = state.ranks[0].known[3], max(rank.known[0] for rank in state.ranks)
        return calls.open or not all(self.done(rank, step, 0) for rank in state.ranks)


class MissesNobodyWhoHasLeft(ShmModel):
    """When all have left, a rank that dies in a call, or a rank 0 that dies before it has decided about one, counts as
    done."""

    def may_be_gone(self, state: State, rank: Rank) -> bool:
        step = max(other.known[0] for other in state.ranks)
        return all(other.known[1] for other in state.ranks) and self.done(rank, step, 0)


class EndsWhenNobodyNeedsIt(ShmModel):
    """A rank that has left ends, and reports it, when all requested steps have been run. Others may still get
    requests."""

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        participant = Participant(*rank.participant)
        if participant.left and not self.watched(state):
            state = state._replace(spare=state.spare._replace(closes=1))
            yield "ends", self.crash(state, index, rank, At.CLOSED, "closes")
        else:
            yield from super().decide(state, index, rank)


class MissesNobodyWhoWasShutDown(ShmModel):
    """A rank that was shut down is missed only if a current step or call needs it."""

    def may_be_gone(self, state: State, rank: Rank) -> bool:
        return rank.at is At.CLOSED and not self.watched(state) or super().may_be_gone(state, rank)


class MissesNobodyWhoClosed(RpcModel):
    """The same over the network."""

    def misses(self, coordinator: Coordinator, rank: Rank) -> bool:
        done = self.done(rank, coordinator.step, coordinator.registers.released)
        return super().misses(coordinator, rank) and not (rank.at is At.CLOSED and done)


class NeverPostpones(ShmModel):
    """Rank 0 waits for ranks that will never be ready, although other calls wait behind."""

    def postpone(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        yield from ()


class ForgetsPostponedCall(ShmModel):
    """A rank that was ready for a dropped number no longer holds the call."""

    def advanced(self, state: State, rank: Rank) -> tuple[str, Rank] | None:
        before = Participant(*rank.participant).call_state
        advanced = super().advanced(state, rank)
        if advanced and advanced[0].startswith("does RESUME"):
            what, rank = advanced
            participant = Participant(*rank.participant)
            participant.call_state = replace(participant.call_state, held=without(before.held, before.promised))
            advanced = what, rank._replace(participant=astuple(participant))
        return advanced


class GivesUpAfterItsPromise(RpcModel):
    """A rank that is ready for a call gives it up after a time of its own."""

    def utility(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        yield from super().utility(state, index, rank)
        participant = Participant(*rank.participant)
        call_state = participant.call_state
        if call_state.promised and not call_state.leads:
            participant.call_state = replace(call_state, held=(), promised=0)
            yield "gives up", put(state, index, rank._replace(participant=astuple(participant)))
