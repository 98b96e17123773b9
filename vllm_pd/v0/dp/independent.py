# SPDX-License-Identifier: Apache-2.0
"""A rank that needs no other rank for a forward pass: its model has no experts, or `dp_sync.lockstep` is false.

Such a rank is an engine of its own. Its workers know nothing of data parallelism, so no forward pass has a collective
over the ranks, no rank runs dummy passes, and each rank makes its utility calls at once and alone. Two things remain of
the group. One front end balances over all ranks. And when one rank dies, the others end, because a request must not
wait for ever for a rank on a machine that the front end does not watch. Ranks with front ends of their own share
nothing.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_pd.dp.utility import UtilityRequest
from vllm_pd.v0.dp.engine import EngineSync, settings_of
from vllm_pd.v0.dp.experts import any_experts


def lockstep(config: Any) -> bool:
    """Whether the ranks of a group must run equally many forward passes. `config`: the engine's VllmConfig. Raises
    ConfigError."""
    chosen = settings_of(config.additional_config).lockstep
    return any_experts(config) if chosen is None else chosen


class IndependentRank(EngineSync):
    """Replaces `EngineSync`: the same methods, but none of them waits for another rank."""

    lockstep = False
    may_step = True

    def join(self, config: Any) -> IndependentRank:
        """Join the group if one front end serves all ranks. Set the workers' data-parallel size to 1. Returns
        self. Raises GroupFailed, ConfigError."""
        self._member = None
        if self._engine.publish_dp_lb_stats:
            super().join(config)
        config.parallel_config.data_parallel_size = 1
        return self

    @property
    def messages(self) -> int:
        """See EngineSync."""
        return self._member.messages if self._member is not None else 0

    @property
    def due(self) -> bool:
        """Whether another rank has died."""
        return self._member is not None and self._member.due

    def hold(self, request: UtilityRequest) -> bool:
        """False: each call is made at once, because these ranks make no calls together."""
        return False

    def make_calls(self, make: Callable[[Any, UtilityRequest], None]) -> None:
        """Raise GroupFailed if another rank has died. There are no calls to make."""
        if self.due:
            self._member.before_step(False)

    def forward(self, run: Callable, *args: Any) -> Any:
        """Run `run(*args)`. Returns its result."""
        return run(*args)

    def keep_up(self, dummy: Callable[[], Any]) -> None:
        """Do nothing: no rank waits for a dummy pass."""

    def leave(self, signum: int) -> bool:
        """False: this engine may end at once."""
        if self._member is not None:
            self._member.expect_end()
        return False

    def close(self) -> None:
        """See EngineSync."""
        if self._member is not None:
            self._member.close()
