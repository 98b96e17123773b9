# SPDX-License-Identifier: Apache-2.0
"""The transfer agents of a simulated engine, by their names, and the writes that go through them."""
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pd.protocol import messages as m

if TYPE_CHECKING:
    from .engine import Engine

LONGEST_S = 0.5  # to make agents, or to destroy them


@dataclass(eq=False)
class Write:
    """One write under way: of whose blocks, to whose, under which name of theirs, and through which agent of ours. The
    last one of an attempt has the notice."""
    attempt: m.Attempt
    peer: str
    source: list[int]
    target: list[int]
    is_last: bool
    through: str
    is_elsewhere: bool


class TransferAgents:
    """Those of one engine. A write of a peer comes in under the name of one that is there, or not at all."""

    def __init__(self, engine: "Engine"):
        self.names = [engine.node.name]
        self.writes: list[Write] = []  # of ours, under way
        self._engine = engine
        self._kernel = engine.kernel

    @property
    def newest(self) -> str:
        """What begins now goes through it."""
        return self.names[-1]

    def renew(self, name: str) -> None:
        """Make another one, soon."""
        self._soon(self._made, name)

    def retire(self) -> None:
        """Destroy all but the newest, soon."""
        self._soon(self._destroyed)

    def _soon(self, call, *arguments) -> None:
        self._kernel.at(self._kernel.random.uniform(0.0, LONGEST_S), self._engine.node, "agents", call, *arguments)

    def _made(self, name: str) -> None:
        if self._kernel.happens(self._kernel.faults.agent_problems):
            self._engine.node.not_renewed("no memory")
            return
        self.names.append(name)
        self._engine.node.renewed(name)

    def _destroyed(self) -> None:
        if self._kernel.happens(self._kernel.faults.agent_problems):
            self._engine.node.retired(False)
            return
        self.destroy()
        for write in [write for write in self.writes if write.through not in self.names]:
            self._engine.write_ended(write, False)
        self._engine.node.retired(True)

    def destroy(self) -> None:
        """What is done about the agents themselves."""
        del self.names[:-1]
