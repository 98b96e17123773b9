# SPDX-License-Identifier: Apache-2.0
"""The step sync itself: numbers in, numbers out. No clock, no socket, no thread.

Each rank numbers its forwards 1, 2, 3... A forward is a barrier: it ends on no rank before it has begun on every rank.
The *agreed* step is the highest number that any rank has requested. Every rank runs all forwards up to it, with a dummy
batch if it has no work. There are two rules:

1. A rank begins forward `n` only if it knows that `n` is agreed. A rank with work requests `n`, takes its own request
   for agreed at once, and begins without waiting. So every forward that has begun has been requested.
2. A rank without work begins the next forward as long as it knows of an agreed step that it has not begun.

The coordinator is a register whose value only grows. It keeps the highest requested step and sends it to each rank
until that rank has confirmed it. Every message carries that number and never an event. So duplicated, late and
reordered messages change nothing, a lost one is replaced by sending the current value again, and a rank that joins late
reads the current value.

How many steps a rank requests ahead of the current one (`Lookahead`) changes the costs, never the correctness.

The ranks agree in the same way on calls that all of them make after the same step: see calls.py.
"""
from typing import Annotated

import msgspec

from vllm_pd.dp.calls import CallAction, CallRegisters, CallState, Count, Number
from vllm_pd.dp.interface import StepDecision


class Lookahead(msgspec.Struct, frozen=True, array_like=True):
    """How many steps to request ahead. `lead`: how many later steps should already be agreed when a step begins, so
    that the message arrives before any rank needs it. `stride`: how many new steps one request covers, unless the
    remaining work is less. At most `lead + stride - 1` steps beyond the current one are agreed: that is the horizon."""
    lead: int = 1
    stride: int = 1

    def target(self, step: int, agreed: int, remaining: int | None) -> int | None:
        """The step to request when `step` begins with work. None if nothing must be requested. `remaining` is the most
        forwards that this rank may still need, `step` included; no later step is requested."""
        if remaining is not None and remaining < 1:
            remaining = 1
        enough = step + self.lead
        most = enough + self.stride - 1
        if remaining is not None:
            enough = min(enough, step + remaining - 1)
            most = min(most, step + remaining - 1)
        return most if agreed < enough or agreed < step else None


class StepRequest(msgspec.Struct, frozen=True, array_like=True):
    """A rank requests all steps up to `step`. `urgent`: they include the step that this rank begins now, so the other
    ranks may be asleep. Otherwise every rank runs the current forward and finds the new number after it."""
    step: int
    urgent: bool


class RankState(msgspec.Struct, frozen=True, array_like=True):
    """Everything that a rank ever reports."""
    asked: Count  # the highest step that it has requested
    confirmed: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]  # the step it has received; -1 if none yet
    ended: Count  # how many forwards it has ended
    left: bool  # it will not request any more steps
    over: bool  # it knows that all ranks have left
    ready: Number = 0  # the call number that it is ready for
    done: Number = 0  # it has nothing more to do with calls up to this number
    registers: CallRegisters = CallRegisters()


