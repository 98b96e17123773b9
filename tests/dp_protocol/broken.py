# SPDX-License-Identifier: Apache-2.0
"""The mistakes that such protocols are known for, one a model. The explorer must find each."""
from collections.abc import Iterator

from msgspec.structs import replace

from tests.dp_protocol.models import At, Rank, RpcModel, Setting, ShmModel, State, astuple, put, without
from vllm_pd.dp.calls import Turns
from vllm_pd.dp.core import Coordinator, Known, Participant, Reach
from vllm_pd.dp.interface import Decision


class HorizonOnOneSide(RpcModel):
    """The asking rank goes on to the horizon, but has told the others of the present step only."""

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        before = rank.says
        for what, after in super().decide(state, index, rank):
            rank = after.ranks[index]
            if len(rank.says) > len(before):
                said = (rank.participant[0], *astuple(Participant(*rank.participant).known())[1:], False)
                after = put(after, index, rank._replace(says=(*before, said)))
            yield what, after


class SenderExcluded(RpcModel):
    """The coordinator adds the horizon, and tells everyone but the rank that has asked."""
    drops = False

    def __init__(self, setting: Setting):
        super().__init__(setting._replace(reach=Reach(0, 1)))
        self.horizon = 1

    def as_heard(self, known: Known) -> Known:
        return Known(known.asked + 1, *astuple(known)[1:]) if known.asked else known

    def tells(self, to: int, because_of: int) -> bool:
        return to != because_of


