# SPDX-License-Identifier: Apache-2.0
"""What a V1 engine reports to its peers about its model and cache, so that KV never goes between two that differ.

The order of the axes says where the run of a head is, not what is inside: that is up to the attention kernels of the
release. On the CPU it depends on the instruction set as well. So all of these are in `Fingerprint.engine`.
"""
from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from vllm_pd.model.drafter import drafter_digest, drafter_layers
from vllm_pd.model.fingerprint import model_digest
from vllm_pd.protocol.messages import PROTOCOL, Fingerprint
from vllm_pd.protocol.rows import BlockRows
from vllm_pd.transfer.layout import CacheDescription, Layout
from vllm_pd.v1.settings import given_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CacheShape(NamedTuple):
    """What of a CacheDescription is in a fingerprint, for a cache that is not there."""
    dtype: str
    block_size: int
    layers: int
    layout: Layout


def fingerprint(config: VllmConfig, cache: CacheDescription | CacheShape, engine: str, rows: BlockRows | None = None,
                states: str = "", kv_dtype: str = "") -> Fingerprint:
    """The engine's fingerprint, `layers` being those of the rank whose cache and `engine_name` these are, `rows` its
    groups, None: one, `states` what their blocks hold that go whole. Where layers of several groups share memory they
    count once. `kv_dtype`: the type of the cache, if the model's layers have chosen another than the configuration
    says."""
    model, parallel = config.model_config, config.parallel_config
    kv_dtype = kv_dtype or config.cache_config.cache_dtype
    rows = rows or BlockRows(cache.block_size)
    return Fingerprint(
        protocol=PROTOCOL,
        model=" with ".join(filter(None, (model_digest(config, given_weights(config)), drafter_digest(config)))),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=cache.dtype if kv_dtype == "auto" else kv_dtype,
        block_size=rows.block_size,
        layers=cache.layers,
        kv_heads=total_kv_heads(config),
        head_size=model.get_head_size(),
        layout=cache.layout.value,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        engine=engine,
        windows=rows.windows,
        states=states,
        sizes=rows.sizes)


def total_kv_heads(config: VllmConfig) -> int:
    """The KV heads in the caches of all ranks together. A model with MLA has one, which every rank holds."""
    return 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()


def token_bytes(config: VllmConfig, kv_layers: int | None = None) -> int:
    """The KV of one token, over all layers and ranks, in bytes: of so many layers, or of all of the model's. A
    drafter's layers count, too, an index beside the KV does not."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    model, kv_dtype = config.model_config, config.cache_config.cache_dtype
    dtype = model.dtype if kv_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kv_dtype]
    elements = total_kv_heads(config) * model.get_head_size() * (1 if model.use_mla else 2)
    layers = model.get_total_num_hidden_layers() if kv_layers is None else kv_layers
    return (layers + drafter_layers(config)) * elements * dtype.itemsize


def engine_name(config: VllmConfig, layers: Collection[str]) -> str:
    """For `Fingerprint.engine`: release and attention backend of these layers. To be called in a worker, after the
    model was loaded."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.platforms import current_platform

    release = ".".join(vllm.__version__.split(".")[:2])
    backends = sorted(backend.get_name() for backend in get_current_attn_backends(config, list(layers)))
    return " ".join(["vllm", release, *backends, *([_instruction_set(config)] if current_platform.is_cpu() else [])])


def index_type() -> str:
    """In which type this platform keeps the keys of an index, whatever that of the KV is."""
    from vllm.platforms import current_platform

    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def _instruction_set(config: VllmConfig) -> str:
    """By which instructions the CPU backend chooses the order inside a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache = config.cache_config
    return _get_attn_isa(config.model_config.dtype, cache.block_size, config.model_config.get_head_size(),
                         cache.cache_dtype)
