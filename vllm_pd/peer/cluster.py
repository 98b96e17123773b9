# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of its broker and, through it, of the other engines. Pure; the caller holds the lock."""
import collections
from collections.abc import Collection

import msgspec

from vllm_pd.broker.changes import RegistryView
from vllm_pd.errors import PeerMismatch
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.scope import PromptScope
from vllm_pd.rpc.locality import stays_on_loopback

SILENT_HEARTBEATS = 3
ASLEEP_HEARTBEATS = 1.5  # without a `check`, which comes at least once a heartbeat unless this process is suspended
MAX_DEAD = 4096
REFUSAL_KEPT_S = 60.0


class QueueView(msgspec.Struct, frozen=True):
    """For the policy. `prefill_peers` counts those that fit, have greeted us, reach us, are not known to be dead, and
    between which and us no transfer has failed that may still land, or several lately; `mismatch` says why another one
    does not fit."""
    broker_up: bool
    queue_length: int
    prefill_peers: int
    mismatch: str | None


class ClusterView:
    """Heartbeats, the registry as its updates make it, and which engines are dead as a fact, or seem to be."""

    def __init__(self, member: m.Member, heartbeat_s: float, ttl_s: float, local_only: bool = False):
        """`local_only`: members with an address beyond the loopback are left out."""
        self.member = member
        self._local_only = local_only
        self.heartbeat_s = heartbeat_s
        self.silent_s = min(ttl_s, SILENT_HEARTBEATS * heartbeat_s)
        self.queue_length = 0
        self.up = False
        self.heard_at = 0.0
        self._checked_at = 0.0
        self.next_heartbeat = 0.0
        self.mismatch: str | None = None  # with one that is registered
        self._refused: str | None = None
        self._refused_at = 0.0
        self._registry = RegistryView()
        self._dead: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._seems_dead: dict[str, float] = {}  # since when, of engines on other machines
        self._ttl_s = ttl_s
        self._prefills: list[m.Member] = []
        self.queue_tokens: int | None = None  # prompt tokens that wait at the broker; None: not known
        self._loads: dict[str, m.PrefillLoad] = {}  # as last reported

    def heard(self, now: float, broker: str, queue_length: int) -> bool:
        """A message of the broker has come. Returns whether it is another process than the one before."""
        self.heard_at = now
        self.up = True
        self.queue_length = queue_length
        return self._registry.follow(broker)

    @property
    def broker(self) -> str:
        """The process of the broker that was last heard; empty: none."""
        return self._registry.broker

    @property
    def version(self) -> int:
        """That of its registry which is known here; 0: none."""
        return self._registry.version

    def peers(self, update: m.Peers) -> bool:
        """An update of the registry has come. Returns False if an earlier one is missing."""
        if self._local_only:
            here = [member for member in update.members if stays_on_loopback(member)]
            beyond = {member.incarnation for member in update.members} - {member.incarnation for member in here}
            update = msgspec.structs.replace(update, members=here, gone=[*update.gone, *beyond])
        if not self._registry.apply(update):
            return False
        self._loads.update((member.incarnation, m.PrefillLoad.of(member)) for member in update.members)
        self._loads = {name: load for name, load in self._loads.items() if name in self._registry.members}
        self._sort_members()
        return True

    def loads(self, message: m.Heard) -> None:
        """The answer to a heartbeat has come, with what waits where."""
        self.queue_tokens = message.queue_tokens
        known = self._registry.members
        self._loads.update((load.incarnation, load) for load in message.loads if load.incarnation in known)

    def prefill_loads(self, greeted: Collection[str], avoid: Collection[str] = ()) -> list[m.PrefillLoad]:
        """The loads of the prefill engines that `view` counts, as last reported."""
        return [self._loads.get(name) or m.PrefillLoad(name) for name in self.prefills(greeted) if name not in avoid]

    def dead(self, incarnation: str) -> None:
        """The process of this engine is gone, as a fact."""
        self._dead[incarnation] = None
        if len(self._dead) > MAX_DEAD:
            self._dead.popitem(last=False)
        self._sort_members()

    def is_dead(self, incarnation: str) -> bool:
        """Whether the process of this engine is known to be gone."""
        return incarnation in self._dead

    def seems_dead(self, now: float, incarnation: str) -> bool:
        """This engine, on another machine, can't be reached. It is left out until it is heard, or for `ttl_s`: by then
        the registry lists it no longer if it is dead. Returns whether it did not seem so before."""
        is_new = incarnation not in self._seems_dead
        self._seems_dead[incarnation] = now
        return is_new

    def heard_of(self, incarnation: str) -> bool:
        """A message of this engine has come. Returns whether it seemed dead."""
        return self._seems_dead.pop(incarnation, None) is not None

    def listed(self) -> m.Member | None:
        """The entry of this engine in the registry; None where there is none."""
        return self._registry.members.get(self.member.incarnation)

    def check(self, now: float) -> None:
        """A broker that has been silent for too long is away. Not right after this process was suspended: it has not
        asked the broker in the meantime."""
        if self.up and now - self._checked_at > ASLEEP_HEARTBEATS * self.heartbeat_s:
            self.heard_at = max(self.heard_at, now - self.heartbeat_s)
        self._checked_at = now
        self._seems_dead = {name: since for name, since in self._seems_dead.items() if now < since + self._ttl_s}
        if self.up and now - self.heard_at >= self.silent_s:
            self.up = False

    def next_timeout(self) -> float:
        """When a heartbeat or `check` is due."""
        return min(self.next_heartbeat, self.heard_at + self.silent_s) if self.up else self.next_heartbeat

    def members(self) -> list[m.Member]:
        """The registry without this engine and the dead ones."""
        return [member for name, member in self._registry.members.items()
                if name != self.member.incarnation and name not in self._dead]

    def prefills(self, greeted: Collection[str]) -> list[str]:
        """The registered prefill engines that fit, are in `greeted` and reach us: no other takes a job of ours."""
        return [member.incarnation for member in self._prefills if member.incarnation in greeted
                and member.incarnation not in self._seems_dead and self.member.incarnation not in member.unreached]

    def unable(self, scope: PromptScope) -> list[str]:
        """The registered prefill engines that fit, but for jobs of this scope."""
        return [member.incarnation for member in self._prefills if not scope.is_read_by(member.scopes)]

    def zones(self, greeted: Collection[str], avoid: Collection[str] = ()) -> dict[str, str]:
        """The zones of the prefill engines that `view` counts, by incarnation."""
        members = self._registry.members
        return {name: members[name].zone for name in self.prefills(greeted) if name not in avoid}

    def not_reaching_us(self) -> list[m.Member]:
        """The registered prefill engines that fit and say that this engine does not answer them."""
        return [member for member in self._prefills if self.member.incarnation in member.unreached]

    def refused(self, now: float, mismatch: str) -> None:
        """A peer did not fit when it sent a message to us."""
        self._refused, self._refused_at = mismatch, now

    def view(self, now: float, own_queued: int, greeted: Collection[str],
             avoid: Collection[str] = ()) -> QueueView:
        """For the policy. `greeted` are the prefill engines that have said hello to us and can hand over. The broker's
        queue length is up to a heartbeat old, our own part of it is not."""
        prefills = sum(name not in avoid for name in self.prefills(greeted))
        return QueueView(self.up, max(self.queue_length, own_queued), prefills, self.find_mismatch(now))

    def find_mismatch(self, now: float) -> str | None:
        """Why another engine does not fit: a registered one, or one that sent us a message lately."""
        return self.mismatch or (self._refused if now - self._refused_at < REFUSAL_KEPT_S else None)

    def _sort_members(self) -> None:
        """Find out which members fit."""
        ours = self.member.fingerprint
        self._prefills = []
        self.mismatch = None
        for member in self.members():
            difference = ours.first_difference(member.fingerprint)
            if difference is not None:
                self.mismatch = str(PeerMismatch(*difference))
            elif member.role.prefills and not member.draining:
                self._prefills.append(member)
