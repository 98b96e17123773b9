# SPDX-License-Identifier: Apache-2.0
"""An engine whose weights are loaded anew while it runs. Its peers compare fingerprints that are made at its start, so
it must work with none from then on: KV of old and new weights would be mixed, and stored under one name."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

WEIGHT_CALLS = ("reload_weights", "reset_weights", "load_model")  # methods of vLLM's worker; the second zeroes them


def watch_reload(engine: Any, begins: Callable[[], None]) -> None:
    """From now on call `begins` before this EngineCore has its workers load their weights anew, in the engine's thread.
    What else they may be asked to do (a function of the caller's) is not seen."""
    rpc = engine.collective_rpc

    @functools.wraps(rpc)
    def collective_rpc(method: Any, *arguments: Any, **keywords: Any) -> Any:
        if method in WEIGHT_CALLS:
            begins()
        return rpc(method, *arguments, **keywords)

    engine.collective_rpc = collective_rpc
