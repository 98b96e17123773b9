# SPDX-License-Identifier: Apache-2.0
"""The utility calls of one engine that have to wait until all ranks make them, between the same two forward passes.

Such a call is kept here until the step sync says that all make it now, or that none does; the engine goes on meanwhile.
Ranks know a call by who sent it and what it is. Where a front end calls all ranks it numbers these calls, and that
number belongs to the name: a rank that was away while the others gave a call up does not take it for the next one, and
a call to a single rank is no other's. Ranks of which each has a front end of its own have no such number in common,
since one may have been called more often; there the oldest calls of one name are taken for the same. Calls of several
front ends may come in any order: rank 0, which proposes them, lets another front end's go first where one is not known
everywhere. A call of the same front end that comes behind one that waits stays behind it, so rank 0 holds, of each
front end, one at a time.
"""
from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_pd.dp.calls import NAME_BITS
from vllm_pd.dp.interface import CallEnd, Member

if TYPE_CHECKING:
    from vllm.v1.engine.core import DPEngineCoreProc

# Those that reach the workers and may run collectives there, or change what a forward pass uses.
TOGETHER = frozenset({"collective_rpc", "execute_dummy_batch", "sleep", "wake_up"})
MOST_WAITING = 1000
RANK_BITS = 16  # the last of a call's number, where the same call goes to all ranks; those before are then the same
ALARM_SLACK_S = 0.01  # so that a call is surely overdue when the loop is woken for it

Request = tuple[int, int, str, Any]  # number of the front end, of the call, method of EngineCore, its arguments


class _Held(NamedTuple):
    """A call that waits. `name`: 0 where it waits only for those before it. `told`: the step sync holds it, too."""
    request: Request
    name: int
    until_s: float
    alarm: threading.Timer | None
    told: bool = False


def kind_of(client: int, method: str, args: Any) -> str:
    """Calls of one kind come in the same order at all ranks."""
    inner = args[0] if method == "collective_rpc" and args and isinstance(args[0], str) else ""
    return f"{client} {method} {inner}"


def name_of(kind: str, number: int = 0) -> int:
    """What all ranks call the call of that kind and number; 0: any."""
    digest = hashlib.blake2b(f"{number} {kind}".encode(), digest_size=NAME_BITS // 8).digest()
    return int.from_bytes(digest, "little") or 1


class UtilityCalls:
    """The calls that wait, the oldest first. For the engine loop's thread. `wait_s`: see GroupSettings.call_wait_s;
    `wake` makes the engine loop look again. `numbered`: a front end that calls all ranks numbers these calls."""

    def __init__(self, engine: DPEngineCoreProc, member: Member, wait_s: float, wake: Callable[[], None],
                 numbered: bool = False) -> None:
        self._engine = engine
        self._member = member
        self._wait_s = wait_s
        self._wake = wake
        self._numbered = numbered
        self._held: list[_Held] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def overdue(self) -> bool:
        """Whether one has waited for too long, so that `carry_out` has something to do."""
        return any(held.until_s <= time.monotonic() for held in self._held)

    def hold(self, request: Request) -> bool:
        """Whether this call has to wait; then it is kept."""
        client, number, method, args = request
        together = self._wait_s > 0 and method in TOGETHER
        if not together and all(held.request[0] != client for held in self._held):
            return False
        name = name_of(kind_of(client, method, args), number >> RANK_BITS if self._numbered else 0) if together else 0
        if len(self._held) >= MOST_WAITING:
            self._fail(request, f"{method} was not made by this rank: {MOST_WAITING} calls wait for others already")
            return True
        if not together:
            self._held.append(_Held(request, 0, math.inf, None))
            return True
        alarm = threading.Timer(self._wait_s + ALARM_SLACK_S, self._wake)
        alarm.daemon = True
        self._held.append(_Held(request, name, time.monotonic() + self._wait_s, alarm))
        self._tell()
        alarm.start()
        return True

    def carry_out(self, make: Callable[[Request], None]) -> None:
        """Make those whose time has come, fail those that have waited for too long. Raises GroupFailed."""
        while self._held and (end := self._member.next_call()):
            what, name = end
            self._look_again(name)
            if what is CallEnd.MAKE:
                make(self._taken(self._oldest(name)).request)
                self._follow(make)
            else:
                self._end_overdue(make)  # before this rank is ready for another number of that name
        self._end_overdue(make)

    def expire(self) -> None:
        """Wait no longer."""
        self._held = [held._replace(until_s=0.0) if held.name else held for held in self._held]

    def _end_overdue(self, make: Callable[[Request], None]) -> None:
        now = time.monotonic()
        while held := next((held for held in self._held if held.until_s <= now), None):
            if not held.told or self._member.give_up(held.name):
                self._give_up(self._taken(self._oldest(held.name) if held.told else held))
                self._follow(make)
            else:  # this rank is ready, so rank 0 is about to say what becomes of it
                self._held = [one._replace(until_s=math.inf) if one is held else one for one in self._held]

    def _look_again(self, name: int) -> None:
        """Those of that name which were overdue while rank 0 had yet to decide about one of them are so now."""
        self._held = [one._replace(until_s=0.0) if one.name == name and one.until_s == math.inf else one
                      for one in self._held]

    def _oldest(self, name: int) -> _Held:
        return next(held for held in self._held if held.name == name)

    def _taken(self, held: _Held) -> _Held:
        held.alarm.cancel()
        self._held.remove(held)
        self._tell()
        return held

    def _tell(self) -> None:
        """Have the step sync hold what it may."""
        fronts = set()
        for place, held in enumerate(self._held):
            front_end = held.request[0]
            if held.name and not held.told and not (self._member.rank == 0 and front_end in fronts):
                self._member.hold(held.name)
                self._held[place] = held._replace(told=True)
            if held.name:
                fronts.add(front_end)

    def _follow(self, make: Callable[[Request], None]) -> None:
        """Make what waited only for a call before it."""
        rest: list[_Held] = []
        for held in self._held:
            if held.name or any(held.request[0] == other.request[0] for other in rest):
                rest.append(held)
            else:
                make(held.request)
        self._held = rest

    def _give_up(self, held: _Held) -> None:
        self._fail(held.request, f"{held.request[2]} was made by no rank: not all of the data-parallel ranks were told "
                                 f"to make it within {self._wait_s:g} s. Call it on every rank at the same time, give "
                                 f"them longer by dp_sync.call_wait_s in additional_config, or set that to 0, which "
                                 f"has each rank make its calls at once and alone")

    def _fail(self, request: Request, failure: str) -> None:
        from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
        client, call_id, method, _ = request
        output = UtilityOutput(call_id, failure_message=f"Call to {method} method failed: {failure}")
        self._engine.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=output)))
