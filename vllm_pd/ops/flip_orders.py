# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pd planner` asks engines, and the orders that it gives with --flip, at their control sockets.

Questions and orders run in threads, and each has a deadline.
"""
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from vllm_pd.broker.members import Access, list_members
from vllm_pd.errors import PDError
from vllm_pd.ops.flips import ROLE_WORDS, Flip, acts_as, roles_of
from vllm_pd.ops.orders import EngineAddress, Operator
from vllm_pd.protocol.messages import Member, Role, SetRole, Status, StatusReply

ASK_S, ORDER_S = 2.0, 5.0
REGISTRY_S = 2.0
SHOWN_S = 5.0  # within which the registry shows a new role
POLL_S = 0.1


class OrderResult(NamedTuple):
    """Whether an order was given, and why it was not, or may not have been carried out."""
    given: bool
    problem: str = ""


class FlipOrders:
    """Talks to the engines of one broker. Belongs to one event loop, from its first call on."""

    def __init__(self, broker: str, access: Access) -> None:
        self._broker, self._access = broker, access
        self._asking: asyncio.Task[dict[str, StatusReply]] | None = None

    def poll(self, members: Iterable[Member]) -> dict[str, StatusReply]:
        """The statuses that have come since the last call, by incarnation. If no question is open, these engines are
        asked in the background; those that don't answer in `ASK_S` are left out."""
        found = {}
        if self._asking is not None and self._asking.done():
            found, self._asking = self._asking.result(), None
        if self._asking is None and (asked := list(members)):
            self._asking = asyncio.get_running_loop().create_task(self._ask_all(asked))
        return found

    async def _ask_all(self, members: list[Member]) -> dict[str, StatusReply]:
        answers = await asyncio.gather(*(asyncio.to_thread(self._ask, member) for member in members))
        return {reply.member.incarnation: reply for reply in answers if reply is not None}

    async def order(self, flip: Flip, seen: Mapping[str, tuple[Role, bool]]) -> OrderResult:
        """Have the engine change its role, unless the registry differs from `seen`, the roles of the reading that
        decided it. Raises nothing for what brokers and engines say."""
        return await asyncio.to_thread(self._order, flip, seen)

    def _ask(self, member: Member) -> StatusReply | None:
        try:
            reply = self._tell(member, Status(), ASK_S)
        except PDError:
            return None
        return reply if reply.member.incarnation == member.incarnation else None

    def _order(self, flip: Flip, seen: Mapping[str, tuple[Role, bool]]) -> OrderResult:
        try:
            if roles_of(self._list()) != seen:
                return OrderResult(False, "the registry has changed since the reading")
        except PDError as error:
            return OrderResult(False, str(error))
        try:
            self._tell(flip.member, SetRole(flip.to), ORDER_S)
            members = self._await(lambda found: flip.member.incarnation in found
                                  and found[flip.member.incarnation].role is flip.to)
            if not members:
                return OrderResult(True, "the registry does not show the new role yet")
            one_decoded = any(role.decodes for role, _ in seen.values())  # else the last engine of all is to
            if one_decoded and not any(acts_as(one) is not flip.to and not one.draining for one in members.values()):
                self._tell(flip.member, SetRole(flip.member.role), ORDER_S)  # so of two planners one ends it
                word = ROLE_WORDS[acts_as(flip.member)]
                return OrderResult(True, f"taken back: no other {word} engine was left")
        except PDError as error:
            return OrderResult(True, str(error))
        return OrderResult(True)

    def _tell(self, member: Member, order: Status | SetRole, timeout_s: float) -> StatusReply:
        with Operator(EngineAddress(member.address, member.incarnation), self._access) as operator:
            return operator.tell(order, timeout_s)

    def _list(self) -> tuple[Member, ...]:
        return list_members(self._broker, REGISTRY_S, self._access).members

    def _await(self, holds: Callable[[dict[str, Member]], bool]) -> dict[str, Member]:
        """The registry once it shows this; nothing where it does not within `SHOWN_S`."""
        deadline_s = time.monotonic() + SHOWN_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(PDError):  # a broker that is slow at this moment
                members = {member.incarnation: member for member in self._list()}
                if holds(members):
                    return members
            time.sleep(POLL_S)
        return {}
