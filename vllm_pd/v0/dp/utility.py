# SPDX-License-Identifier: Apache-2.0
"""The utility calls of one engine that wait until all ranks make them, between the same two forward passes.

A call is kept here until the step sync decides that all ranks make it now, or that none does. The engine keeps running
meanwhile. Ranks identify a call by its front end and its kind. A front end that calls all ranks numbers these calls,
and the number is part of the name. So a rank that was away while the others gave a call up does not mistake it for the
next one, and a call to a single rank matches no call of another rank. Ranks that have a front end each share no such
number, because one rank may have received more calls. They match the oldest calls of the same name.

Calls of several front ends may arrive in any order. Rank 0 proposes them. If not all ranks have received one, it lets
the calls of other front ends go first. A call that arrives behind a waiting call of the same front end stays behind it.
So of each front end, rank 0 lets the step sync hold one call at a time.
"""
from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_pd.dp.calls import NAME_BITS
from vllm_pd.dp.interface import CallOutcome, GroupMember

if TYPE_CHECKING:
    from vllm.v1.engine.core import DPEngineCoreProc

# The methods that reach the workers and may run collectives there, or change what a forward pass uses.
TOGETHER = frozenset({"collective_rpc", "execute_dummy_batch", "sleep", "wake_up"})
MOST_WAITING = 1000
RANK_BITS = 16  # the low bits of a call's number, which differ by rank; the high bits are the same on all ranks
ALARM_SLACK_S = 0.01  # so that a call is certainly overdue when its alarm wakes the loop

# The number of the front end, the number of the call, the method of EngineCore, its arguments.
UtilityRequest = tuple[int, int, str, Any]


class _HeldCall(NamedTuple):
    """A call that waits."""
    request: UtilityRequest
    name: int  # 0: it waits only for the calls of its front end before it
    until_s: float  # when to give it up, on the monotonic clock
    alarm: threading.Timer | None
    synced: bool = False  # whether the step sync holds it too


def kind_of(client: int, method: str, args: Any) -> str:
    """The kind of a call. Calls of one kind arrive in the same order at all ranks."""
    inner = args[0] if method == "collective_rpc" and args and isinstance(args[0], str) else ""
    return f"{client} {method} {inner}"


def name_of(kind: str, number: int = 0) -> int:
    """The name by which all ranks know the call of that kind and number; number 0 for calls without one. Never 0."""
    digest = hashlib.blake2b(f"{number} {kind}".encode(), digest_size=NAME_BITS // 8).digest()
    return int.from_bytes(digest, "little") or 1


class UtilityCalls:
    """The calls that wait, oldest first. For the engine loop's thread only.

    `wait_s` is `SyncSettings.call_wait_s`. `wake` makes the engine loop check again. `numbered`: each front end calls
    all ranks and numbers these calls (see RANK_BITS).
    """

    def __init__(self, engine: DPEngineCoreProc, member: GroupMember, wait_s: float, wake: Callable[[], None],
                 numbered: bool = False) -> None:
        self._engine = engine
        self._member = member
        self.wait_s = wait_s
        self._wake = wake
        self._numbered = numbered
        self._held: list[_HeldCall] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def overdue(self) -> bool:
        """Whether a call has waited for too long, so that `carry_out` must give it up."""
        return any(held.until_s <= time.monotonic() for held in self._held)

    def hold(self, request: UtilityRequest) -> bool:
        """Take a call that must wait. Returns whether it was taken: it is kept then, or fails at once if MOST_WAITING
        calls wait already."""
        client, number, method, args = request
        together = self.wait_s > 0 and method in TOGETHER
        if not together and all(held.request[0] != client for held in self._held):
            return False
        name = name_of(kind_of(client, method, args), number >> RANK_BITS if self._numbered else 0) if together else 0
        if len(self._held) >= MOST_WAITING:
            self._fail(request, f"this rank did not make {method}: {MOST_WAITING} calls already wait for other ranks")
            return True
        if not together:
            self._held.append(_HeldCall(request, 0, math.inf, None))
            return True
        alarm = threading.Timer(self.wait_s + ALARM_SLACK_S, self._wake)
        alarm.daemon = True
        self._held.append(_HeldCall(request, name, time.monotonic() + self.wait_s, alarm))
        self._sync()
        alarm.start()
        return True

    def carry_out(self, make: Callable[[UtilityRequest], None]) -> None:
        """Make the calls that all ranks make now, and fail the overdue ones. Raises GroupFailed."""
        while self._held and (end := self._member.next_call()):
            outcome, name = end
            self._restore_overdue(name)
            if outcome is CallOutcome.MAKE:
                make(self._taken(self._oldest(name)).request)
                self._follow(make)
            else:
                self._end_overdue(make)  # before this rank becomes ready for another number of that name
        self._end_overdue(make)

    def expire(self) -> None:
        """Make all waiting calls overdue."""
        self._held = [held._replace(until_s=0.0) if held.name else held for held in self._held]

    def _end_overdue(self, make: Callable[[UtilityRequest], None]) -> None:
        now = time.monotonic()
        while held := next((held for held in self._held if held.until_s <= now), None):
            if not held.synced or self._member.give_up(held.name):
                self._give_up(self._taken(self._oldest(held.name) if held.synced else held))
                self._follow(make)
            else:  # this rank is ready for it, so rank 0 will decide about it soon
                self._held = [one._replace(until_s=math.inf) if one is held else one for one in self._held]

    def _restore_overdue(self, name: int) -> None:
        """Rank 0 has decided about a call of that name: calls of that name that were overdue are overdue again."""
        self._held = [one._replace(until_s=0.0) if one.name == name and one.until_s == math.inf else one
                      for one in self._held]

    def _oldest(self, name: int) -> _HeldCall:
        return next(held for held in self._held if held.name == name)

    def _taken(self, held: _HeldCall) -> _HeldCall:
        held.alarm.cancel()
        self._held.remove(held)
        self._sync()
        return held

    def _sync(self) -> None:
        """Let the step sync hold the calls that it may hold now."""
        front_ends = set()
        for place, held in enumerate(self._held):
            front_end = held.request[0]
            if held.name and not held.synced and not (self._member.rank == 0 and front_end in front_ends):
                self._member.hold(held.name)
                self._held[place] = held._replace(synced=True)
            if held.name:
                front_ends.add(front_end)

    def _follow(self, make: Callable[[UtilityRequest], None]) -> None:
        """Make the calls that waited only for the call that was just removed."""
        rest: list[_HeldCall] = []
        for held in self._held:
            if held.name or any(held.request[0] == other.request[0] for other in rest):
                rest.append(held)
            else:
                make(held.request)
        self._held = rest

    def _give_up(self, held: _HeldCall) -> None:
        self._fail(held.request, f"{held.request[2]} was made by no rank: not all data-parallel ranks received it "
                                 f"within {self.wait_s:g} s. Call it on every rank at the same time, allow more time "
                                 f"with dp_sync.call_wait_s in additional_config, or set that to 0, so that each rank "
                                 f"makes its calls at once and alone")

    def _fail(self, request: UtilityRequest, failure: str) -> None:
        from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
        client, call_id, method, _ = request
        output = UtilityOutput(call_id, failure_message=f"Call to {method} method failed: {failure}")
        self._engine.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=output)))
