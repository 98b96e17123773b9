# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of its broker and, through it, of the other engines. Pure; the caller holds the lock."""
import collections
from collections.abc import Collection

import msgspec

from vllm_pd.core import messages as m
from vllm_pd.errors import PeerMismatch

SILENT_HEARTBEATS = 3
ASLEEP_HEARTBEATS = 1.5  # without a `check`, which comes at least once a heartbeat unless this process is suspended
MAX_DEAD = 4096
REFUSAL_KEPT_S = 60.0


class QueueView(msgspec.Struct, frozen=True):
    """For the policy. `prefill_peers` are alive as far as is known, fit, and have reached us; `mismatch` says why
    another does not fit."""
    broker_up: bool
    queue_length: int
    prefill_peers: int
    mismatch: str | None


class ClusterView:
    """Heartbeats, the registry as it was last sent, and which engines are dead as a fact."""

    def __init__(self, member: m.Member, heartbeat_s: float, ttl_s: float):
        self.member = member
        self.heartbeat_s = heartbeat_s
        self.silent_s = min(ttl_s, SILENT_HEARTBEATS * heartbeat_s)
        self.broker = ""
        self.version = 0
        self.queue_length = 0
        self.up = False
        self.heard_at = 0.0
        self._checked_at = 0.0
        self.next_heartbeat = 0.0
        self.mismatch: str | None = None  # with one that is registered
        self._refused: str | None = None
        self._refused_at = 0.0
        self._members: dict[str, m.Member] = {}
        self._dead: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._prefills: list[m.Member] = []

    def heard(self, now: float, broker: str, queue_length: int) -> bool:
        """A message of the broker has come. Returns whether it is another process than the one before."""
        self.heard_at = now
        self.up = True
        self.queue_length = queue_length
        new, self.broker = broker != self.broker, broker
        if new:
            self.version = 0
        return new

    def peers(self, message: m.Peers) -> None:
        """The registry, whole."""
        self.version = message.version
        self._members = {member.incarnation: member for member in message.members}
        self._judge()

    def dead(self, incarnation: str) -> None:
        """That process is gone."""
        self._dead[incarnation] = None
        if len(self._dead) > MAX_DEAD:
            self._dead.popitem(last=False)
        self._judge()

    def is_dead(self, incarnation: str) -> bool:
        """Whether that process is known to be gone."""
        return incarnation in self._dead

    def listed(self) -> m.Member | None:
        """Ourselves, as the registry lists us; None where it does not."""
        return self._members.get(self.member.incarnation)

    def check(self, now: float) -> None:
        """A broker that has been silent for too long is away. Not right after this process was suspended: it has not
        asked the broker in the meantime."""
        if self.up and now - self._checked_at > ASLEEP_HEARTBEATS * self.heartbeat_s:
            self.heard_at = max(self.heard_at, now - self.heartbeat_s)
        self._checked_at = now
        if self.up and now - self.heard_at >= self.silent_s:
            self.up = False

    def next_timeout(self) -> float:
        """When a heartbeat or `check` is due."""
        return min(self.next_heartbeat, self.heard_at + self.silent_s) if self.up else self.next_heartbeat

    def members(self) -> list[m.Member]:
        """The registry without ourselves and the dead."""
        return [member for name, member in self._members.items()
                if name != self.member.incarnation and name not in self._dead]

    def prefills(self, greeted: Collection[str]) -> list[str]:
        """Prefill engines among them that fit, and that have greeted us: one that can't reach us takes no job."""
        return [member.incarnation for member in self._prefills if member.incarnation in greeted]

    def refused(self, now: float, mismatch: str) -> None:
        """A peer did not fit, as was seen when it spoke to us."""
        self._refused, self._refused_at = mismatch, now

    def view(self, now: float, own_queued: int, greeted: Collection[str],
             avoid: Collection[str] = ()) -> QueueView:
        """For the policy. `greeted` are the prefill engines that have said hello to us. The broker's queue length
        is up to a heartbeat old, our own part of it is not."""
        prefills = sum(name not in avoid for name in self.prefills(greeted))
        refused = self._refused if now - self._refused_at < REFUSAL_KEPT_S else None
        return QueueView(self.up, max(self.queue_length, own_queued), prefills, self.mismatch or refused)

    def _judge(self) -> None:
        """Sort the members into those that fit and those that don't."""
        ours = self.member.fingerprint
        self._prefills = []
        self.mismatch = None
        for member in self.members():
            difference = ours.first_difference(member.fingerprint)
            if difference is not None:
                self.mismatch = str(PeerMismatch(*difference))
            elif member.role.prefills and not member.draining:
                self._prefills.append(member)
