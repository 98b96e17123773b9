# SPDX-License-Identifier: Apache-2.0
"""Giving the workers of a V0 engine a transport over their KV caches."""
from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from vllm_pd.control.process import local_member
from vllm_pd.core.messages import Member, Role
from vllm_pd.transfer.layout import describe
from vllm_pd.transfer.nixl import NixlTransport
from vllm_pd.transfer.worker import TransferWorker
from vllm_pd.v0.fingerprint import fingerprint

if TYPE_CHECKING:
    from vllm.engine.llm_engine import LLMEngine


def attach_transfer(engine: LLMEngine, role: Role) -> tuple[Member, bytes, TransferWorker]:
    """Register the one worker's caches with NIXL and let the worker carry out transfer requests.

    Returns the engine's registry entry (its address still empty), the metadata by which peers reach its memory, and
    the worker's transfer object, which the caller closes. Raises ConfigError for a cache that can't be transferred.
    """
    import torch
    from vllm.platforms import current_platform

    worker = engine.model_executor.driver_worker.worker
    caches = list(worker.kv_cache[0])
    platform = current_platform.device_type
    backend = _cpu_backend() if platform == "cpu" else worker.model_runner.attn_backend.get_name()
    model, parallel = engine.model_config, engine.parallel_config
    description = describe(caches,
                           num_blocks=engine.cache_config.num_gpu_blocks,
                           block_size=engine.cache_config.block_size,
                           kv_heads=model.get_num_kv_heads(parallel),
                           head_size=model.get_head_size(),
                           platform=platform,
                           backend=backend)
    member = local_member(role, fingerprint(engine.vllm_config, description.layout.value))
    # Its thread lets a peer's write end while this engine computes; the one who writes is better off without.
    transport = NixlTransport(member.incarnation, caches, description, progress_thread=role is not Role.PREFILL)
    transfer = TransferWorker(transport, torch.cuda.synchronize) if platform == "cuda" else TransferWorker(transport)
    worker.transfer = transfer
    return member, transport.metadata(), transfer


def _cpu_backend() -> str:
    return "IPEX" if importlib.util.find_spec("intel_extension_for_pytorch") is not None else "TORCH_SDPA"
