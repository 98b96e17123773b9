# SPDX-License-Identifier: Apache-2.0
"""Which peers are dead, as a fact: by their processes, or, where those can't be seen, by their lifelines.

Used by the control thread. Reads no clock and never blocks.
"""
from collections.abc import Callable, Collection, Mapping

from vllm_pd.peer.liveness import process
from vllm_pd.peer.liveness.probe import TcpProbes
from vllm_pd.peer.liveness.rules import GRACE_S, LivenessRules
from vllm_pd.protocol.messages import Member

LIVENESS_S = 0.25


class LivenessMonitor:
    """Watches the peers of one engine. `watch` says who they are, `confirm_gone` and `poll_probes` return the dead."""

    def __init__(self) -> None:
        self.rules = LivenessRules()
        self._probes = TcpProbes()
        self._next_watch = 0.0
        self._watching = False
        self._gone_since: dict[str, float] = {}

    def fileno(self) -> int:
        """What to poll for reading, besides waiting for `next_timeout`."""
        return self._probes.fileno()

    def heard(self, now: float, incarnation: str) -> None:
        """A message of this engine has come."""
        self.rules.heard(now, incarnation)

    def watch_soon(self, now: float) -> None:
        """A peer has been introduced: call `watch` at once, so that the peer is reached once before it can die."""
        self._next_watch = now

    def is_due(self, now: float) -> bool:
        """Whether it is time to call `watch`."""
        return now >= self._next_watch

    def watch(self, now: float, peers: Mapping[str, Member], busy: set[str]) -> None:
        """`peers` have been introduced to us and are not known to be dead. The death of a `busy` one would end
        something of ours."""
        self._next_watch = now + LIVENESS_S
        self._watching = bool(busy)
        self.rules.watch(now, {name: peer.lifeline for name, peer in peers.items()
                                if peer.lifeline and not process.is_visible(peer)}, busy)

    def confirm_gone(self, now: float, gone: Collection[str]) -> list[str]:
        """`gone` are the engines whose processes could not be found just now. Returns those that could not be found
        `GRACE_S` ago either: by now what they had sent has arrived."""
        self._gone_since = {name: self._gone_since.get(name, now) for name in gone}
        dead = [name for name, since in self._gone_since.items() if now >= since + GRACE_S]
        for name in dead:
            del self._gone_since[name]
        self._next_watch = min([self._next_watch, *(since + GRACE_S for since in self._gone_since.values())])
        return dead

    def poll_probes(self, now: float, is_connected: Callable[[str], bool]) -> list[str]:
        """Go on with the probes. Returns the engines whose lifelines are gone and between which and us no connection is
        open."""
        dead = [name for name, answer in self._probes.poll(now)
                if self.rules.answered(now, name, answer) and not is_connected(name)]
        for name in dead:
            self.rules.reported(now, name)
        for name, address in self.rules.due(now, self._probes.count_free()):
            self._probes.start(now, name, address)
        return dead

    def next_timeout(self) -> float | None:
        """When `watch` or `poll_probes` is next due; None where nothing is watched."""
        due = [self._next_watch if self._watching or self._gone_since else None, self._probes.next_timeout(),
               self.rules.next_timeout() if self._probes.count_free() else None]
        return min((when for when in due if when is not None), default=None)

    def close(self) -> None:
        """Give the probes up."""
        self._probes.close()
