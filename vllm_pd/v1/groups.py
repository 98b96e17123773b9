# SPDX-License-Identifier: Apache-2.0
"""How V1 has grouped the layers of this engine, in the terms of `vllm_pd.protocol.rows`."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_pd.model.layers import layer_specs
from vllm_pd.protocol.rows import BlockRows

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


def block_rows(groups: Sequence[KVCacheGroupSpec]) -> BlockRows:
    """The groups that V1 has made, which `vllm_pd.model.layers.check_groups` has passed."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec
    first = [layer_specs(group.kv_cache_spec)[0] for group in groups]
    windows = tuple(spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0 for spec in first)
    return BlockRows(first[0].block_size, windows if len(windows) > 1 else ())