class Participant(msgspec.Struct):
    """One rank. The fields with `confirmed` in their names are what the coordinator is known to know."""
    local: int = 0  # forwards begun
    ended: int = 0  # forwards ended
    agreed: int = 0
    confirmed: int = -1
    left: bool = False
    left_confirmed: bool = False
    over: bool = False
    call_state: CallState = CallState()
    confirmed_registers: CallRegisters = CallRegisters()
    confirmed_ready: int = 0
    calling: bool = False  # whether this rank is in a call

    @property
    def due(self) -> bool:
        """Whether this rank has something to do even without work."""
        return self.local < self.call_state.limit(self.agreed) or self._may_end or self.action is not None

    @property
    def _may_end(self) -> bool:
        """Whether no other rank needs this one any more, neither for a step nor for a call."""
        return self.over and not self.engaged

    @property
    def engaged(self) -> bool:
        """Whether the other ranks need this one to make a call or to learn that it is dropped."""
        return bool(self.call_state.promised) or self.call_state.leads and self.call_state.registers.open

    @property
    def done(self) -> int:
        """This rank has nothing more to do with calls up to this number: it has made them, or they were dropped."""
        return self.call_state.ready - (bool(self.call_state.promised) or self.calling)

    @property
    def call_pending(self) -> bool:
        """Whether this rank has yet to make, or to end, a released call."""
        return self.done < self.call_state.registers.released

    @property
    def awaited(self) -> bool:
        """Whether the other ranks wait for this one to decide about a call or to begin it."""
        calls = self.call_state
        return (calls.leads and calls.registers.open
                or bool(calls.promised) and calls.registers.released == calls.ready)

    @property
    def action(self) -> CallAction | None:
        """What to do about a call before the next forward, if anything."""
        return self.call_state.action(self.local)

    @property
    def may_step(self) -> bool:
        """Whether `begin` may be called with work. If not, wait until this rank is due."""
        return not self.call_state.promised or self.local < self.call_state.limit(self.agreed)

    @property
    def unconfirmed(self) -> bool:
        """Whether the coordinator may not know everything that this rank has reported, so it must be reported again."""
        return (self.confirmed < self.agreed or self.left and not self.left_confirmed
                or self.confirmed_ready < self.call_state.ready
                or self.confirmed_registers != self.call_state.registers)

    def begin(self, has_work: bool, remaining: int | None,
              lookahead: Lookahead) -> tuple[StepDecision, StepRequest | None]:
        """Decide what to do next, and what to request. FORWARD and DUMMY mean that a forward has begun.

        `remaining`: see `Lookahead.target`. Raises ValueError if there is work after `leave`, or while this rank may
        not step.
        """
        step = self.local + 1
        if not has_work:
            if step <= self.call_state.limit(self.agreed):
                self.local = step
                return StepDecision.DUMMY, None
            return (StepDecision.END if self._may_end else StepDecision.IDLE), None
        if self.left:
            raise ValueError(f"forward {step} has work, but this rank has left the group")
        if not self.may_step:
            raise ValueError(f"forward {step} has work, but no rank has requested it and this rank waits for a call")
        target = lookahead.target(step, self.agreed, remaining) if not self.call_state.promised else None
        request = None
        if target is not None:
            request = StepRequest(target, urgent=step > self.agreed)
            self.agreed = target
        self.local = step
        return StepDecision.FORWARD, request

    def end(self) -> None:
        """A forward that had begun has ended."""
        self.ended += 1

    def hold(self, name: int) -> None:
        """Hold a call of that name until all ranks make it."""
        self.call_state = msgspec.structs.replace(self.call_state, held=(*self.call_state.held, name))

    def advance(self) -> tuple[CallAction, int] | None:
        """Take the next action about a call, between two forwards. Returns the action and the name of the call, or
        None. The caller must publish the new state."""
        action = self.action
        if action is None:
            return None
        before = self.call_state
        self.call_state = before.after(action, self.agreed)
        self.calling = action is CallAction.MAKE
        return action, before.promised or self.call_state.registers.name

    def made(self) -> None:
        """The call that `advance` let this rank make has ended."""
        self.calling = False

    def postpone(self) -> bool:
        """On rank 0: if a proposed call blocks others, move it behind them. Returns whether that changed anything."""
        if blocks_others := self.call_state.blocks_others:
            self.call_state = self.call_state.postponed()
        return blocks_others

    def give_up(self, name: int) -> bool:
        """Give up the oldest call of that name, so that no rank makes it. False: some rank may make it, so wait."""
        after = self.call_state.given_up(name)
        if after is None:
            return False
        self.call_state = after
        return True

    def update(self, step: int, over: bool, left: bool = False, registers: CallRegisters | None = None,
               ready: int = 0) -> bool:
        """Take in what the coordinator, or the shared page, says. Returns whether that made this rank due.

        The agreed step is at least `step`, and final if `over`. The coordinator knows that this rank has `left`, and
        that it is `ready` for that call.
        """
        was_due = self.due
        self.confirmed = max(self.confirmed, step)
        self.agreed = max(self.agreed, step)
        self.over = self.over or over
        self.left_confirmed = self.left_confirmed or left
        self.confirmed_ready = max(self.confirmed_ready, ready)
        if registers is not None and registers != self.confirmed_registers:
            self.confirmed_registers = self.confirmed_registers.merged(registers)
            self.call_state = msgspec.structs.replace(self.call_state,
                                                      registers=self.call_state.registers.merged(registers))
        return self.due and not was_due

    def leave(self) -> None:
        """This rank will not have any work again."""
        self.left = True

    def state(self) -> RankState:
        """The report for the coordinator. It serves to request, to join, to confirm and to leave."""
        calls = self.call_state
        return RankState(self.agreed, self.confirmed, self.ended, self.left, self.over, calls.ready, self.done,
                         calls.registers)


_ABSENT = RankState(0, -1, 0, False, False)


class Coordinator(msgspec.Struct):
    """The register `step`, the call `registers`, and the last known state of each rank. `joined`: by rank, whether it
    has sent a report."""
    states: list[RankState]
    joined: list[bool]
    step: int = 0
    registers: CallRegisters = CallRegisters()

    @classmethod
    def of(cls, size: int) -> "Coordinator":
        """The coordinator of a new group of `size` ranks."""
        return cls([_ABSENT] * size, [False] * size)

    @property
    def over(self) -> bool:
        """Whether all ranks have left, each with the last step that it requested. Then `step` is final."""
        return all(state.left for state in self.states)

    @property
    def quiet(self) -> bool:
        """Whether every rank has ended everything and knows the current values, and no call is open. Then no rank needs
        watching."""
        return (not any(map(self.needs, range(len(self.states)))) and not self.outdated_ranks()
                and not self.registers.open)

    def needs(self, rank: int) -> bool:
        """Whether that rank has yet to end a forward or a released call."""
        state = self.states[rank]
        return state.ended < self.step or state.done < self.registers.released

    def receive(self, rank: int, reported: RankState) -> None:
        """Take in a rank's report. Late and duplicated reports change nothing, because no value ever decreases."""
        old = self.states[rank]
        self.states[rank] = RankState(
            max(old.asked, reported.asked), max(old.confirmed, reported.confirmed), max(old.ended, reported.ended),
            old.left or reported.left, old.over or reported.over, max(old.ready, reported.ready),
            max(old.done, reported.done), old.registers.merged(reported.registers))
        self.joined[rank] = True
        self.step = max(self.step, reported.asked)
        ready = min((state.ready for state in self.states[1:]), default=reported.registers.proposed)
        self.registers = self.registers.merged(reported.registers).merged(CallRegisters(ready=ready))

    def outdated_ranks(self) -> list[int]:
        """The ranks that have joined and have not confirmed the current values. They must be sent these until they
        have."""
        over = self.over
        return [rank for rank, state in enumerate(self.states)
                if self.joined[rank] and (state.confirmed < self.step or over and not state.over
                                          or state.registers != self.registers)]
