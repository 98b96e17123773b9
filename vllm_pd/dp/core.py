# SPDX-License-Identifier: Apache-2.0
"""The step sync itself: numbers in, numbers out. No clock, no socket, no thread.

Every rank numbers its forwards 1, 2, 3... A forward is a barrier: it ends nowhere before it has begun everywhere. The
*agreed* step is the highest number that any rank has asked for; every rank runs all forwards up to it, with a dummy
batch where it has no work. Two rules are all there is:

1. A rank begins forward `n` only if it knows that `n` is agreed. With work it may make it so: it asks, takes its own
   ask for agreed at once, and begins without waiting. So whatever has begun has been asked for.
2. A rank without work begins the next forward as long as it knows of an agreed step that it has not begun.

The coordinator is a register that only grows: it keeps the highest step asked for and owes it to every rank until that
rank has said that it knows. All messages carry that number and nothing about an event, so doubled, late and reordered
ones change nothing, lost ones are made up for by sending the present value again, and whoever comes late reads it.

The number of steps asked for ahead of the present one (`Reach`) moves costs, never correctness.

Calls that all ranks have to make after the same step are agreed on beside it: see calls.py.
"""
from typing import Annotated

import msgspec

from vllm_pd.dp.calls import Calls, Count, Move, Number, Turns
from vllm_pd.dp.interface import Decision


class Reach(msgspec.Struct, frozen=True, array_like=True):
    """How far ahead to ask. `lead`: at the beginning of a step at least so many later ones should be agreed already, so
    that the word of it arrives before anyone needs it. `stride`: how many new steps an ask is for where nothing bounds
    it. At most `lead + stride - 1` steps are agreed beyond the present one: that is the horizon."""
    lead: int = 1
    stride: int = 1

    def target(self, step: int, agreed: int, remaining: int | None) -> int | None:
        """The step to ask for at the beginning of `step` with work, None where nothing is to be asked. `remaining`
        bounds it: the most forwards still to come, `step` included."""
        if remaining is not None and remaining < 1:
            remaining = 1
        enough = step + self.lead
        most = enough + self.stride - 1
        if remaining is not None:
            enough = min(enough, step + remaining - 1)
            most = min(most, step + remaining - 1)
        return most if agreed < enough or agreed < step else None


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A rank asks for all steps up to `step`. `urgent`: the step that it begins now is among them, so that others may
    be asleep; otherwise all of them are going to run the present forward and so find the new number after it."""
    step: int
    urgent: bool


class Known(msgspec.Struct, frozen=True, array_like=True):
    """All that a rank ever says. It asks for `asked`, has the coordinator's word for `confirmed` (-1: none yet) and for
    the end of it all (`over`), has ended so many forwards, and with `left` will never ask for more. It is ready for
    call number `ready`, is done with those up to `done`, and of all calls knows `calls`."""
    asked: Count
    confirmed: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
    ended: Count
    left: bool
    over: bool
    ready: Number = 0
    done: Number = 0
    calls: Calls = Calls()


class Participant(msgspec.Struct):
    """One rank. `turns`: its part in calls; of that the coordinator is known to know `told_calls` and `told_ready`.
    `calling`: it is in a call."""
    local: int = 0  # forwards begun
    ended: int = 0
    agreed: int = 0
    confirmed: int = -1
    left: bool = False
    left_heard: bool = False
    over: bool = False
    turns: Turns = Turns()
    told_calls: Calls = Calls()
    told_ready: int = 0
    calling: bool = False

    @property
    def due(self) -> bool:
        """Whether this rank has something to do even without work."""
        return self.local < self.turns.limit(self.agreed) or self._may_end or self.move is not None

    @property
    def _may_end(self) -> bool:
        """Whether nobody needs this rank any more, be it for a call."""
        return self.over and not self.engaged

    @property
    def engaged(self) -> bool:
        """Whether others can't make a call, or know that it is off, without this rank."""
        return bool(self.turns.promised) or self.turns.leads and self.turns.known.open

    @property
    def done(self) -> int:
        """This rank has nothing more to do with calls up to this number: it has made them, or they are off."""
        return self.turns.ready - (bool(self.turns.promised) or self.calling)

    @property
    def called(self) -> bool:
        """Whether a call that all make is still to be made, or to be ended, by this rank."""
        return self.done < self.turns.known.released

    @property
    def awaited(self) -> bool:
        """Whether it is this rank's turn to decide about a call or to begin it: others can't go on by themselves."""
        turns = self.turns
        return turns.leads and turns.known.open or bool(turns.promised) and turns.known.released == turns.ready

    @property
    def move(self) -> Move | None:
        """What there is to do about a call, before the next forward."""
        return self.turns.move(self.local)

    @property
    def may_step(self) -> bool:
        """Whether `begin` may be called with work. If not, wait until this rank is due."""
        return not self.turns.promised or self.local < self.turns.limit(self.agreed)

    @property
    def unanswered(self) -> bool:
        """Whether the coordinator may not know what this rank has said: it must be said again some time."""
        return (self.confirmed < self.agreed or self.left and not self.left_heard
                or self.told_ready < self.turns.ready or self.told_calls != self.turns.known)

    def begin(self, has_work: bool, remaining: int | None, reach: Reach) -> tuple[Decision, Ask | None]:
        """The next thing to do, and what to ask for. With FORWARD and DUMMY a forward has begun. Raises ValueError for
        work after `leave`, and where it may not step."""
        step = self.local + 1
        if not has_work:
            if step <= self.turns.limit(self.agreed):
                self.local = step
                return Decision.DUMMY, None
            return (Decision.END if self._may_end else Decision.IDLE), None
        if self.left:
            raise ValueError(f"forward {step} has work, but this rank has left the group")
        if not self.may_step:
            raise ValueError(f"forward {step} has work, but nobody has asked for it and there is a call to be made")
        target = reach.target(step, self.agreed, remaining) if not self.turns.promised else None
        ask = None
        if target is not None:
            ask = Ask(target, urgent=step > self.agreed)
            self.agreed = target
        self.local = step
        return Decision.FORWARD, ask

    def end(self) -> None:
        """A forward that has begun has ended."""
        self.ended += 1

    def hold(self, name: int) -> None:
        """There is a call of that name to be made."""
        self.turns = msgspec.structs.replace(self.turns, held=(*self.turns.held, name))

    def advance(self) -> tuple[Move, int] | None:
        """Do what there is to do about a call, between two forwards: what, and the name of the call. Nobody knows of it
        until it is published."""
        move = self.move
        if move is None:
            return None
        before = self.turns
        self.turns = before.moved(move, self.agreed)
        self.calling = move is Move.MAKE
        return move, before.promised or self.turns.known.name

    def made(self) -> None:
        """A call that was to be made has ended."""
        self.calling = False

    def put_off(self) -> bool:
        """Let others go first, if there are any, where some rank is not ready. Whether that changed anything."""
        if in_the_way := self.turns.in_the_way:
            self.turns = self.turns.put_off()
        return in_the_way

    def give_up(self, name: int) -> bool:
        """The oldest call of that name will not be made, by any rank. False: it may be, so wait."""
        after = self.turns.given_up(name)
        if after is None:
            return False
        self.turns = after
        return True

    def told(self, step: int, over: bool, left: bool = False, calls: Calls | None = None, ready: int = 0) -> bool:
        """The agreed step is `step` or more; `over`: it is final; `left`: this rank is known to leave, to be `ready`;
        `calls`: the registers. Returns whether that made this rank due."""
        was_due = self.due
        self.confirmed = max(self.confirmed, step)
        self.agreed = max(self.agreed, step)
        self.over = self.over or over
        self.left_heard = self.left_heard or left
        self.told_ready = max(self.told_ready, ready)
        if calls is not None and calls != self.told_calls:
            self.told_calls = self.told_calls.merged(calls)
            self.turns = msgspec.structs.replace(self.turns, known=self.turns.known.merged(calls))
        return self.due and not was_due

    def leave(self) -> None:
        """This rank will have no work any more."""
        self.left = True

    def known(self) -> Known:
        """What to say to the coordinator: to ask, to join, to answer, to leave."""
        return Known(self.agreed, self.confirmed, self.ended, self.left, self.over, self.turns.ready, self.done,
                     self.turns.known)


