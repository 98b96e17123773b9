# SPDX-License-Identifier: Apache-2.0
"""The agreement on calls that all ranks make after the same forward, or that no rank makes. Numbers in, numbers out.

A utility call may run collectives of its own over the ranks. A rank in such a call and a rank in a forward would wait
for each other for ever, so all ranks must make the call after the same forward. But each rank learns of a call at a
different moment: from a front end that all ranks share, or from a front end of its own. Rank 0 decides:

1. Rank 0 *proposes* one of the calls that it holds. A proposal has a number `k` and the name of the call.
2. A rank that holds a call of that name reports once that it is *ready* for `k`. From then until it has made the call
   it requests no step. It still runs the steps that other ranks have requested, so no rank waits for it.
3. When all other ranks are ready, rank 0 stops requesting steps too. Now no rank requests any, so the agreed step is
   *final*. Rank 0 *releases* call `k` together with that step.
4. Every rank runs all forwards up to the final step, makes the call, and may request steps again.

As long as some rank is not ready, rank 0 may *drop* the number `k` instead. Then no rank makes the call under that
number, and a rank that was ready for it holds the call as before. Rank 0 drops a number when it gives the call up, or
when it postpones the call behind its other held calls, because all ranks may already hold one of those. A rank that is
not ready may give a call up alone, because no rank makes the call without it. So one rank takes every decision.

Rank 0 publishes registers whose values only grow, like the agreed step. No message is an event. Rank 0 overwrites
`released` only after all ranks are ready for a later call, so all of them have made the earlier one. It may overwrite
`dropped` at any time: a call was dropped if its number is not above `dropped` and it was not released.
"""
from enum import Enum
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
NAME_BITS = 40
Number = Count
Name = Annotated[int, msgspec.Meta(ge=0, lt=1 << NAME_BITS)]


class CallRegisters(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The registers. Rank 0 writes all of them except `ready`, which is the highest number that all other ranks are
    ready for. `name` is the name of call `proposed`. Call `released` is made after forward `final`."""
    proposed: Number = 0
    name: Name = 0
    dropped: Number = 0
    released: Number = 0
    final: Count = 0
    ready: Number = 0

    @property
    def open(self) -> bool:
        """Whether the proposed call is neither released nor dropped."""
        return self.proposed > max(self.dropped, self.released)

    def merged(self, other: "CallRegisters") -> "CallRegisters":
        """The newest value of each register from both."""
        if other == self:
            return self
        newest = self if self.proposed >= other.proposed else other
        latest = self if self.released >= other.released else other
        return CallRegisters(newest.proposed, newest.name, max(self.dropped, other.dropped), latest.released,
                             latest.final, max(self.ready, other.ready))


class CallAction(Enum):
    """What a rank may do about a call between two forwards."""
    PROPOSE = "propose the call"
    READY = "report that this rank is ready"
    RELEASE = "release the call"
    MAKE = "make the call"
    RESUME = "request steps again, because this number was dropped"


class CallState(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What one rank knows of the calls. `leads`: this is rank 0. `held`: the names of the calls that it holds, oldest
    first. `ready`: the highest number that it has been ready for. `promised`: the name of that call until it is made or
    dropped, then 0. `registers`: the newest values that this rank knows."""
    leads: bool = False
    held: tuple[Name, ...] = ()
    ready: Number = 0
    promised: Name = 0
    registers: CallRegisters = CallRegisters()

    def action(self, local: int) -> CallAction | None:
        """The next action, if any. `local`: the number of the last forward that this rank has begun."""
        registers = self.registers
        if self.promised:
            if registers.released == self.ready:
                return CallAction.MAKE if local >= registers.final else None
            return CallAction.RESUME if registers.dropped >= self.ready else None
        if not self.held:
            return None
        if self.leads:
            if not registers.open:
                return CallAction.PROPOSE
            return CallAction.RELEASE if registers.ready >= registers.proposed else None
        wanted = registers.open and registers.proposed > self.ready and registers.name in self.held
        return CallAction.READY if wanted else None

    def limit(self, agreed: int) -> int:
        """The last step that this rank may run: the final step of a released call, otherwise `agreed`."""
        return self.registers.final if self.promised and self.registers.released == self.ready else agreed

    def after(self, action: CallAction, agreed: int) -> "CallState":
        """The state after that action. `agreed`: the agreed step, which a release makes final."""
        registers = self.registers
        if action is CallAction.PROPOSE:
            registers = msgspec.structs.replace(registers, proposed=registers.proposed + 1, name=self.held[0])
            return msgspec.structs.replace(self, registers=registers)
        if action is CallAction.READY:
            return msgspec.structs.replace(self, ready=registers.proposed, promised=registers.name)
        if action is CallAction.RELEASE:
            released = msgspec.structs.replace(registers, released=registers.proposed, final=agreed)
            return msgspec.structs.replace(self, ready=registers.proposed, promised=registers.name, registers=released)
        if action is CallAction.RESUME:
            return msgspec.structs.replace(self, promised=0)
        return msgspec.structs.replace(self, held=_without(self.held, self.promised), promised=0)

    @property
    def blocks_others(self) -> bool:
        """Whether rank 0 has proposed a call that not all ranks are ready for, while it holds calls of other names."""
        registers = self.registers
        return (self.leads and not self.promised and registers.open and registers.ready < registers.proposed
                and any(name != registers.name for name in self.held))

    def postponed(self) -> "CallState":
        """The state after rank 0 has dropped the proposed number and moved its call behind the other held calls."""
        registers = self.registers
        dropped = msgspec.structs.replace(registers, dropped=registers.proposed)
        held = (*_without(self.held, registers.name), registers.name)
        return msgspec.structs.replace(self, held=held, registers=dropped)

    def given_up(self, name: int) -> "CallState | None":
        """The state without the oldest call of that name, which no rank will make. None if this rank may not decide
        that now, because it has reported that it is ready."""
        if self.promised == name:
            return None
        registers = self.registers
        if self.leads and registers.open and registers.name == name:
            registers = msgspec.structs.replace(registers, dropped=registers.proposed)
        return msgspec.structs.replace(self, held=_without(self.held, name), registers=registers)


def _without(names: tuple[int, ...], name: int) -> tuple[int, ...]:
    at = names.index(name)
    return names[:at] + names[at + 1:]
