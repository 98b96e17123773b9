# SPDX-License-Identifier: Apache-2.0
"""How V1 has grouped the layers of this engine, in the terms of `vllm_pd.protocol.rows`."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_pd.model.drafter import keeps_kv
from vllm_pd.model.layers import is_mixed, layer_specs
from vllm_pd.protocol.rows import STATE, BlockRows

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.request import Request


def block_rows(groups: Sequence[KVCacheGroupSpec]) -> BlockRows:
    """The groups that V1 has made, which `vllm_pd.model.layers.check_groups` has passed."""
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
    first = [layer_specs(group.kv_cache_spec)[0] for group in groups]
    states = [spec.block_size for spec in first if isinstance(spec, MambaSpec)]
    windows = tuple(STATE if isinstance(spec, MambaSpec) else spec.sliding_window
                    if isinstance(spec, SlidingWindowSpec) else 0 for spec in first)
    if len(windows) == 1:
        return BlockRows(first[0].block_size)
    sizes = tuple(spec.block_size for spec in first)
    size = sizes[windows.index(0)]
    return BlockRows(size, windows, max(states, default=0), sizes if not states and set(sizes) != {size} else ())


def draft_blocks(groups: Sequence[KVCacheGroupSpec]) -> int:
    """How many blocks a request has, of all groups together, for the states after tokens that are drafted."""
    from vllm.v1.kv_cache_interface import MambaSpec
    return sum(spec.num_speculative_blocks for group in groups for spec in layer_specs(group.kv_cache_spec)[:1]
               if isinstance(spec, MambaSpec))


def needs_next_token(scheduler: Scheduler, rows: BlockRows) -> bool:
    """Whether a job is a prompt without its last token, and a drafter's KV of what is left depends on that one."""
    return bool(rows.own_tokens) and keeps_kv(scheduler.vllm_config)


def usable_hit(scheduler: Scheduler, rows: BlockRows, request: Request, cached_tokens: int) -> int:
    """How many of the `cached_tokens` a request uses if no peer computes the rest. V1 looks up with those whose KV is
    cached; the state after them may not be, and then it begins at an earlier one."""
    if not rows.state_tokens or not cached_tokens:
        return cached_tokens
    return longest_hit(scheduler, request)


def longest_hit(scheduler: Scheduler, request: Request) -> int:
    """How many tokens of a request V1 would find cached, in all groups."""
    return scheduler.kv_cache_manager.coordinator.find_longest_cache_hit(request.block_hashes,
                                                                         request.num_tokens - 1)[1]


def state_layers(groups: Sequence[KVCacheGroupSpec]) -> list[str]:
    """The names of the layers that have a recurrent state, and no KV."""
    from vllm.v1.kv_cache_interface import MambaSpec
    return [name for group in groups if isinstance(layer_specs(group.kv_cache_spec)[0], MambaSpec)
            for name in group.layer_names]


def index_layers(groups: Sequence[KVCacheGroupSpec]) -> list[str]:
    """The names of the layers that are an index beside another layer's KV. To be called in a worker: only there a
    group has the specs of all of its layers."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole, UniformTypeKVCacheSpecs
    return [name for group in groups if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
            for name, spec in group.kv_cache_spec.kv_cache_specs.items()
            if isinstance(spec, MLAAttentionSpec) and spec.cache_role is SparseCacheRole.INDEXER]


def mixed_groups(groups: Sequence[KVCacheGroupSpec]) -> dict[str, int]:
    """The number of each layer's group, by the layer's name, if layers of different shapes share blocks; else empty.
    To be called in a worker, as `index_layers`."""
    if not is_mixed(groups):
        return {}
    return {name: number for number, group in enumerate(groups) for name in group.layer_names}


def states_name(groups: Sequence[KVCacheGroupSpec]) -> str:
    """For `Fingerprint.states`: what a block of the groups with states holds, of one rank, and, as layers of different
    groups share memory by their places in these, a digest of the groups. "" without states. With drafts a convolution's
    part has room for so many more tokens, so engines that draft other numbers of tokens differ."""
    from vllm.v1.kv_cache_interface import MambaSpec
    kinds = {" ".join([spec.mamba_type.name, *(f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}"
                                               for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))])
             for group in groups for spec in layer_specs(group.kv_cache_spec) if isinstance(spec, MambaSpec)}
    drafts = {spec.num_speculative_blocks for group in groups for spec in layer_specs(group.kv_cache_spec)
              if isinstance(spec, MambaSpec) and spec.num_speculative_blocks}
    if not kinds:
        return ""
    names = hashlib.sha256("\n".join(" ".join(group.layer_names) for group in groups).encode()).hexdigest()[:8]
    each = "".join(f" for {count} drafts" for count in drafts)
    return f"{', '.join(sorted(kinds))}{each} in {len(groups)} groups {names}"