_ABSENT = Known(0, -1, 0, False, False)


class Coordinator(msgspec.Struct):
    """The register, and by rank what that rank knows. `here`: the rank has spoken."""
    known: list[Known]
    here: list[bool]
    step: int = 0
    calls: Calls = Calls()

    @classmethod
    def of(cls, size: int) -> "Coordinator":
        """For a new group."""
        return cls([_ABSENT] * size, [False] * size)

    @property
    def over(self) -> bool:
        """All ranks have left, each with the last step that it asked for: `step` is final."""
        return all(known.left for known in self.known)

    @property
    def quiet(self) -> bool:
        """Everyone has ended everything and knows all that there is to know, and no call waits for anybody. Nothing
        needs watching."""
        return not any(map(self.needs, range(len(self.known)))) and not self.owed() and not self.calls.open

    def needs(self, rank: int) -> bool:
        """Whether the rank has a forward to end, or a call that all make."""
        known = self.known[rank]
        return known.ended < self.step or known.done < self.calls.released

    def hear(self, rank: int, said: Known) -> None:
        """A rank speaks. Late and doubled words change nothing, for nothing ever goes back."""
        old = self.known[rank]
        self.known[rank] = Known(max(old.asked, said.asked), max(old.confirmed, said.confirmed),
                                 max(old.ended, said.ended), old.left or said.left, old.over or said.over,
                                 max(old.ready, said.ready), max(old.done, said.done), old.calls.merged(said.calls))
        self.here[rank] = True
        self.step = max(self.step, said.asked)
        ready = min((known.ready for known in self.known[1:]), default=said.calls.proposed)
        self.calls = self.calls.merged(said.calls).merged(Calls(ready=ready))

    def owed(self) -> list[int]:
        """The ranks that are here and are not known to know the present state. They must be told, and told again."""
        over = self.over
        return [rank for rank, known in enumerate(self.known)
                if self.here[rank] and (known.confirmed < self.step or over and not known.over
                                        or known.calls != self.calls)]
