# SPDX-License-Identifier: Apache-2.0
"""A rank that needs no other rank for a forward pass: its model has no experts, or `dp_sync.lockstep` is false.

Such a rank is an engine of its own. Its workers know of no data parallelism, so no forward pass has a collective over
the ranks, nobody runs dummy passes, and each rank makes its utility calls at once and alone. What is left of the group
is the front end that balances over all ranks, and that the death of one ends the others: a request must not wait for
ever for a rank on a machine that the front end does not watch. Ranks with front ends of their own share nothing.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_pd.dp.engine import EngineSync, settings_of
from vllm_pd.dp.experts import any_experts
from vllm_pd.dp.utility import Request


def lockstep(config: Any) -> bool:
    """Whether the ranks of a group must run equally many forward passes. `config`: the engine's VllmConfig. Raises
    ConfigError."""
    chosen = settings_of(config.additional_config).lockstep
    return any_experts(config) if chosen is None else chosen


class IndependentRank(EngineSync):
    """In the place of `EngineSync`: the same calls, none of which waits for another rank."""

    lockstep = False
    may_step = True

    def join(self, config: Any) -> IndependentRank:
        """Meet the other ranks if one front end has them all. From then on the workers' group is of one rank."""
        self._member = None
        if self._engine.publish_dp_lb_stats:
            super().join(config)
        config.parallel_config.data_parallel_size = 1
        return self

    @property
    def messages(self) -> int:
        return self._member.messages if self._member is not None else 0

    @property
    def due(self) -> bool:
        """Whether another rank is known to be dead."""
        return self._member is not None and self._member.due

    def hold(self, request: Request) -> bool:
        return False

    def make_calls(self, make: Callable[[Any, Request], None]) -> None:
        """Raises GroupFailed if another rank is dead."""
        if self.due:
            self._member.before_step(False)

    def forward(self, run: Callable, *args: Any) -> Any:
        return run(*args)

    def keep_up(self, dummy: Callable[[], Any]) -> None:
        """There is nobody to keep up with."""

    def leave(self, signum: int) -> bool:
        if self._member is not None:
            self._member.ends()
        return False

    def close(self) -> None:
        if self._member is not None:
            self._member.close()
