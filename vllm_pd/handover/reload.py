# SPDX-License-Identifier: Apache-2.0
"""An engine of V1 whose weights are replaced while it runs. Its peers compare fingerprints that are made at its start,
so it must work with none from then on: KV of old and new weights would be mixed, and stored under one name."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Methods of vLLM's worker. The second sets them to zero; the last one calls any method of another object.
WEIGHT_CALLS = ("reload_weights", "reset_weights", "load_model", "elastic_ep_execute")


def watch_reload(engine: Any, begins: Callable[[], None]) -> None:
    """From now on call `begins` before this EngineCore has its workers replace their weights, in the engine's thread.
    If it raises, they are not replaced. It does not see other functions that change weights."""
    rpc = engine.collective_rpc

    @functools.wraps(rpc)
    def collective_rpc(method: Any, *arguments: Any, **keywords: Any) -> Any:
        if method in WEIGHT_CALLS:
            begins()
        return rpc(method, *arguments, **keywords)

    engine.collective_rpc = collective_rpc
