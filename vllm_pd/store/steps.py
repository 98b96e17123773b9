# SPDX-License-Identifier: Apache-2.0
"""Which steps of a worker were computed whole, pure.

V1 asks a connector for its results at the end of each step, also while an exception leaves it, such as the SystemExit
that SIGTERM raises. So that call proves nothing. The reports of all attention layers do, that their part is computed.
With CUDA graphs there are none; there what V1 launches is whole unless an exception leaves the step, or it never ends.
"""
from __future__ import annotations

from collections.abc import Collection


class WholeSteps:
    """The steps of one worker, numbered from 1. After one that was not computed whole, or that never ended, none
    counts: a later one may have computed from what it left undone."""

    def __init__(self, layers: Collection[str]) -> None:
        """`layers`: the names of those that have a cache of their own and report; none where graphs run."""
        self._layers = frozenset(layers)
        self._step = 0
        self._computed: set[str] = set()  # layers of that step
        self._whole = 0  # the last step before which, and with which, all are whole

    def layer_computed(self, step: int, layer: str) -> None:
        """A layer has computed its part of a step, and its KV is in the cache."""
        if step != self._step:
            self._step, self._computed = step, set()
        self._computed.add(layer)

    def end(self, step: int, has_tokens: bool, raised: bool = False) -> bool:
        """A step has ended. Returns whether it and all before it were computed whole. `has_tokens`: whether it had
        anything to compute. `raised`: whether an exception leaves it."""
        reported = not self._layers or (self._step == step and self._computed >= self._layers)
        whole = not raised and (not has_tokens or reported)
        if whole and step == self._whole + 1:
            self._whole = step
        return self._whole == step
