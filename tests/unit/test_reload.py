# SPDX-License-Identifier: Apache-2.0
"""An engine learns that its weights are loaded anew (B96)."""
from inspect import signature
from types import SimpleNamespace

from vllm_pd.handover.reload import WEIGHT_CALLS, watch_reload


def test_b96_the_engine_is_told_before_its_weights_are_loaded_anew_and_of_nothing_else():
    """B96: vLLM calls `collective_rpc` by its name and converts the arguments by its signature."""
    calls = []

    def rpc(method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None) -> list[int]:
        calls.append((method, timeout, args, kwargs))
        return [7]

    engine = SimpleNamespace(collective_rpc=rpc)
    watch_reload(engine, lambda: calls.append("begins"))
    for method in ("add_lora", *WEIGHT_CALLS, print):
        assert engine.collective_rpc(method, None, ("path", ), kwargs={"a": 1}) == [7]
    asked = [(method, None, ("path", ), {"a": 1}) for method in ("add_lora", *WEIGHT_CALLS, print)]
    assert calls == [asked[0], *(one for call in asked[1:-1] for one in ("begins", call)), asked[-1]]
    assert signature(engine.collective_rpc) == signature(rpc)
