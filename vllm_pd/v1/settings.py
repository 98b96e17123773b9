# SPDX-License-Identifier: Apache-2.0
"""Our own settings of an engine, in a configuration that V1 reads too.

V1 must see `kv_role` kv_both: with kv_producer alone its async scheduler frees blocks that a step in flight still
writes. So the plugin moves the role that the user wrote, and where the front end and EngineCore meet, to
`kv_connector_extra_config` under `OWN_KEY`, once, where the configuration is made.
"""
from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_pd.errors import ConfigError
from vllm_pd.model.layers import asks_for_blocks
from vllm_pd.settings.store import DIGEST_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OWN_KEY = "vllm_pd"


class HandoverSettings(NamedTuple):
    """The user's `kv_role` and `kv_connector_extra_config`, and where the front end and the first rank meet."""
    kv_role: str
    extra: dict[str, Any]
    front: str


def read_settings(vllm_config: VllmConfig) -> HandoverSettings:
    """What the plugin left. Raises ConfigError where it did not run."""
    transfer = vllm_config.kv_transfer_config
    extra = dict(transfer.kv_connector_extra_config or {})
    own = extra.pop(OWN_KEY, None)
    if own is None:
        raise ConfigError("kv_connector", transfer.kv_connector, "the plugin did not prepare this engine: install "
                          "vllm-pd, do not exclude vllm_pd from VLLM_PLUGINS, and do not "
                          "set disable_hybrid_kv_cache_manager in Python or in a file: write the flag on the command "
                          "line, or leave it away")
    return HandoverSettings(own["kv_role"], extra, own["front"])


def name_front(engine_id: str) -> str:
    """Where the front end and the first rank of this engine meet. The processes of a front end make a configuration
    each; the KV transfer's `engine_id` is the same in all of them, and in no other engine."""
    from vllm import envs
    return f"ipc://{envs.VLLM_RPC_BASE_PATH}/vllm-pd-{hashlib.sha256(engine_id.encode()).hexdigest()[:32]}"


def front_of_rank(front: str, rank: int) -> str:
    """The same for a data-parallel rank."""
    return f"{front}-{rank}" if rank else front


def ranks_of_server(vllm_config: VllmConfig) -> range:
    """The data-parallel ranks of a server that are on its host."""
    parallel = vllm_config.parallel_config
    first = parallel.data_parallel_rank if parallel.local_engines_only else 0
    return range(first, first + parallel.data_parallel_size_local)


def fronts_of_server(vllm_config: VllmConfig) -> list[str]:
    """`front_of_rank` of these."""
    front = read_settings(vllm_config).front
    return [front_of_rank(front, rank) for rank in ranks_of_server(vllm_config)]


def is_ours(vllm_config: VllmConfig) -> bool:
    """Whether the plugin prepared this engine."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and OWN_KEY in (transfer.kv_connector_extra_config or {})


def given_weights(vllm_config: VllmConfig) -> str | None:
    """The setting `weights_digest` of either of our connectors; None without one."""
    transfer = vllm_config.kv_transfer_config
    return None if transfer is None else (transfer.kv_connector_extra_config or {}).get(DIGEST_KEY)


def served_name(vllm_config: VllmConfig) -> str:
    """The model's name on /metrics."""
    name = vllm_config.model_config.served_model_name
    return name if isinstance(name, str) else name[0]


def asked_layout(vllm_config: VllmConfig) -> str | None:
    """The order of the cache's axes that our connectors ask for: heads before tokens, in which a range of heads is one
    run of a block (`vllm_pd.transfer.layout`). On CUDA blocks stand outermost, for there each descriptor is a copy of
    its own, and a block is one then instead of one for each layer (docs/gpu.md). vLLM takes another order where the
    attention backend has none of that name, or VLLM_KV_CACHE_LAYOUT says so. If tokens come first, a transfer between
    engines of different tensor-parallel sizes needs a descriptor for each token. With MLA there is one head."""
    if vllm_config.model_config.use_mla:
        return None
    return "BLHNC" if asks_for_blocks(vllm_config) else "LBHNC"
