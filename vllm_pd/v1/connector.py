# SPDX-License-Identifier: Apache-2.0
"""`PDConnector`: what `kv_connector` names, in its two roles. It only passes on.

Scheduler role, in EngineCore: until the engine's loop begins every request stays local; `bind_engine` then builds the
`V1Handover`. Worker role, in each worker: `vllm_pd.v1.worker.RankWorker`. Nothing goes between the two with a
step but its number and whether KV has come; no load, no failure and no end is ever reported in V1's sets of ids. With
the store, what to put and to load goes with a step, too, and which loads have ended with its output
(`vllm_pd.v1.store.with_peers`).
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_pd.model.layers import check_groups
from vllm_pd.v1.binding import StepMetadata, V1Handover
from vllm_pd.v1.groups import index_layers, mixed_groups, state_layers
from vllm_pd.v1.metrics import HandoverPromMetrics, HandoverStats
from vllm_pd.v1.settings import asked_layout, served_name
from vllm_pd.v1.start import begin_handover

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from vllm_pd.v1.worker import RankHandshake, RankWorker


class PDConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles. With `SupportsHMA`, so V1 may keep layers with a sliding window or a recurrent state in groups of
    blocks of their own."""

    _cache_hit_source = CacheHitSource.P2P  # the label of V1's figures
    supports_divergent_local_hybrid_hits = True  # a hit may be of KV alone: the state comes with what a peer computes

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        check_groups(kv_cache_config.kv_cache_groups, layout.is_block_outermost)
        self.binding: V1Handover | None = None
        self._handshakes: dict[tuple[int, int], RankHandshake] = {}
        self._rank: RankWorker | None = None
        if role is KVConnectorRole.WORKER:
            from vllm_pd.v1.worker import RankWorker
            groups = kv_cache_config.kv_cache_groups
            self._rank = RankWorker(vllm_config, state_layers(groups), index_layers(groups),
                                    mixed_groups(groups) if layout.is_block_outermost else {})

    # The scheduler role.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What each rank said of itself, by pipeline stage and tensor-parallel rank."""
        self._handshakes = metadata

    def bind_engine(self, engine: EngineCoreProc) -> None:
        """The engine's loop is about to begin: join the peers."""
        if self.binding is None:
            self.binding = begin_handover(engine, self._handshakes)

    def prepared(self, request: Request) -> None:
        """A client's request was read, in the thread that does that. A look at its media takes its time; what is wrong
        with them is found when they are asked for."""
        if request.mm_features and self.binding is not None:
            self.binding.media.note(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that come from a peer, True); (0, False): compute it here; (None, False): ask with the next step."""
        tokens = self.binding.match(request, num_computed_tokens) if self.binding is not None else 0
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: V1 must not zero blocks that a peer writes."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has blocks."""
        if self.binding is not None:
            self.binding.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What goes to the workers with this step."""
        return self.binding.step_metadata() if self.binding is not None else StepMetadata(0, False)

    def request_finished_all_groups(self, request: Request,
                                    block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Its blocks, those of each group, are V1's to free at once: what a transfer touches has
        our reference."""
        return False, self.binding.finished(request, block_ids) if self.binding is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Our figures since the last call."""
        return self.binding.take_stats() if self.binding is not None else None

    def reset_cache(self) -> bool:
        """There is nothing cached here."""
        return True

    # The worker role.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches of all layers are allocated."""
        self._rank.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """For `set_xfer_handshake_metadata`."""
        return self._rank.handshake() if self._rank is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step is about to run."""
        self._rank.begin_step(kv_connector_metadata.brings_kv)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The forward pass of the step was launched. Nothing is reported."""
        self._rank.end_forward(self._get_connector_metadata().step)
        return KVConnectorTransferResults()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: transfers need no step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all its KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: KV is sent when its prompt is computed."""

    def wait_for_save(self) -> None:
        """All of the step was launched, a drafter's forward passes too. Nothing is waited for."""
        self._rank.end_drafts(self._get_connector_metadata().step)

    # The front end.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """What `get_kv_connector_stats` gave, from its data."""
        return HandoverStats(data or {"calls": []})

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, metric_types: dict, labelnames: list[str],
                           per_engine_labelvalues: dict[int, list[object]]) -> KVConnectorPromMetrics:
        """What makes /metrics of those."""
        return HandoverPromMetrics(served_name(vllm_config), vllm_config, metric_types, labelnames,
                                   per_engine_labelvalues)

    # EngineCore, before the caches are allocated.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The order of the cache's axes that we ask for."""
        return asked_layout(vllm_config)

    # Either role.

    def shutdown(self) -> None:
        """The engine, or the worker, ends."""
        if self.binding is not None:
            self.binding.close()
        if self._rank is not None:
            self._rank.close()
