# SPDX-License-Identifier: Apache-2.0
"""The ranks of a V1 engine: the worker role of the connector, and how EngineCore attaches to it.

Every tensor-parallel rank has its own transport over its own cache, and a thread that carries transfers without an
engine step (`vllm_pd.transfer.rank`). Life of a rank:

1. `register_kv_caches` describes the cache, refuses one that can't be transferred, and opens a socket.
2. The executor carries the `RankHandshake` of each rank to EngineCore, where `attach_ranks` connects to the sockets and
   tells each rank the engine's incarnation. The rank makes its transport and answers with its metadata.
3. From then on requests go down and progress comes up over that socket, at any time. The lifeline's file goes down too.
4. `close` on either side ends the thread. A rank whose EngineCore is gone ends its process at once, because a peer
   reuses the blocks that we may write to only when all processes of the engine are gone.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from vllm_pd.core.messages import Member, Role
from vllm_pd.transfer.engine import EngineTransfer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """What a rank tells EngineCore when its cache is registered. Plain values: the executor pickles it."""
    rank: int
    pid: int
    start_time: int  # see vllm_pd.liveness.process
    address: bytes  # of the rank's socket
    engine: str  # Fingerprint.engine: what fills the blocks
    layout: str  # a value of vllm_pd.transfer.layout.Layout
    layers: int


class RankWorker:
    """The worker role of the connector. One in each worker process. All methods are for the worker's main thread."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        raise NotImplementedError

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the cache and open the socket. Raises ConfigError for a cache that can't be transferred."""
        raise NotImplementedError

    def handshake(self) -> RankHandshake:
        """For `get_handshake_metadata`. After `register_kv_caches`."""
        raise NotImplementedError

    def begin_step(self, brings_kv: bool) -> None:
        """To be called before the forward pass (`handle_preemptions`). `brings_kv`: this step is the first that may
        read what a transfer has written; its data is made visible to the device."""
        raise NotImplementedError

    def end_step(self, step: int) -> None:
        """To be called after the forward pass of step `step` was launched, also without a forward pass
        (`get_transfer_results`). `step` counts the steps from 1: EngineCore puts it into the connector's metadata."""
        raise NotImplementedError

    def close(self) -> None:
        """For `shutdown`. End the thread and release everything. Idempotent."""
        raise NotImplementedError


def attach_ranks(vllm_config: VllmConfig, role: Role,
                 handshakes: Mapping[int, RankHandshake]) -> tuple[Member, bytes, EngineTransfer]:
    """Attach EngineCore to its ranks. `handshakes` by tensor-parallel rank, as `set_xfer_handshake_metadata` gets them.

    Returns the engine's registry entry (its address still empty), the metadata by which peers reach its memory, and the
    transfers of all ranks, which the caller owns: it must `start` and `close` them. Takes at most ATTACH_S. Raises
    ConfigError if the ranks' caches differ, ControlError if a rank does not answer.

    Use of the returned transfers, which differs from V0 only in that no step carries requests:

    - `start(wake, report_end)`: both are called in the transfer thread; `wake` after there is progress to take.
    - `execute(requests)`: at any time, in any thread, never blocks. A `Write` or `Read` names in `after_step` the last
      step that used its local blocks; EngineCore must have processed the output of that step. Each ends with exactly
      one `Finished`, unless a rank's process dies: then this engine dies too, by the executor's own watch.
    - `poll()`: look for notices. Any thread; never blocks. They come as progress.
    - `take_progress()`: the ends, notices and refusals since the last call.
    - `hold(descriptor)`: every rank holds the lifeline for as long as it can write to a peer's memory.
    - `close()`: returns False, because only the end of all processes proves that no more bytes will land.
    """
    raise NotImplementedError
