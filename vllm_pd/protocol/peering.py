# SPDX-License-Identifier: Apache-2.0
"""The decode engines that a prefill engine knows.

Life of one: the registry or a job names it, and it is greeted (GREETED) until its reply makes it a peer (PEER), or
until one of the two refuses the other (REFUSED). One that is lost is LEAVING while a job of it may still write there,
and is dropped afterwards; if the registry or a job named it in the meantime, it is greeted again. A peer that our
transport could not add is UNADDED for a while, and is then dropped and greeted again. One that does not answer any more
keeps its state, and is greeted until a message of it comes. Meanwhile it is `unreached`: the registry says that no job
of it is to come here.

A D that has a new generation of transfer agents (`generations`) says so by itself, and is added under its new name. The
old name is dropped when nothing goes on under it.
"""
from collections.abc import Callable
from enum import Enum

import msgspec

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Action, AddPeer, Connect, Disconnect, DropPeer, ToDecode
from vllm_pd.protocol.generations import Generations, is_elsewhere
from vllm_pd.protocol.moments import NEVER
from vllm_pd.protocol.names import generation_name


class PeerState(Enum):
    """What a decode engine is to this engine."""
    GREETED = "greeted"
    PEER = "peer"
    REFUSED = "refused"
    LEAVING = "leaving"
    UNADDED = "unadded"


class PeeringLimits(msgspec.Struct, frozen=True):
    """Bounds of peers. One that has not answered a Hello for `answer_s` is unreached. One that our transport could not
    add is added again after `add_retry_s`, and then after twice as long each time; where there are several, after as
    many times as long, because each try may hold up all transfers for seconds. A try has ended after `add_s`."""
    hello_retry_s: float = 0.5
    answer_s: float = 3.0
    add_retry_s: float = 4.0
    add_retry_max_s: float = 30.0
    add_s: float = 6.0
    ttl_s: float = 5.0
    max_peers: int = 1024


class Peer:
    """One decode engine."""

    def __init__(self, incarnation: str, address: str):
        self.incarnation = incarnation
        self.address = address
        self.state = PeerState.GREETED
        self.member: m.Member | None = None
        self.is_elsewhere = False  # on another machine, as far as is known
        self.asked_at: float | None = None  # the first Hello that is not answered
        self.next_hello = 0.0  # of one that was asked; of one that is UNADDED: when it is greeted again
        self.last_heard = 0.0
        self.missing_since: float | None = None
        self.add_pause_s = 0.0  # the last one before it was, or is, added again
        self.tried_until = 0.0  # it is being added again, and that may fail as before
        self.problem = ""  # why our transport could not add it, at the last try
        self.wanted = False  # the registry or a job named it while it was leaving
        self.is_unreached = False  # it has not answered in time, and no message of it has come since
        self.generation = 0  # in which it can be written to
        self.oldest = 0  # in none before this one anything lands there, unless it is on this machine
        self.failed_in = (-1, -1)  # the newest generations, ours and its, between which a transfer has failed
        self.added: tuple[int, ...] = ()  # those that our transport was asked to add, the newest last

    @property
    def name(self) -> str:
        """What our transport calls it."""
        return generation_name(self.incarnation, self.generation)


