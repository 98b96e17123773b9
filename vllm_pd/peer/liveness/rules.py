# SPDX-License-Identifier: Apache-2.0
"""When to probe a peer on another host, or in another container, and which answers prove that it is dead. Pure.

A process id says nothing about a process of another kernel, or of another process-id namespace. What can be probed
there is its *lifeline*, a listening TCP socket that only the end of its process closes:

- its own greeting: it lives, and the address really leads to it;
- refused, by an address that has greeted us before, and the connections between it and us have ended too, whichever of
  the two had opened them: the socket is gone, and with it the process. (A gateway or a firewall that refuses in its
  place leaves those connections open.)
- the greeting of another engine: the same, and that engine has taken the port;
- anything else (unreachable, accepted but silent, other bytes): nothing is known. The connection to a stopped process
  is accepted by its kernel, and it sends nothing; it may go on later, so it is not dead.

A peer counts as dead when death is seen twice, `grace_s` apart. The grace also covers what the process had on its way
when it ended: a kernel closes the descriptors of a dying process one after the other, the lifeline's perhaps before the
network card's, and packets of a remote write may still be in the network for some milliseconds after that.
"""
from enum import Enum

SILENT_S = 0.4
IDLE_RETRY_S = 5.0
GRACE_S = 0.25

_NEVER = float("inf")


class ProbeAnswer(Enum):
    """The result of a probe."""
    GREETED = "greeted"
    OTHER = "other"  # another engine greets there
    REFUSED = "refused"
    NOTHING = "nothing"


class _WatchedPeer:
    """One watched peer. Times are in the caller's clock."""

    def __init__(self, address: str, now: float):
        self.address = address
        self.busy = False
        self.reached = False  # its own greeting has come from that address
        self.probing = False
        self.next_probe = now
        self.gone_since: float | None = None


class LivenessRules:
    """The peers that are watched by their lifelines. A *busy* one, whose death would end something of ours, is probed
    when it has been silent for `silent_s`; any other only until it has been reached once."""

    def __init__(self, silent_s: float = SILENT_S, grace_s: float = GRACE_S):
        self.silent_s = silent_s
        self.grace_s = grace_s
        self._peers: dict[str, _WatchedPeer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def watch(self, now: float, lifelines: dict[str, str], busy: set[str]) -> None:
        """`lifelines` are the addresses of all peers by incarnation, `busy` the names of busy ones. Others are
        forgotten."""
        for incarnation in self._peers.keys() - lifelines.keys():
            del self._peers[incarnation]
        for incarnation, address in lifelines.items():
            peer = self._peers.get(incarnation)
            if peer is None or peer.address != address:
                peer = self._peers[incarnation] = _WatchedPeer(address, now)
            if peer.busy is not (incarnation in busy):
                peer.busy = incarnation in busy
                if not peer.probing:
                    peer.next_probe = min(peer.next_probe, now + self.silent_s) if peer.busy else self._later(peer, now)

    def heard(self, now: float, incarnation: str) -> None:
        """A message of it has come to one of our other sockets."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.gone_since = None
            if not peer.probing and peer.reached:
                peer.next_probe = self._later(peer, now)

    def due(self, now: float, most: int) -> list[tuple[str, str]]:
        """(incarnation, address) of at most `most` peers to probe now, the longest due first. Call `answered` for
        each."""
        due = sorted((peer.next_probe, name) for name, peer in self._peers.items()
                     if not peer.probing and peer.next_probe <= now)[:max(0, most)]
        for _, name in due:
            self._peers[name].probing = True
        return [(name, self._peers[name].address) for _, name in due]

    def next_timeout(self) -> float | None:
        """When a probe is next due; None where none is."""
        due = min((peer.next_probe for peer in self._peers.values() if not peer.probing), default=_NEVER)
        return None if due == _NEVER else due

    def answered(self, now: float, incarnation: str, answer: ProbeAnswer) -> bool:
        """A probe has ended. Returns whether the peer is dead, as a fact."""
        peer = self._peers.get(incarnation)
        if peer is None:
            return False
        peer.probing = False
        if peer.reached and answer in (ProbeAnswer.REFUSED, ProbeAnswer.OTHER):
            if peer.gone_since is None:
                peer.gone_since = now
            peer.next_probe = now + self.grace_s
            return now - peer.gone_since >= self.grace_s
        peer.reached = peer.reached or answer is ProbeAnswer.GREETED
        peer.gone_since = None
        peer.next_probe = self._later(peer, now)
        return False

    def reported(self, now: float, incarnation: str) -> None:
        """Its death was reported. If it is watched all the same, it is looked at anew."""
        peer = self._peers[incarnation]
        peer.gone_since, peer.next_probe = None, self._later(peer, now)

    def _later(self, peer: _WatchedPeer, now: float) -> float:
        if peer.busy:
            return now + self.silent_s
        return _NEVER if peer.reached else now + IDLE_RETRY_S
