# SPDX-License-Identifier: Apache-2.0
"""The interface of the step sync for an engine loop: one `GroupMember` per data-parallel rank.

Every forward contains collectives, so all ranks must run the same number of them. A member numbers the forwards of its
rank and knows the *agreed* step, which every rank must reach. The engine loop, on one thread:

    outputs = schedule()
    if tokens are scheduled:
        member.before_step(True, most)     # always FORWARD; never waits
        run the forward; member.after_step()
    else:                                  # no forward: at most finished requests to report
        match member.before_step(False):
            case DUMMY: run a dummy forward; member.after_step()
            case IDLE:  nothing to run; may block on the input queue, because `wake` puts an entry there
            case END:   (after `leave` only) all ranks have left and run equally many forwards: shut down

It may block where it waits for input: `while not has_requests and not member.due: input_queue.get()`. `due` is a state
and not an event. It is read anew each time, and `wake` is called after it has become true. So no wakeup is lost, and an
extra one does no harm. Requests may enter at any rank. No other rank has to know.

A loop with several forwards in flight (a batch queue) may block on its input queue only when none of its own is in
flight: it reads what the other ranks requested during a forward after that forward, and gets no wakeup for it.

Only forwards that all ranks run together count. A step without a forward must not call `before_step(True)`. Collectives
outside of the step loop (start-up, profile runs, sleep) run outside of it on every rank and are not counted.

A rank that pauses passes `has_work=False` and so runs the dummies that the others need. So does a rank that has aborted
its last request.

Calls that run collectives of their own, or that change what forwards use, must come after the same forward on all
ranks. `hold` each of them, call `next_call` between two steps, make the calls that it returns, and call
`before_step(True)` only while `may_step` is true. Either all ranks make a call or none does, provided that each rank
gives up the calls that it no longer waits for.
"""
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import msgspec

from vllm_pd.errors import PDError


class StepDecision(Enum):
    """What the engine loop must do after `before_step`."""
    FORWARD = "forward"  # run the scheduled batch; counted
    DUMMY = "dummy"  # run a dummy batch; counted
    IDLE = "idle"  # run nothing now
    END = "end"  # run nothing ever again


class CallOutcome(Enum):
    """What the engine loop must do with a call that it holds."""
    MAKE = "make"  # make it now, as all ranks do; it is no longer held
    POSTPONED = "postponed"  # no rank makes it now; it is still held


class GroupFailed(PDError):
    """A rank of the group is dead or does not answer. Final. Every rank gets it within the bounds of SyncSettings."""


TOGETHER_S = 30.0  # `call_wait_s` where one front end calls all ranks


class SyncSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds of a group. Ranks with different ones refuse to form a group."""
    horizon: int = 8  # most steps agreed on beyond the current one
    timeout_s: float = 10.0  # a process silent for longer counts as dead, while there are steps or calls
    # The group fails if for so long no rank ends a forward although there are steps to run, or the engine loop of a
    # rank does not come back although a call waits for it.
    stall_s: float = 300.0
    join_s: float = 120.0  # over the network: all ranks must reach the coordinator so soon after the exchanges
    grace_s: float = 5.0  # after a failure the engine loop must call the member by then, or `abort` is called
    # A call for all ranks fails if some rank has not received it for so long. 0: each rank makes it at once, alone.
    call_wait_s: float | None = None  # None: depends on the front ends, see vllm_pd.dp.engine
    # Whether the ranks run equally many forwards. None: only if the model has experts, see vllm_pd.dp.experts.
    lockstep: bool | None = None


class SyncOptions(SyncSettings, frozen=True, forbid_unknown_fields=True):
    """What a user may set: the bounds of the group, and the backend of its ranks."""
    shared_memory: bool = True  # false: use the network, even if all ranks are on one machine; equal on all ranks

    def filled(self, call_wait_s: float, lockstep: bool = True) -> SyncSettings:
        """The settings that must be equal on all ranks. `call_wait_s`: unless the user has set one."""
        given = {key: getattr(self, key) for key in SyncSettings.__struct_fields__}
        wait_s = call_wait_s if self.call_wait_s is None else self.call_wait_s
        return SyncSettings(**given | {"call_wait_s": wait_s, "lockstep": lockstep})


class SyncCounters(msgspec.Struct):
    """What one rank has done since it joined."""
    forwards: int = 0  # begun, dummies included
    dummies: int = 0
    asks: int = 0  # step requests
    urgent: int = 0  # of these, the ones made when the step was already needed; the others were made ahead
    messages: int = 0  # sent by this rank: requests, answers, wakeups
    calls: int = 0  # made together with all other ranks


Wake = Callable[[], None]
Abort = Callable[[GroupFailed], None]
# All-gather of short byte strings (<= EXCHANGE_BYTES) in order of rank. Every rank calls it equally often at start, up
# to three times.
Exchange = Callable[[bytes], list[bytes]]
EXCHANGE_BYTES = 1024


class GroupMember(Protocol):
    """One rank of a group. All methods but `expect_end` are for the engine loop's thread. None of them blocks, except
    `close`."""
    rank: int
    size: int
    counters: SyncCounters

    @property
    def messages(self) -> int:
        """Messages sent by this process, including those of a coordinator in it."""

    @property
    def due(self) -> bool:
        """Whether `before_step(False)` would return anything but IDLE: a dummy to run, the end, or a failure. Cheap,
        and may be called in any thread."""

    def before_step(self, has_work: bool, max_remaining_tokens: int | None = None) -> StepDecision:
        """Call this right before a forward, or in place of one. Raises GroupFailed.

        `max_remaining_tokens` is the most forwards that this rank's running requests may still need, this one included,
        or None if unknown. It is a hint that bounds how far ahead the other ranks go. A wrong value costs dummies or a
        wait, never correctness.
        """

    def after_step(self) -> None:
        """A forward that `before_step` allowed has ended (with a batch queue: its result has arrived)."""

    def hold(self, name: int) -> None:
        """Hold a call until all ranks make it together. All ranks know it by the same name, from 1 to 2**40 - 1.
        Several calls may have the same name."""

    def next_call(self) -> tuple[CallOutcome, int] | None:
        """The name of a held call and what to do with it now, or None. Call this between two steps, until it returns
        None. Raises GroupFailed."""

    def give_up(self, name: int) -> bool:
        """Stop holding the oldest call of that name, so that no rank makes it. False: other ranks may be about to make
        it. Then `next_call` will return what becomes of it; try again after that."""

    @property
    def may_step(self) -> bool:
        """Whether `before_step(True)` may be called. False while all ranks come to rest for a call; then wait until
        this rank is `due`."""

    @property
    def engaged(self) -> bool:
        """Whether the other ranks need this one to make a call or to learn that it is dropped. It must not end then."""

    def leave(self) -> None:
        """This rank will not have any work again. Keep calling `before_step(False)` until it returns END, because the
        other ranks may still need this rank's part of their forwards."""

    def expect_end(self) -> None:
        """This process has got the signal to end, so a rank that closes is no failure for it any more. Takes no lock:
        safe in a signal handler."""

    def close(self) -> None:
        """Release threads and sockets. If the rank closes before END, the group fails: at once if another rank needs
        it, otherwise after SHUTDOWN_SPREAD_S, in which the signal may reach the others, too."""
