# SPDX-License-Identifier: Apache-2.0
"""What an engine loop sees of the step sync: one `Member` per data-parallel rank.

Every forward contains collectives, so all ranks must run the same number of them. A member numbers its rank's forwards
and knows the *agreed* step, up to which every rank must go. The engine loop, on one thread:

    outputs = schedule()
    if tokens are scheduled:
        member.before_step(True, most)     # always FORWARD; never waits
        run the forward; member.after_step()
    else:                                  # only finished requests to report, or nothing at all: no forward
        match member.before_step(False):
            case DUMMY: run a dummy forward; member.after_step()
            case IDLE:  nothing to run; may block on the input queue, as `wake` puts something there
            case END:   (after `leave` only) all ranks have left and run equally many forwards: shut down

and where it blocks: `while not has_requests and not member.due: input_queue.get()`. `due` is a state, not an event: it
is read anew each time, and `wake` is called after it has become true, so no wake-up can be lost, and one too many does
no harm. Requests may enter at any rank; nobody else is told.

A loop with several forwards under way (a batch queue) may block on its input queue only when none of its own is: what
another rank agreed on while this one was in a forward is read after it, and no bell rings for it.

Only forwards that run in lock-step count. A step without one must not call `before_step(True)`; what runs collectives
outside of the step loop (start-up, profile runs, sleep) runs outside of it on every rank and is not counted.

A rank that pauses passes `has_work=False` and so keeps the others company; so does one that has aborted its last
request.

Calls that run collectives of their own, or that change what forwards use, must come after the same forward on all
ranks: `hold` each, call `next_call` between two steps, make those that it gives, and call `before_step(True)` only
while `may_step`. Either all ranks are given a call or none is, if each gives up what it no longer waits for.
"""
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import msgspec

from vllm_pd.errors import PDError


class Decision(Enum):
    """What `before_step` has the engine loop do."""
    FORWARD = "forward"  # run the scheduled batch; counted
    DUMMY = "dummy"  # run a dummy batch; counted
    IDLE = "idle"  # run nothing
    END = "end"  # run nothing ever again


class CallEnd(Enum):
    """What becomes of a call that was held."""
    MAKE = "make"  # now, as all ranks do; it is no longer held
    PUT_OFF = "put off"  # no rank makes it now; it is held as before


class GroupFailed(PDError):
    """A rank of the group is dead or does not answer. Final; every rank gets it within the bound."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of a group. All ranks must have the same: those that differ refuse to meet."""
    horizon: int = 8  # most steps agreed on ahead of the present one
    timeout_s: float = 10.0  # a process silent for longer while there are steps, or calls, is taken for dead
    # No rank ends a forward for so long while there are steps to run, or a rank's engine loop does not come by while a
    # call waits for it: the group fails.
    stall_s: float = 300.0
    join_s: float = 120.0  # all ranks must be there by then
    grace_s: float = 5.0  # after a failure the engine loop must call the member by then, or `abort` is called
    # A call that all ranks have to make together fails if some are not told of it for so long. 0: made at once, alone.
    call_wait_s: float | None = None  # None: by who calls, see vllm_pd.dp.engine
    # Whether the ranks run equally many forwards. None: if the model has experts, see vllm_pd.dp.experts.
    lockstep: bool | None = None


class Counters(msgspec.Struct):
    """What one rank has done since it joined."""
    forwards: int = 0  # begun, dummies included
    dummies: int = 0
    asks: int = 0  # times that it moved the agreed step
    urgent: int = 0  # of these, those made only when the step was needed; the others were ahead of need
    messages: int = 0  # sent by this rank: asks, answers, bells
    wakes: int = 0
    calls: int = 0  # made together with all other ranks


Wake = Callable[[], None]
Abort = Callable[[GroupFailed], None]
# All-gather of short byte strings (<= EXCHANGE_BYTES), in order of rank, called up to three times at start, on every
# rank equally often.
Exchange = Callable[[bytes], list[bytes]]
EXCHANGE_BYTES = 1024


class Member(Protocol):
    """One rank of a group. `before_step`, `after_step`, `leave` and `close` are for the engine loop's thread."""
    rank: int
    size: int
    counters: Counters

    @property
    def messages(self) -> int:
        """Sent by this process, those of a coordinator in it included."""

    @property
    def due(self) -> bool:
        """Whether `before_step(False)` would have something to say other than IDLE: a dummy to run, the end, or a
        failure. Cheap, from any thread."""

    def before_step(self, has_work: bool, max_remaining_tokens: int | None = None) -> Decision:
        """Call right before a forward, or instead of one. `max_remaining_tokens`: the most forwards that this rank's
        running requests may still need, this one included; None where unknown. Only a hint: it bounds how far
        ahead others are asked to go, so a wrong one costs dummies or a wait, never correctness. Never blocks.
        Raises GroupFailed."""

    def after_step(self) -> None:
        """A forward that `before_step` let begin has ended (with a batch queue: its result is here). Never blocks."""

    def hold(self, name: int) -> None:
        """There is a call to be made together with all other ranks, which know it by the same name (1 to 2**40 - 1;
        several calls may have one). Never blocks."""

    def next_call(self) -> tuple[CallEnd, int] | None:
        """What becomes of which held call now, if of any. To be called between two steps, again until None. Never
        blocks. Raises GroupFailed."""

    def give_up(self, name: int) -> bool:
        """Hold the oldest call of that name no longer, and have nobody make it. False: other ranks may be about to make
        it; `next_call` is going to say what becomes of it. Ask again then. Never blocks."""

    @property
    def may_step(self) -> bool:
        """Whether `before_step(True)` may be called. False while all ranks have to come to rest for a call; then wait
        until this rank is `due`."""

    @property
    def engaged(self) -> bool:
        """Whether other ranks can't make a call, or know that it is off, without this rank. It must not end then."""

    def leave(self) -> None:
        """This rank will have no work of its own any more. Go on stepping with `before_step(False)` until it says END:
        the others may still need this rank's part of their forwards."""

    def ends(self) -> None:
        """This process has been told to end, so it does not matter to it any more that another rank is closed. Takes no
        lock: for a signal handler."""

    def close(self) -> None:
        """Lets go of threads and sockets. A rank closed before END fails the group: at once where somebody needs it,
        else after a moment in which the others may be told to end, too."""
