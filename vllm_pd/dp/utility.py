# SPDX-License-Identifier: Apache-2.0
"""The utility calls of one engine that wait until all ranks make them, between the same two forward passes.

A call is kept here until the step sync decides that all ranks make it now, or that none does. The engine keeps running
meanwhile. Ranks identify a call by its name, which the engine gives: of its front end, its kind, and what else tells it
apart from the next one of that kind. If a name does not (ranks that have a front end each may have received different
numbers of calls), they match the oldest calls of the same name.

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
from typing import Any, NamedTuple

from vllm_pd.dp.calls import NAME_BITS
from vllm_pd.dp.interface import CallOutcome, GroupMember

MOST_WAITING = 1000
ALARM_SLACK_S = 0.01  # so that a call is certainly overdue when its alarm wakes the loop

# The number of the front end, the number of the call, the method of EngineCore, its arguments.
UtilityRequest = tuple[int, int, str, Any]


class _HeldCall(NamedTuple):
    """A call that waits."""
    request: UtilityRequest
    name: int  # 0: it waits only for the calls of its front end before it
    until_s: float  # when to give it up, on the monotonic clock
    alarm: threading.Timer | None  # None: it is never given up
    wait_s: float = math.inf
    synced: bool = False  # whether the step sync holds it too


def kind_of(client: int, method: str, args: Any) -> str:
    """The kind of a call. Calls of one kind arrive in the same order at all ranks."""
    inner = args[0] if method == "collective_rpc" and args and isinstance(args[0], str) else ""
    return f"{client} {method} {inner}"


def name_of(kind: str, number: int = 0) -> int:
    """The name by which all ranks know the call of that kind and number; number 0 for calls without one. Never 0."""
    digest = hashlib.blake2b(f"{number} {kind}".encode(), digest_size=NAME_BITS // 8).digest()
    return int.from_bytes(digest, "little") or 1


def failed_call(request: UtilityRequest, failure: str) -> tuple[int, Any]:
    """The answer to a call that no rank makes, as it goes into the output queue of vLLM's engine."""
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    client, call_id, method, _ = request
    output = UtilityOutput(call_id, failure_message=f"Call to {method} method failed: {failure}")
    return client, EngineCoreOutputs(utility_output=output)


class UtilityCalls:
    """The calls that wait, oldest first. For the engine loop's thread only.

    `wait_s` is `SyncSettings.call_wait_s`. `wake` makes the engine loop check again. `name`: by what name all ranks
    know a call; 0 for one that each makes alone. `fail`: answer a call that no rank makes with this text.
    """

    def __init__(self, member: GroupMember, wait_s: float, wake: Callable[[], None],
                 name: Callable[[UtilityRequest], int], fail: Callable[[UtilityRequest, str], None]) -> None:
        self._member = member
        self.wait_s = wait_s
        self._wake = wake
        self._name = name
        self._fail = fail
        self._held: list[_HeldCall] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def overdue(self) -> bool:
        """Whether a call has waited for too long, so that `carry_out` must give it up."""
        return any(held.until_s <= time.monotonic() for held in self._held)

    def hold(self, request: UtilityRequest, wait_s: float | None = None) -> bool:
        """Take a call that must wait. Returns whether it was taken: it is kept then, or fails at once if MOST_WAITING
        calls wait already. `wait_s`: in the place of the other calls' one."""
        client, _, method, _ = request
        wait_s = self.wait_s if wait_s is None else wait_s
        name = self._name(request) if wait_s > 0 else 0
        if not name and all(held.request[0] != client for held in self._held):
            return False
        if len(self._held) >= MOST_WAITING:
            self._fail(request, f"this rank did not make {method}: {MOST_WAITING} calls already wait for other ranks")
            return True
        if not name:
            self._held.append(_HeldCall(request, 0, math.inf, None))
            return True
        alarm = threading.Timer(wait_s + ALARM_SLACK_S, self._wake)
        alarm.daemon = True
        self._held.append(_HeldCall(request, name, time.monotonic() + wait_s, alarm, wait_s))
        self._sync()
        alarm.start()
        return True

    def hold_until_all(self, request: UtilityRequest, name: int) -> None:
        """Keep a call of this engine's own, which no front end waits for behind others, until all ranks make it."""
        self._held.append(_HeldCall(request, name, math.inf, None))
        self._sync()

    def withdraw(self, request: UtilityRequest) -> bool:
        """Stop keeping a call of `hold_until_all`, so that no rank makes it. False: other ranks may be about to."""
        held = next((held for held in self._held if held.request is request), None)
        if held is None or held.synced and not self._member.give_up(held.name):
            return False
        self._taken(held)
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
        self._held = [held._replace(until_s=0.0) if held.alarm else held for held in self._held]

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
        self._held = [one._replace(until_s=0.0) if one.name == name and one.until_s == math.inf and one.alarm else one
                      for one in self._held]

    def _oldest(self, name: int) -> _HeldCall:
        return next(held for held in self._held if held.name == name)

    def _taken(self, held: _HeldCall) -> _HeldCall:
        if held.alarm is not None:
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
                                 f"within {held.wait_s:g} s. Call it on every rank at the same time, allow more time "
                                 f"with call_wait_s, or set that to 0, so that each rank makes its calls at once and "
                                 f"alone")
