# SPDX-License-Identifier: Apache-2.0
"""Which peers are dead, as a fact: by their processes, seen twice, or, where these can't be seen, by their lifelines.

Used by the control thread. Reads no clock and never blocks.
"""
from collections.abc import Callable, Collection, Mapping

from vllm_pd.core.messages import Member
from vllm_pd.liveness import process
from vllm_pd.liveness.lifeline import Prober
from vllm_pd.liveness.rules import GRACE_S, Pulse

LIVENESS_S = 0.25


class Vitals:
    """What the control thread does about the life of peers: `look` says who they are, `probe` keeps asking them."""

    def __init__(self) -> None:
        self._pulse = Pulse()
        self._prober = Prober()
        self._next_look = 0.0
        self._watching = False
        self._gone_since: dict[str, float] = {}

    def fileno(self) -> int:
        """What to poll for reading, besides `next_deadline`."""
        return self._prober.fileno()

    def heard(self, now: float, sender: str) -> None:
        """That engine has said something."""
        self._pulse.heard(now, sender)

    def hasten(self, now: float) -> None:
        """A peer has been introduced: `look` at once, so that it is reached once before it can die."""
        self._next_look = now

    def is_due(self, now: float) -> bool:
        """Whether it is time to `look`."""
        return now >= self._next_look

    def look(self, now: float, peers: Mapping[str, Member], busy: set[str]) -> None:
        """`peers` have been introduced to us and are not known to be dead; the death of a `busy` one would end
        something of ours."""
        self._next_look = now + LIVENESS_S
        self._watching = bool(busy)
        self._pulse.watch(now, {name: peer.lifeline for name, peer in peers.items()
                                if peer.lifeline and not process.is_visible(peer)}, busy)

    def buried(self, now: float, gone: Collection[str]) -> list[str]:
        """`look` has found the processes of these gone. Those for which a look `GRACE_S` ago had found the same: by now
        what they had on the way has come, and has been copied."""
        self._gone_since = {name: self._gone_since.get(name, now) for name in gone}
        buried = [name for name, since in self._gone_since.items() if now >= since + GRACE_S]
        for name in buried:
            del self._gone_since[name]
        self._next_look = min([self._next_look, *(since + GRACE_S for since in self._gone_since.values())])
        return buried

    def probe(self, now: float, is_connected: Callable[[str], bool]) -> list[str]:
        """Go on with the probes. Those whose lifelines have been found gone, and which are not connected to us."""
        dead = [name for name, answer in self._prober.turn(now)
                if self._pulse.answered(now, name, answer) and not is_connected(name)]
        for name, address in self._pulse.due(now, self._prober.room()):
            self._prober.begin(now, name, address)
        return dead

    def next_deadline(self) -> float | None:
        """When `look` or `probe` is next due; None where nothing is watched."""
        due = [self._next_look if self._watching or self._gone_since else None, self._prober.next_deadline(),
               self._pulse.next_deadline() if self._prober.room() else None]
        return min((when for when in due if when is not None), default=None)

    def close(self) -> None:
        """Give the probes up."""
        self._prober.close()