class EdgeTriggeredWake(RpcModel):
    """A wake-up reaches only a loop that is waiting already, and the loop does not look again before it waits."""

    def loop(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if rank.at is At.CHECK and not self.works(rank):
            yield "waits", put(state, index, rank._replace(at=At.GET))
        else:
            yield from super().loop(state, index, rank)

    def rung(self, rank: Rank) -> Rank:
        return rank._replace(ring=False, queue=rank.queue or rank.at is At.GET)


class LatchedRunning(RpcModel):
    """`latch` is a flag "the group is running": set by any word of the coordinator, reset when the agreed step has
    been run. A late word sets it again."""
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
    """A rank ends as soon as it has left and run what it knows of."""

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        participant = Participant(*rank.participant)
        if participant.left and participant.local >= participant.agreed:
            yield "end", put(state, index, rank._replace(at=At.ENDED))
        else:
            yield from super().decide(state, index, rank)


class NoBell(ShmModel):
    """The number on the page is right, but nobody is woken."""

    def rings(self, urgent: bool) -> bool:
        return False


class OnlyLateBells(ShmModel):
    """Bells are rung for the asks that don't need them, and not for those that do."""

    def rings(self, urgent: bool) -> bool:
        return not urgent


class EdgeTriggeredBell(ShmModel):
    """A bell rouses only a loop that is waiting already, and the loop does not look again before it waits."""

    def loop(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if rank.at is At.CHECK and not self.works(rank):
            yield "waits", put(state, index, rank._replace(at=At.GET))
        else:
            yield from super().loop(state, index, rank)

    def of(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        for what, after in super().of(state, index, rank):
            if what == "hears its bell" and rank.at is not At.GET:
                after = put(after, index, rank._replace(ring=False))
            yield what, after


class ReadyRankAsks(ShmModel):
    """A rank that is ready for a call asks for steps all the same."""

    def works(self, rank: Rank) -> bool:
        return rank.work > 0

    def begin(self, state: State, rank: Rank) -> tuple:
        participant = Participant(*rank.participant)
        turns = participant.turns
        participant.turns = Turns()
        begun, *rest = super().begin(state, rank._replace(participant=astuple(participant)))
        participant = replace(Participant(*begun.participant), turns=turns)
        return begun._replace(participant=astuple(participant)), *rest


class CallsBeforeTheFinalStep(RpcModel):
    """A call that is released is made at once."""

    def advanced(self, state: State, rank: Rank) -> tuple[str, Rank] | None:
        turns = Participant(*rank.participant).turns
        if turns.promised and turns.known.released == turns.ready:
            turns = replace(turns, known=replace(turns.known, final=rank.participant[0]))
            rank = rank._replace(participant=astuple(replace(Participant(*rank.participant), turns=turns)))
        return super().advanced(state, rank)


class AsksBeforeItsCall(ShmModel):
    """A rank goes by the agreed step until it has made its call, not by the step that is final."""

    def refreshed(self, state: State, rank: Rank) -> Rank:
        participant = Participant(*super().refreshed(state, rank).participant)
        calls = participant.turns.known
        if participant.turns.promised and calls.released == participant.turns.ready:
            participant.turns = replace(participant.turns, known=replace(calls, final=participant.agreed))
        return rank._replace(participant=astuple(participant))


class ReleasedBeforeAllAreReady(ShmModel):
    """Rank 0 takes for granted that the others are ready."""

    def refreshed(self, state: State, rank: Rank) -> Rank:
        participant = Participant(*super().refreshed(state, rank).participant)
        if participant.turns.leads:
            calls = participant.turns.known
            participant.turns = replace(participant.turns, known=replace(calls, ready=calls.proposed))
        return rank._replace(participant=astuple(participant))


class LeavesAfterItsPromise(ShmModel):
    """A rank ends when all have left, although it is ready for a call."""

    def begin(self, state: State, rank: Rank) -> tuple:
        participant = Participant(*rank.participant)
        if participant.over and participant.local >= participant.agreed:
            return rank._replace(at=At.ENDED), Decision.END, None, False, state.last
        return super().begin(state, rank)


class WatchesNoCall(ShmModel):
    """The watch ends when a call is released, as if all ranks had made it."""

    def watched(self, state: State) -> bool:
        calls, step = state.ranks[0].known[3], max(rank.known[0] for rank in state.ranks)
        return calls.open or not all(self.done(rank, step, 0) for rank in state.ranks)


class MissesNobodyWhoHasLeft(ShmModel):
    """When all have left, a rank that dies in a call, or rank 0 before one is decided about, counts as done."""

    def may_be_gone(self, state: State, rank: Rank) -> bool:
        step = max(other.known[0] for other in state.ranks)
        return all(other.known[1] for other in state.ranks) and self.done(rank, step, 0)


class EndsWhenNobodyNeedsIt(ShmModel):
    """A rank that has left ends, and says so, when all have run what was asked for. Others may yet get a request."""

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        participant = Participant(*rank.participant)
        if participant.left and not self.watched(state):
            state = state._replace(spare=state.spare._replace(closes=1))
            yield "ends", self.crash(state, index, rank, At.CLOSED, "closes")
        else:
            yield from super().decide(state, index, rank)


class MissesNobodyWhoWasShutDown(ShmModel):
    """A rank that was shut down is missed only where it is needed for a step or a call that there is already."""

    def may_be_gone(self, state: State, rank: Rank) -> bool:
        return rank.at is At.CLOSED and not self.watched(state) or super().may_be_gone(state, rank)


class MissesNobodyWhoSaidGoodBye(RpcModel):
    """The same over the network."""

    def misses(self, coordinator: Coordinator, rank: Rank) -> bool:
        done = self.done(rank, coordinator.step, coordinator.calls.released)
        return super().misses(coordinator, rank) and not (rank.at is At.CLOSED and done)


class NeverPutsOff(ShmModel):
    """Rank 0 waits for those who will never be ready, whoever waits behind."""

    def put_off(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        yield from ()


class ForgetsWhatIsPutOff(ShmModel):
    """A rank that was ready for a number which is dropped holds the call no longer."""

    def advanced(self, state: State, rank: Rank) -> tuple[str, Rank] | None:
        before = Participant(*rank.participant).turns
        advanced = super().advanced(state, rank)
        if advanced and advanced[0].startswith("does RELAX"):
            what, rank = advanced
            participant = Participant(*rank.participant)
            participant.turns = replace(participant.turns, held=without(before.held, before.promised))
            advanced = what, rank._replace(participant=astuple(participant))
        return advanced


class GivesUpAfterItsPromise(RpcModel):
    """A rank that is ready for a call gives it up by its own clock."""

    def utility(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        yield from super().utility(state, index, rank)
        participant = Participant(*rank.participant)
        turns = participant.turns
        if turns.promised and not turns.leads:
            participant.turns = replace(turns, held=(), promised=0)
            yield "gives up", put(state, index, rank._replace(participant=astuple(participant)))
