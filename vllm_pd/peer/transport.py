# SPDX-License-Identifier: Apache-2.0
"""What an engine says of its ranks' transfer agents (`protocol.generations`): its answers to `RenewTransport` and
`RetireTransport`.

Sans-IO; each method holds the lock.
"""
import logging

from vllm_pd.peer.core import Session, locked
from vllm_pd.protocol.names import generation_name

logger = logging.getLogger("vllm.pd")


class TransportSession(Session):
    """The calls about the ranks' agents."""

    @locked
    def renewed(self, name: str, metadata: bytes) -> None:
        """All ranks have an agent of this name, and peers reach them by this metadata."""
        core, ours = self._core, self._core.generations
        if name == generation_name(ours.incarnation, ours.current + 1):
            self._do(ours.renewed(self._clock(), metadata, core.halves))

    @locked
    def not_renewed(self, problem: str) -> None:
        """A rank can't make another agent. It is tried again."""
        logger.error("this engine can't make new transfer agents: %s; the blocks that a peer may write stay set aside, "
                     "and it tries again", problem)
        self._core.generations.not_renewed(self._clock(), problem)
        self._core.wake()

    @locked
    def retired(self, is_done: bool, problem: str = "") -> None:
        """The ranks have destroyed their older agents, and nothing of them lands any more; or one of them could not."""
        core = self._core
        if not is_done:
            logger.error("this engine can't destroy its former transfer agents: %s; it tries again", problem)
        self._do(core.generations.retired(self._clock(), is_done, core.halves))
        if is_done:
            logger.warning("nothing of this engine's former transfer agents lands or is read any more")
        core.wake()
