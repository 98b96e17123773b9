# SPDX-License-Identifier: Apache-2.0
"""VLLM_USE_V1=0 while an engine with disaggregation is built and lives. Standard library only.

The variable is one for all engines of a process, and vLLM reads it for as long as an engine lives. It used to stay
behind: an engine without disaggregation that was built later, or in a child process, was a V0 engine, too.
"""
from __future__ import annotations

import os
import weakref

from vllm_pd.errors import ConfigError

VARIABLE = "VLLM_USE_V1"
_OURS = "00"  # which vLLM reads as 0, and which no user writes


class V0Selection:
    """The selection of one process. `select`, then `hold` for each engine; the last one's end takes it back, unless
    another engine is configured by then."""

    def __init__(self) -> None:
        self._engines = 0
        self._pending = False  # an engine is configured, and not built yet

    def select(self, connector: str) -> None:
        """The engine that is configured next is a V0 engine. Raises ConfigError where the user wants V1."""
        value = os.environ.get(VARIABLE)
        if value not in (None, "", "0", _OURS):
            raise ConfigError(VARIABLE, value, f"unset it: {connector} runs in the V0 engine and selects it by itself")
        if value != "0":
            os.environ[VARIABLE] = _OURS
        self._pending = True

    def hold(self, engine: object) -> None:
        """Keep the selection until this engine is gone."""
        self._engines += 1
        self._pending = False
        weakref.finalize(engine, self._release)

    def drop(self) -> None:
        """An engine without disaggregation is configured: vLLM, or the user, decides. Also takes back what an engine
        that was never finished has left; nothing while an engine with disaggregation lives."""
        self._pending = False
        self._take_back()

    def _take_back(self) -> None:
        if not self._engines and os.environ.get(VARIABLE) == _OURS:
            del os.environ[VARIABLE]

    def _release(self) -> None:
        self._engines -= 1
        if not self._pending:
            self._take_back()


selection = V0Selection()
