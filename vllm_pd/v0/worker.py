# SPDX-License-Identifier: Apache-2.0
"""Giving the workers of a V0 engine a transport over their KV caches.

Every tensor-parallel rank has its own transport over its own cache. Rank 0 lives in the engine's process; the others
run `_attach_rank` by the executor's own call while the engine starts, before they enter their execution loop, and from
then on are reached by the requests that ride with a step. What they report comes over `vllm_pd.transfer.ranks.gather`.
In each process a thread carries the requests out (`vllm_pd.transfer.thread`).
"""
from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm_pd.peer.liveness.process import local_member, this_process
from vllm_pd.protocol.messages import Member, Process, Role
from vllm_pd.transfer.choice import TransportChoice
from vllm_pd.transfer.device import CudaDevice, HostDevice, OrderedTransfer
from vllm_pd.transfer.engine import EngineTransfer
from vllm_pd.transfer.layout import CacheDescription, describe
from vllm_pd.transfer.nixl import kept
from vllm_pd.transfer.plan import head_range
from vllm_pd.transfer.ranks.gather import GatheredTransfer, RankListener, connect
from vllm_pd.transfer.ranks.process import RankThread
from vllm_pd.transfer.ranks.transport import RankedTransport
from vllm_pd.transfer.thread import no_context
from vllm_pd.transfer.transport import RanksMetadata, rank_name
from vllm_pd.transfer.worker import TransferWorker
from vllm_pd.v0.checks import backend_name
from vllm_pd.v0.fingerprint import fingerprint

if TYPE_CHECKING:
    from vllm.engine.llm_engine import LLMEngine
    from vllm.worker.worker_base import WorkerWrapperBase


class _Report(NamedTuple):
    """What a rank reports when it is ready: plain values, for they go through the executor's own queue."""
    rank: int
    metadata: bytes
    layout: str
    pid: int
    start_time: int


def attach_transfer(engine: LLMEngine, role: Role,
                    transport: TransportChoice) -> tuple[Member, bytes, EngineTransfer]:
    """Give the caches of all workers a transport and let each carry out transfer requests.

    Returns the engine's registry entry (its address still empty), the metadata by which peers reach its memory, and the
    transfers of all ranks, which the caller starts and closes. Raises ConfigError for a cache that can't be
    transferred, ControlError where a worker does not connect.
    """
    member = local_member(role, fingerprint(engine.vllm_config, ""))
    executor = engine.model_executor
    listener = RankListener()
    connections: dict[int, socket.socket] = {}
    try:
        reports = sorted(_Report(*answer) for answer in executor.collective_rpc(
            _attach_rank, args=(member.incarnation, role is not Role.PREFILL, listener.address, transport)))
        ranks = {report.pid: report.rank for report in reports[1:]}
        for pid, connection in listener.accept(ranks).items():
            connections[ranks[pid]] = connection
    except BaseException:
        kept.release(member.incarnation)
        raise
    finally:
        listener.close()
    worker = executor.driver_worker.worker
    own: TransferWorker = worker.transfer.transfer
    transfer = EngineTransfer(own, GatheredTransfer(own, connections) if connections else None, _enter(worker))
    worker.transfer = OrderedTransfer(transfer, worker.transfer.device)
    member = msgspec.structs.replace(
        member,
        fingerprint=msgspec.structs.replace(member.fingerprint, layout=reports[0].layout,
                                            transport=transport.kind.value),
        processes=tuple(Process(report.pid, report.start_time) for report in reports))
    metadata = RanksMetadata([report.metadata for report in reports]).encode()
    return member, metadata, transfer


def _attach_rank(wrapper: WorkerWrapperBase, incarnation: str, receives: bool, address: bytes,
                 choice: TransportChoice) -> tuple:
    """Runs in every worker's process. The fields of its `_Report`."""
    import torch
    from vllm.platforms import current_platform

    worker = wrapper.worker
    parallel = worker.parallel_config
    rank, ranks = worker.rank, parallel.tensor_parallel_size
    kv_heads = worker.model_config.get_total_num_kv_heads()
    caches = list(worker.kv_cache[0])
    description = _describe(worker, caches, head_range(rank, ranks, kv_heads))
    transport = choice.make(rank_name(incarnation, rank), caches, description, receives)
    ranked = RankedTransport(transport, rank, ranks, kv_heads)
    device = CudaDevice(torch.cuda) if current_platform.device_type == "cuda" else HostDevice()
    transfer = TransferWorker(ranked, device.synchronize, rank=rank)
    worker.transfer = OrderedTransfer(
        transfer if rank == 0 else RankThread(transfer, connect(address), _enter(worker)), device)
    return _Report(rank, transport.metadata(), description.layout.value, *msgspec.structs.astuple(this_process()))


def _enter(worker: Any) -> Callable[[], None]:
    """What a thread calls before it uses the worker's transport: UCX goes by the device of the calling thread."""
    import torch
    from vllm.platforms import current_platform

    device = worker.device  # not the worker, which will own the thread
    return (lambda: torch.cuda.set_device(device)) if current_platform.device_type == "cuda" else no_context


def _describe(worker: Any, caches: list, heads: range) -> CacheDescription:
    """Where this worker's KV lies."""
    from vllm.platforms import current_platform

    platform = current_platform.device_type
    return describe(caches,
                    num_blocks=worker.cache_config.num_gpu_blocks,
                    block_size=worker.cache_config.block_size,
                    kv_heads=worker.model_config.get_num_kv_heads(worker.parallel_config),
                    head_size=worker.model_config.get_head_size(),
                    platform=platform,
                    backend=backend_name(platform, worker.model_runner.attn_backend),
                    first_head=heads.start)
