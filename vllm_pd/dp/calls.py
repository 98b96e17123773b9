# SPDX-License-Identifier: Apache-2.0
"""Calls that all ranks make between the same two forwards, or none makes: numbers in, numbers out.

A utility call may run collectives of its own over the ranks. A rank that is in such a call and another that is in a
forward wait for each other for ever, so all must make it after the same step. Each rank hears of a call in its own
time, from a front end that all of them have, or from one of its own. Rank 0 leads:

1. It *proposes* one call that it holds: call number `k`, by name.
2. A rank that holds a call of that name says that it is *ready* for `k`, once. From then until it has made the call it
   asks for no step. It goes on with the steps that others have asked for, so it is missed by nobody.
3. When all others are ready, rank 0 asks for none either, so nobody asks: the agreed step is *final*. Rank 0 says so.
4. Every rank goes on to the final step, makes the call, and may ask again.

While some rank is not ready rank 0 may *drop* the number instead: nobody makes the call as number `k`, and whoever was
ready for it holds it as before. Rank 0 does so when it gives the call up itself, or to put it off, behind the others
that it holds, as one of those may be held by all ranks. A rank that is not ready may give a call up by itself, for
nobody makes it without this rank. So all depends on one decision of one rank.

What rank 0 says are registers that only grow, as the agreed step is: no message is an event. `released` is not
overwritten before all are ready for a later call, hence have made this one; `dropped` may be, and a call that is not
later than it and was not released was dropped.
"""
from enum import Enum
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
NAME_BITS = 40
Number = Count
Name = Annotated[int, msgspec.Meta(ge=0, lt=1 << NAME_BITS)]


class Calls(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The registers. `name`: of the call `proposed`. `final`: the step after which `released` is made. `ready`: the
    highest number that all ranks but the first are ready for. All others are written by rank 0."""
    proposed: Number = 0
    name: Name = 0
    dropped: Number = 0
    released: Number = 0
    final: Count = 0
    ready: Number = 0

    @property
    def open(self) -> bool:
        """Whether there is a call that is neither released nor dropped."""
        return self.proposed > max(self.dropped, self.released)

    def merged(self, other: "Calls") -> "Calls":
        """What is known to who knows both."""
        if other == self:
            return self
        newest = self if self.proposed >= other.proposed else other
        latest = self if self.released >= other.released else other
        return Calls(newest.proposed, newest.name, max(self.dropped, other.dropped), latest.released, latest.final,
                     max(self.ready, other.ready))


class Move(Enum):
    """What a rank may do now, between two forwards."""
    PROPOSE = "propose"
    READY = "say that it is ready"
    RELEASE = "release"
    MAKE = "make the call"
    RELAX = "ask again, as the call is not made under this number"


class Turns(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One rank's part. `held`: the names of the calls that it holds, the oldest first. `ready`: the highest number that
    it has been ready for; `promised`: the name of that call while it is not made, else 0."""
    leads: bool = False
    held: tuple[Name, ...] = ()
    ready: Number = 0
    promised: Name = 0
    known: Calls = Calls()

    def move(self, local: int) -> Move | None:
        """What to do next, after forward `local`."""
        known = self.known
        if self.promised:
            if known.released == self.ready:
                return Move.MAKE if local >= known.final else None
            return Move.RELAX if known.dropped >= self.ready else None
        if not self.held:
            return None
        if self.leads:
            if not known.open:
                return Move.PROPOSE
            return Move.RELEASE if known.ready >= known.proposed else None
        return Move.READY if known.open and known.proposed > self.ready and known.name in self.held else None

    def limit(self, agreed: int) -> int:
        """The step up to which to go: no further than the call that is released."""
        return self.known.final if self.promised and self.known.released == self.ready else agreed

    def moved(self, move: Move, agreed: int) -> "Turns":
        """After that move."""
        known = self.known
        if move is Move.PROPOSE:
            calls = msgspec.structs.replace(known, proposed=known.proposed + 1, name=self.held[0])
            return msgspec.structs.replace(self, known=calls)
        if move is Move.READY:
            return msgspec.structs.replace(self, ready=known.proposed, promised=known.name)
        if move is Move.RELEASE:
            calls = msgspec.structs.replace(known, released=known.proposed, final=agreed)
            return msgspec.structs.replace(self, ready=known.proposed, promised=known.name, known=calls)
        if move is Move.RELAX:
            return msgspec.structs.replace(self, promised=0)
        return msgspec.structs.replace(self, held=_without(self.held, self.promised), promised=0)

    @property
    def in_the_way(self) -> bool:
        """Whether rank 0 has proposed a call that not all are ready for, and holds others."""
        known = self.known
        return (self.leads and not self.promised and known.open and known.ready < known.proposed
                and any(name != known.name for name in self.held))

    def put_off(self) -> "Turns":
        """The call that is in the way waits behind the others."""
        known = self.known
        calls = msgspec.structs.replace(known, dropped=known.proposed)
        return msgspec.structs.replace(self, held=(*_without(self.held, known.name), known.name), known=calls)

    def given_up(self, name: int) -> "Turns | None":
        """Without the oldest call of that name, as nobody will make it. None where that is not for this rank to say
        now: it has said that it is ready."""
        if self.promised == name:
            return None
        calls = self.known
        if self.leads and calls.open and calls.name == name:
            calls = msgspec.structs.replace(calls, dropped=calls.proposed)
        return msgspec.structs.replace(self, held=_without(self.held, name), known=calls)


def _without(names: tuple[int, ...], name: int) -> tuple[int, ...]:
    at = names.index(name)
    return names[:at] + names[at + 1:]
