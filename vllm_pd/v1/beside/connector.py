# SPDX-License-Identifier: Apache-2.0
"""`PDConnector` of an engine that has vLLM's own OffloadingConnector, too.

It owns that and passes V1's calls on to both, as upstream's MultiConnector would, but for these things. What was
offloaded is loaded before it is decided who computes the rest (`V1HandoverBeside`). The handshake that reaches
EngineCore is ours. And no load is reported in V1's own sets, so V1 knows requests that wait for one of ours only: an
aborted request is gone at once, and V1 ends at the id of one that it does not know. The report goes beside them
(`OffloadingReport`).
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from vllm_pd.v1.beside.config import check_kept_groups, offloading_config
from vllm_pd.v1.beside.handover import OffloadedTier, V1HandoverBeside
from vllm_pd.v1.binding import StepMetadata
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.metrics import HandoverPromMetrics, HandoverStats
from vllm_pd.v1.settings import served_name
from vllm_pd.v1.start import begin_handover

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_OFFLOADED = "offloaded"  # the name of a call among those of HandoverStats


class BesideStep(StepMetadata):
    """What the worker is to do with a step."""

    def __init__(self, step: StepMetadata, offloading: KVConnectorMetadata) -> None:
        super().__init__(step.step, step.brings_kv)
        self.offloading = offloading


@dataclass
class OffloadingReport(KVConnectorWorkerMetadata):
    """By request: on how many ranks its load has ended, of those that report with one step. `offloading`: what
    OffloadingConnector's worker reports."""
    ended: Counter[str] = field(default_factory=Counter)
    offloading: OffloadingWorkerMetadata | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadingReport:
        """This one and another rank's."""
        reports = [one.offloading for one in (self, other) if one.offloading is not None]
        return OffloadingReport(self.ended + other.ended,
                                functools.reduce(lambda one, more: one.aggregate(more), reports) if reports else None)


class BesidePromMetrics(HandoverPromMetrics):
    """Makes /metrics of the figures of both. `offloading`: what makes those of OffloadingConnector."""

    def __init__(self, offloading: KVConnectorPromMetrics, model_name: str, *arguments: Any) -> None:
        super().__init__(model_name, *arguments)
        self._offloading = offloading

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """What one engine has counted."""
        calls = []
        for call in transfer_stats_data.get("calls", ()):
            if call[0] == _OFFLOADED:
                self._offloading.observe(call[1], engine_idx)
            else:
                calls.append(call)
        super().observe({"calls": calls}, engine_idx)


class PDConnectorBeside(PDConnector):
    """Both, in either role."""

    binding: V1HandoverBeside | None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_kept_groups(kv_cache_config.kv_cache_groups)
        self._offloading = OffloadingConnector(offloading_config(vllm_config), role, kv_cache_config)
        self._ended: Counter[str] = Counter()  # loads, since the last report
        self._reset_at: int | None = None  # the step before which the cache was reset last
        self._steps = 0

    # The scheduler role.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """It knows the blocks of each request."""
        self._offloading.bind_kv_cache_manager(kv_cache_manager)

    def bind_engine(self, engine: EngineCoreProc) -> None:
        """The engine's loop is about to begin: join the peers."""
        if self.binding is None:
            config = engine.vllm_config
            tier = OffloadedTier(self._offloading, config.parallel_config.world_size, config.cache_config.block_size)
            self.binding = begin_handover(engine, self._handshakes, functools.partial(V1HandoverBeside, tier))

    def on_new_request(self, request: Request) -> None:
        """A request has come, perhaps a peer's job."""
        self._offloading.on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What goes to the worker with this step."""
        self._steps += 1
        step = BesideStep(super().build_connector_meta(scheduler_output),
                          self._offloading.build_connector_meta(scheduler_output))
        if self.binding is not None:
            self.binding.copies_begin(step.offloading.store_jobs)
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers reported: each gets its own report in V1's place for it."""
        report = connector_output.kv_connector_worker_meta
        if report is None:
            return
        connector_output.kv_connector_worker_meta = report.offloading
        try:
            self._offloading.update_connector_output(connector_output)
        finally:
            connector_output.kv_connector_worker_meta = report
        if report.offloading is not None:
            self.binding.copies_ended(report.offloading.completed_jobs)
        self.binding.loads_ended(report.ended, ())

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although there may be no request: the end of a copy or load is reported with one."""
        return self._offloading.has_pending_push_work() or (self.binding is not None and self.binding.is_loading)

    def request_finished_all_groups(self, request: Request,
                                    block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Its blocks are V1's to free at once."""
        self._offloading.request_finished_all_groups(request, block_ids)  # it never delays that, and has no parameters
        return super().request_finished_all_groups(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events of what was offloaded."""
        return self._offloading.take_events()

    def reset_cache(self) -> bool:
        """Cached KV is not to be used any more. OffloadingConnector can't be reset twice before a step."""
        if self._reset_at != self._steps:
            self._reset_at = self._steps
            self._offloading.reset_cache()
            if self.binding is not None:
                self.binding.cache_reset()
        return super().reset_cache()

    # The worker role.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches of all layers are allocated."""
        super().register_kv_caches(kv_caches)
        self._offloading.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step is about to run."""
        super().bind_connector_metadata(connector_metadata)
        self._offloading.bind_connector_metadata(connector_metadata.offloading)

    def clear_connector_metadata(self) -> None:
        """It is over."""
        super().clear_connector_metadata()
        self._offloading.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step is about to run."""
        super().handle_preemptions(kv_connector_metadata)
        self._offloading.handle_preemptions(kv_connector_metadata.offloading)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads begin, and the copies of the step before."""
        self._offloading.start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """All of the step was launched. Nothing is waited for."""
        super().wait_for_save()
        self._offloading.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The forward pass of the step was launched. Nothing is reported here."""
        self._ended.update(self._offloading.get_transfer_results(finished_req_ids).finished_recving)
        return super().get_transfer_results(finished_req_ids)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """With the step's output: which loads and copies have ended."""
        report = OffloadingReport(self._ended, self._offloading.build_connector_worker_meta())
        self._ended = Counter()
        return report if report.ended or report.offloading is not None else None

    # Figures.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The figures of both since the last call, in EngineCore."""
        ours, theirs = super().get_kv_connector_stats(), self._offloading.get_kv_connector_stats()
        if theirs is None:
            return ours
        offloaded = HandoverStats({"calls": [[_OFFLOADED, theirs.to_dict()]]})
        return offloaded if ours is None else ours.aggregate(offloaded)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any) -> KVConnectorPromMetrics:
        """What makes /metrics of both."""
        offloading = OffloadingConnector.build_prom_metrics(offloading_config(vllm_config), *arguments)
        return BesidePromMetrics(offloading, served_name(vllm_config), vllm_config, *arguments)

    # EngineCore, before the caches are allocated.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The order of the cache's axes that OffloadingConnector asks for. We can do with any that we ask for."""
        return OffloadingConnector.get_required_kvcache_layout(offloading_config(vllm_config))

    # Either role.

    def shutdown(self) -> None:
        """The engine, or the worker, ends."""
        super().shutdown()
        self._offloading.shutdown()