class Peering:
    """The peers of the prefill engine `member`, which introduces itself in its present one of `generations`. It counts
    in the caller's `dropped`."""

    def __init__(self, member: m.Member, limits: PeeringLimits, dropped: m.Counters, generations: Generations):
        self.limits = limits
        self.dropped = dropped
        self.member = member
        self._generations = generations
        self._peers: dict[str, Peer] = {}
        self._met: dict[str, None] = {}  # every D that was a peer, the latest last

    @property
    def hello(self) -> m.Hello:
        """How this engine introduces itself."""
        return m.Hello(self.member, self._generations.metadata, self._generations.current)

    def find(self, incarnation: str) -> Peer | None:
        """The peer of this name; None where it is not known."""
        return self._peers.get(incarnation)

    def names(self) -> list[str]:
        """All that are known."""
        return list(self._peers)

    def generation_of(self, incarnation: str) -> int:
        """The generation in which this peer can be written to; 0 where it is not known."""
        peer = self._peers.get(incarnation)
        return 0 if peer is None else peer.generation

    def failed(self, incarnation: str, generation: int) -> None:
        """A transfer with this peer, in that generation of it, has failed, and its bytes may land."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.failed_in = max(peer.failed_in, (self._generations.current, generation))

    def has_failed(self, incarnation: str, generation: int) -> bool:
        """Whether one has, with this peer, which is known, and ours is the same still: none is to begin there."""
        ours, theirs = self._peers[incarnation].failed_in
        return self._generations.current <= ours and generation <= theirs

    def members(self) -> dict[str, m.Member]:
        """The members of those that have answered."""
        return {name: peer.member for name, peer in self._peers.items() if peer.member is not None}

    def unadded_members(self) -> dict[str, str]:
        """Those that our transport could not add, and why."""
        return {name: peer.problem for name, peer in self._peers.items() if peer.state is PeerState.UNADDED}

    def unreached(self, now: float) -> list[str]:
        """Those that do not answer, or that our transport could not add, and that are not known to be gone."""
        return [name for name, peer in self._peers.items() if peer.state is PeerState.UNADDED
                or ((peer.is_unreached or now < peer.tried_until)
                    and peer.state in (PeerState.GREETED, PeerState.PEER))]

    # Coming.

    def greet(self, now: float, incarnation: str, address: str,
              member: m.Member | None = None) -> tuple[Peer | None, list[Action]]:
        """The peer of this name, greeted if it is new; None where there are too many. `member`: its entry in the
        registry, where that is known."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.wanted = peer.state is PeerState.LEAVING
            return peer, []
        if len(self._peers) >= self.limits.max_peers:
            self.dropped["too_many_peers"] += 1
            return None, []
        peer = self._peers[incarnation] = Peer(incarnation, address)
        peer.last_heard = peer.missing_since = now  # until the registry lists it
        peer.is_elsewhere = member is not None and is_elsewhere(self.member, member)
        return peer, [Connect(incarnation, address, peer.is_elsewhere), self.introduce(now, peer)]

    def introduce(self, now: float, peer: Peer) -> Action:
        """The Hello to send to it."""
        self.ask(now, peer)
        if peer.state is not PeerState.UNADDED:
            peer.next_hello = now + self.limits.hello_retry_s
        return ToDecode(peer.incarnation, self.hello)

    def introduce_again(self, now: float) -> list[Action]:
        """The Hellos for those that can read here, which are to know our new generation."""
        return [self.introduce(now, peer) for peer in self._peers.values()
                if peer.state in (PeerState.PEER, PeerState.UNADDED)]

    def ask(self, now: float, peer: Peer) -> None:
        """From now on it gets Hellos until a message of it comes."""
        if peer.asked_at is None:
            peer.asked_at = now
            if peer.state is not PeerState.UNADDED:
                peer.next_hello = now

    def members_are(self, now: float, members: list[m.Member]) -> list[Action]:
        """The registry lists these. Fitting decode engines are greeted before they send their first job. One that was a
        peer is greeted whatever its role is now: it may still wait for an answer of ours, and can only ask on a
        connection that we open."""
        us = self.member
        actions: list[Action] = []
        listed = {member.incarnation for member in members}
        for member in members:
            if ((member.role.decodes or member.incarnation in self._met) and member.incarnation != us.incarnation
                    and us.fingerprint.first_difference(member.fingerprint) is None):
                actions += self.greet(now, member.incarnation, member.address, member)[1]
        for peer in self._peers.values():
            if peer.incarnation in listed:
                peer.missing_since = None
            elif peer.missing_since is None:
                peer.missing_since = now
        return actions

    def accept(self, peer: Peer, message: m.HelloReply) -> list[Action]:
        """It has answered, and fits: it is a peer, in this generation. Where it is known to be elsewhere only now, the
        connection is to be of that kind."""
        was_elsewhere, peer.is_elsewhere = peer.is_elsewhere, is_elsewhere(self.member, message.member)
        peer.member = message.member
        peer.state = PeerState.PEER
        peer.generation = message.generation
        peer.added += (message.generation, )
        self._met.pop(peer.incarnation, None)
        self._met[peer.incarnation] = None
        if len(self._met) > self.limits.max_peers:
            del self._met[next(iter(self._met))]
        actions: list[Action] = [AddPeer(peer.name, message.transfer_metadata)]
        if peer.is_elsewhere and not was_elsewhere:
            actions.append(Connect(peer.incarnation, peer.address, True))
        return actions

    def unadded(self, now: float, peer: Peer, reason: str) -> None:
        """Our transport could not add this peer."""
        peer.state, peer.problem = PeerState.UNADDED, reason
        peer.add_pause_s = min(self.limits.add_retry_max_s, 2 * peer.add_pause_s or self.limits.add_retry_s)
        peer.next_hello = now + peer.add_pause_s * len(self.unadded_members())

    def written(self, incarnation: str) -> None:
        """A write there went well."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.add_pause_s = peer.tried_until = 0.0

    def not_answered(self, now: float, incarnation: str) -> None:
        """This peer has not answered in time. Until `heard` it gets Hellos, and no job of it may wait here."""
        peer = self._peers.get(incarnation)
        if peer is not None and peer.state is not PeerState.REFUSED:
            peer.is_unreached = True
            self.ask(now, peer)

    def heard(self, now: float, peer: Peer) -> None:
        """A message of it has come."""
        peer.last_heard = now
        peer.asked_at, peer.is_unreached = None, False

    # Going.

    def refuse(self, peer: Peer) -> list[Action]:
        """The two don't fit. It is remembered, so that it is not greeted again."""
        peer.state = PeerState.REFUSED
        return [Disconnect(peer.incarnation)]

    def lose(self, peer: Peer) -> list[Action]:
        """It is gone. One that was a peer, also one that is greeted again, stays until `drop_if_leaving`: it may read
        what is held here."""
        if peer.member is not None and peer.state is not PeerState.REFUSED:
            peer.state, peer.wanted = PeerState.LEAVING, False
            return []
        del self._peers[peer.incarnation]
        return [Disconnect(peer.incarnation)]

    def drop_if_leaving(self, now: float, incarnation: str) -> list[Action]:
        """No job of it can write any more: drop it, if it is leaving. One that was named since is greeted again: it may
        still wait for our answer about what was stopped."""
        peer = self._peers.get(incarnation)
        if peer is None or peer.state is not PeerState.LEAVING:
            return []
        del self._peers[incarnation]
        actions = [*self._drop_added(peer), Disconnect(incarnation)]
        if peer.wanted:
            actions += self.greet(now, incarnation, peer.address)[1]
            self._peers[incarnation].missing_since = peer.missing_since
        return actions

    def drop_older(self, incarnation: str, is_in_use: Callable[[int], bool]) -> list[Action]:
        """Drop its older generations, but those in use."""
        peer = self._peers.get(incarnation)
        gone = [] if peer is None else [one for one in peer.added[:-1] if not is_in_use(one)]
        if gone:
            peer.added = tuple(one for one in peer.added if one not in gone)
        return [DropPeer(generation_name(incarnation, one)) for one in gone]

    def _drop_added(self, peer: Peer) -> list[Action]:
        names, peer.added = [generation_name(peer.incarnation, one) for one in peer.added], ()
        return [DropPeer(name) for name in names]

    # Time.

    def due(self, now: float) -> list[Peer]:
        """Those that are lost, where `is_silent`, or else unreached, or to be greeted again, with `greet_again`."""
        return [peer for peer in self._peers.values() if self._due(peer) <= now]

    def is_silent(self, now: float, peer: Peer) -> bool:
        """Whether for `ttl_s` neither the registry has listed it nor a message of it has come."""
        return now >= self._missed_at(peer)

    def greet_again(self, now: float, peer: Peer, is_in_use: bool) -> list[Action]:
        """Send Hello once more, and connect where that was not possible before. One that is UNADDED is dropped first,
        for some of our ranks may have added it: not while it `is_in_use`, by those."""
        if now >= self._unreached_at(peer):
            peer.is_unreached = True
        if now < peer.next_hello:
            return []
        if peer.state is not PeerState.UNADDED:
            return [Connect(peer.incarnation, peer.address, peer.is_elsewhere), self.introduce(now, peer)]
        if is_in_use:
            peer.next_hello = now + self.limits.hello_retry_s
            return []
        peer.state, peer.tried_until = PeerState.GREETED, now + self.limits.add_s
        return [*self._drop_added(peer), self.introduce(now, peer)]

    def next_timeout(self) -> float:
        """When a peer is next `due`; infinite where none is."""
        return min((self._due(peer) for peer in self._peers.values()), default=NEVER)

    def _due(self, peer: Peer) -> float:
        if peer.state is PeerState.LEAVING:
            return NEVER
        is_tried = peer.asked_at is not None or peer.state in (PeerState.GREETED, PeerState.UNADDED)
        return min(peer.next_hello if is_tried else NEVER, self._unreached_at(peer), self._missed_at(peer))

    def _unreached_at(self, peer: Peer) -> float:
        """When it becomes unreached; infinite where it is, or was not asked."""
        return NEVER if peer.is_unreached or peer.asked_at is None else peer.asked_at + self.limits.answer_s

    def _missed_at(self, peer: Peer) -> float:
        if peer.missing_since is None:
            return NEVER
        return max(peer.missing_since, peer.last_heard) + self.limits.ttl_s
