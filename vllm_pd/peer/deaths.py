# SPDX-License-Identifier: Apache-2.0
"""What the control thread says of deaths, its own address included, and what follows. Each method holds the lock."""
import logging

import msgspec

from vllm_pd.peer.core import Session, locked
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.generations import is_elsewhere

logger = logging.getLogger("vllm.pd")


class WatchedPeers(msgspec.Struct, frozen=True):
    """Whose deaths matter. `known` are all other engines that are not known to be dead, `introduced` those of them that
    greeted us or answered us, `busy` the names of those whose death would end something of ours."""
    known: dict[str, m.Member]
    introduced: dict[str, m.Member]
    busy: set[str]


class DeathSession(Session):
    """Which engines are dead, as facts, and which seem so. `peer_dead` is the only way to an engine's death."""

    @locked
    def watched_peers(self) -> WatchedPeers:
        """The engines whose deaths matter."""
        introduced = {name: peer for name, peer in {**self._decode.peers, **self._prefill.peers()}.items()
                      if not self._cluster.is_dead(name)}
        listed = {member.incarnation: member for member in self._cluster.members()}
        busy = self._decode.busy_peers() | self._prefill.busy_peers() | self._parted
        return WatchedPeers(listed | introduced, introduced, busy)

    @locked
    def peer_dead(self, incarnation: str) -> None:
        """That process is gone, as a fact."""
        now = self._clock()
        self._cluster.dead(incarnation)
        self._core.failed_paths.forget(incarnation)
        self._do(self._decode.peer_dead(now, incarnation))
        self._do(self._prefill.peer_dead(now, incarnation))

    @locked
    def lifeline_gone(self, incarnation: str) -> None:
        """The lifeline of that engine refuses, and no connection between the two is left. On one machine that is its
        death. Between machines something in between may do so: then the engine is doubted, and not dead."""
        member = {**self._decode.peers, **self._prefill.peers()}.get(incarnation)
        if member is None:  # it was dropped since, and so has nothing of ours
            return
        if not is_elsewhere(self.member, member):
            self.peer_dead(incarnation)
            return
        self._seems_dead(member, "can't be reached: its lifeline refuses")

    @locked
    def operator_says_gone(self, incarnation: str) -> str:
        """An operator says that the host of this engine is off. It is taken for one that can't be reached, and not at
        the operator's word for dead: what it could still do here is ended by this engine's own act. Returns why not,
        empty where it is done."""
        member = {**self._decode.peers, **self._prefill.peers()}.get(incarnation)
        if member is None:
            return "" if self._cluster.is_dead(incarnation) else "this engine has nothing to do with it"
        if not is_elsewhere(self.member, member):
            return "it is on the machine of this engine, which sees for itself whether its processes exist"
        self._seems_dead(member, "is gone, says an operator")
        return ""

    @locked
    def disconnected(self, incarnation: str) -> None:
        """The connection that we had opened to that decode engine has ended."""
        self._prefill.disconnected(self._clock(), incarnation)

    def _seems_dead(self, member: m.Member, why: str) -> None:
        now, incarnation = self._clock(), member.incarnation
        if self._cluster.seems_dead(now, incarnation):
            logger.error("engine %s at %s, on another machine, %s. What it was to do is done without it", incarnation,
                         member.address, why)
        self._do(self._decode.peer_seems_dead(now, incarnation))
        self._do(self._prefill.peer_seems_dead(now, incarnation))

    @locked
    def address_is_here(self, address: str, is_here: bool) -> None:
        """Whether this machine has `address`, at which the others know this engine, at present."""
        lost = "" if is_here else address
        if lost != self.state.lost_address:
            self._core.set_lost_address(lost)
