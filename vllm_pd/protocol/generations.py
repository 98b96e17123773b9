# SPDX-License-Identifier: Apache-2.0
"""How an engine fences by its own act: the generations of its transfer agents.

What a peer may write into our blocks, or read from them, ends by a word of that peer or by its death as a fact. Of a
peer on another machine neither may ever come. So an engine that is *in doubt* about one has its ranks make a second
transfer agent over the same memory, a new generation, and grants in that one only. Then it lets end what goes well in
the old one, for a lease at most, and has the old agents destroyed. Between machines everything comes in through these,
so from then on nothing of the old generation lands here or is read here, whatever the peer does. The same holds for
this engine's own reads, also on one machine: it is the reader that copies.

On one machine it does not hold for the acts of others: a process may write into another's memory without its help. A
peer counts as *elsewhere* where the boot ids of both are known and differ (`is_elsewhere`).

Life of a renewal: STEADY; in doubt RENEWING, until all ranks have the new agent; CLOSING, while something goes on in
the old generation; RETIRING, until all ranks have destroyed the old agent; STEADY. Both halves of an engine share one
object, and it asks both. `parted` are the engines with which a transfer has failed: none begins until the next
generation, of ours or of theirs, in which the transport begins anew.
"""
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Action, RenewTransport, RetireTransport
from vllm_pd.protocol.moments import NEVER
from vllm_pd.protocol.names import generation_name

# Between two renewals, and after one that failed; doubled with each further one that comes before CALM_S have passed: a
# peer or a network that gives doubt after doubt is not to keep this engine busy.
PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
MAX_FAILED_PAUSE_S = 5.0  # what was missing may be there again, and nothing says so
CALM_S = 60.0
LOOK_S = 0.5
DOUBT_S = 5.0  # for how long a peer may leave a Cancel unanswered, and a transfer of ours may go on that was stopped


def is_elsewhere(ours: m.Member, theirs: m.Member) -> bool:
    """Whether that engine is known to be on another machine: what it writes or reads goes through both transports."""
    boots = {_boot(ours), _boot(theirs)}
    return len(boots) == 2 and "" not in boots


def _boot(member: m.Member) -> str:
    return member.host_id.partition("/")[0]


class Half(Protocol):
    """What a half of the protocol says of its transfers, and does about them."""

    def doubts_at(self) -> float:
        """When this half is in doubt about something of the current generation; infinite: it is not."""

    def is_busy(self, now: float) -> bool:
        """Whether something goes well in an older generation."""

    def renewed(self, now: float) -> list[Action]:
        """There is a newer generation: the peers are to know."""

    def close(self, now: float) -> list[Action]:
        """Older generations are about to end: end what goes on in them."""

    def retired(self, now: float) -> list[Action]:
        """Older generations have ended."""


class Phase(Enum):
    """What is done about the generations."""
    STEADY = "steady"
    RENEWING = "renewing"
    CLOSING = "closing"
    RETIRING = "retiring"


class Generations:
    """The generations of one engine. `current` is the one to grant in, `oldest` the oldest one in which something may
    land, `metadata` says how this engine's memory is reached in the current one. `problem`: why the last renewal
    failed, empty if it did not. A generation that closes may last `lease_s`; every `look_s` it is seen whether what was
    well still is. With a two-sided transport there is but one: not `can_renew`."""

    def __init__(self, incarnation: str, metadata: bytes, lease_s: float = 30.0, look_s: float = LOOK_S,
                 can_renew: bool = True):
        self.incarnation = incarnation
        self.metadata = metadata
        self.lease_s = lease_s
        self.look_s = look_s
        self.can_renew = can_renew
        self.current = self.oldest = 0
        self.phase = Phase.STEADY
        self.parted: set[str] = set()
        self.problem = ""
        self._not_before = self._last_at = 0.0  # a renewal, or another try; the last renewal
        self._failed_at = -NEVER  # the last renewal that did
        self._closes_at = self._next_look = 0.0
        self._pause_s = PAUSE_S

    @property
    def newest(self) -> int:
        """The newest one that a transfer of ours may go through: some ranks may have made their new agents, also where
        others could not."""
        return self.current + (self.phase is Phase.RENEWING or bool(self.problem))

    def renewal_problem(self, halves: Sequence[Half]) -> str:
        """Why this engine, which is in doubt, could make no new agents when it last tried; empty where it could, or has
        not tried in this doubt, or is in none."""
        is_open = self.phase in (Phase.STEADY, Phase.RENEWING) and _earliest(halves) <= self._failed_at
        return self.problem if is_open else ""

    def is_closing(self, generation: int) -> bool:
        """Whether that one is about to end, while there is a newer one."""
        return self.oldest <= generation < self.current

    # What the ranks have done.

    def renewed(self, now: float, metadata: bytes, halves: Sequence[Half]) -> list[Action]:
        """All ranks have the agent of the next generation, and `metadata` says how to reach it."""
        if self.phase is not Phase.RENEWING:
            return []
        self.phase, self.problem = Phase.CLOSING, ""
        self._closes_at, self._next_look = now + self.lease_s, now
        self.current += 1
        self.metadata = metadata
        self.parted.clear()
        return [action for half in halves for action in half.renewed(now)] + self.handle_timeout(now, halves)

    def not_renewed(self, now: float, problem: str) -> None:
        """A rank can't make another agent. It is tried again."""
        if self.phase is Phase.RENEWING:
            self.phase, self.problem, self._failed_at = Phase.STEADY, problem, now
            self._pause(now, MAX_FAILED_PAUSE_S)

    def retired(self, now: float, is_done: bool, halves: Sequence[Half]) -> list[Action]:
        """The ranks have destroyed all agents but the newest; or, not `is_done`, one could not: it is tried again."""
        if self.phase is not Phase.RETIRING:
            return []
        if not is_done:
            self.phase = Phase.CLOSING
            self._closes_at = self._not_before = self._next_look = now + PAUSE_S
            return []
        self.phase = Phase.STEADY
        self._pause(now)
        self.oldest = self.current
        return [action for half in halves for action in half.retired(now)]

    def _pause(self, now: float, most_s: float = MAX_PAUSE_S) -> None:
        self._not_before = now + min(self._pause_s, most_s)
        self._pause_s = max(self._pause_s, min(2 * self._pause_s, most_s))

    # Time.

    def handle_timeout(self, now: float, halves: Sequence[Half]) -> list[Action]:
        """Do what is due."""
        if self.can_renew and self.phase is Phase.STEADY and now >= max(self._not_before, _earliest(halves)):
            if now >= self._last_at + CALM_S:
                self._pause_s = PAUSE_S
            self.phase, self._last_at = Phase.RENEWING, now
            return [RenewTransport(generation_name(self.incarnation, self.current + 1))]
        if self.phase is not Phase.CLOSING or now < self._not_before:
            return []
        actions: list[Action] = []
        if any(half.is_busy(now) for half in halves):
            if now < self._closes_at:
                self._next_look = min(self._closes_at, now + self.look_s)
                return []
            for half in halves:
                actions += half.close(now)
        self.phase = Phase.RETIRING
        return [*actions, RetireTransport()]

    def next_timeout(self, halves: Sequence[Half]) -> float:
        """When `handle_timeout` is next due by the clock; infinite: by nothing but what happens."""
        if self.phase is Phase.STEADY:
            return max(self._not_before, _earliest(halves)) if self.can_renew else NEVER
        return self._next_look if self.phase is Phase.CLOSING else NEVER


def _earliest(halves: Sequence[Half]) -> float:
    return min((half.doubts_at() for half in halves), default=NEVER)
