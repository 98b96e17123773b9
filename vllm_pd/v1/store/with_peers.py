# SPDX-License-Identifier: Apache-2.0
"""`PDConnector` of an engine that uses the store, too (the key `store`).

It owns a `PDStoreConnector` and passes V1's calls on to both, as upstream's MultiConnector would, but for three things.
What the store has is loaded before it is decided who computes the rest (`V1HandoverWithStore`). The handshakes of both
reach EngineCore. And no load is reported in V1's own sets: an aborted request is gone at once, and V1 ends at the id of
one that it does not know. The report goes beside them (`LoadReport`).
"""
from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from vllm_pd.settings.store import DIGEST_KEY, FAR_KEYS
from vllm_pd.v1.binding import StepMetadata
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.metrics import HandoverPromMetrics, HandoverStats
from vllm_pd.v1.settings import given_weights, served_name
from vllm_pd.v1.start import begin_handover
from vllm_pd.v1.store.connector import PDStoreConnector, StoreHandshake, StoreReport, StoreStep
from vllm_pd.v1.store.handover import V1HandoverWithStore
from vllm_pd.v1.store.stats import StorePromMetrics

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_pd.v1.worker import RankHandshake

_STORE_COUNTS = "store"  # the name of a call among those of HandoverStats


@dataclass(frozen=True)
class PairedHandshake(KVConnectorHandshakeMetadata):
    """What the worker tells EngineCore."""
    rank: RankHandshake
    store: StoreHandshake


class PairedStep(StepMetadata):
    """What the worker is to do with a step."""

    def __init__(self, step: StepMetadata, store: StoreStep) -> None:
        super().__init__(step.step, step.brings_kv)
        self.store = store


@dataclass
class LoadReport(KVConnectorWorkerMetadata):
    """By request: on how many ranks its load has ended, of those that report with one step. And those of them whose
    load failed on any. `store`: what is reported without peers, too."""
    ended: Counter[str]
    failed: set[str]
    store: StoreReport = field(default_factory=StoreReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LoadReport:
        """This one and another rank's."""
        return LoadReport(self.ended + other.ended, self.failed | other.failed, self.store.aggregate(other.store))


class PairedPromMetrics(HandoverPromMetrics):
    """Makes /metrics of the figures of both."""

    def __init__(self, model_name: str, *arguments: Any) -> None:
        super().__init__(model_name, *arguments)
        self._store = StorePromMetrics(model_name, *arguments)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """What one engine has counted."""
        calls = []
        for call in transfer_stats_data.get("calls", ()):
            if call[0] == _STORE_COUNTS:
                self._store.observe(call[1], engine_idx)
            else:
                calls.append(call)
        super().observe({"calls": calls}, engine_idx)


def store_config(config: VllmConfig) -> VllmConfig:
    """The configuration of an engine with both, as it is for `PDStoreConnector`."""
    transfer, own = config.kv_transfer_config, copy.copy(config)
    settings, digest = transfer.kv_connector_extra_config, given_weights(config)
    store = dict(settings["store"])
    if FAR_KEYS & store.keys() and "keys" in settings:
        store.setdefault("keys", settings["keys"])
    if digest is not None:
        store[DIGEST_KEY] = digest
    own.kv_transfer_config = dataclasses.replace(
        transfer, kv_connector=PDStoreConnector.__name__, kv_connector_module_path=None,
        kv_connector_extra_config=store)
    return own


class PDConnectorWithStore(PDConnector):
    """Both, in either role."""

    binding: V1HandoverWithStore | None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store = PDStoreConnector(store_config(vllm_config), role, kv_cache_config)
        self._store.owner = self
        self._report: LoadReport | None = None

    # The scheduler role.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], PairedHandshake]) -> None:
        """What each rank said of itself."""
        super().set_xfer_handshake_metadata_pp_aware({rank: theirs.rank for rank, theirs in metadata.items()})
        self._store.set_xfer_handshake_metadata({rank: theirs.store for (_, rank), theirs in metadata.items()})

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """It knows the blocks of each request."""
        self._store.bind_kv_cache_manager(kv_cache_manager)

    def bind_engine(self, engine: EngineCoreProc) -> None:
        """The engine's loop is about to begin: join the peers."""
        if self.binding is None:
            self.binding = begin_handover(engine, self._handshakes, functools.partial(V1HandoverWithStore, self._store))

    def on_new_request(self, request: Request) -> None:
        """A request has come, perhaps a peer's job."""
        self._store.on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What goes to the worker with this step."""
        return PairedStep(super().build_connector_meta(scheduler_output),
                          self._store.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers reported."""
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            self._store.take_report(report.store)
            self.binding.loads_ended(report.ended, report.failed)

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although there may be no request: a load's end is reported with one."""
        return self.binding is not None and self.binding.is_loading

    def request_finished_all_groups(self, request: Request,
                                    block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Its blocks are V1's to free at once."""
        self._store.request_finished(request, block_ids[0])  # of the only group
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool:
        """Cached KV is not to be used any more."""
        return self._store.reset_cache() and super().reset_cache()

    # The worker role.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches of all layers are allocated."""
        super().register_kv_caches(kv_caches)
        self._store.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """For `set_xfer_handshake_metadata_pp_aware`."""
        rank, store = super().get_handshake_metadata(), self._store.get_handshake_metadata()
        return None if rank is None or store is None else PairedHandshake(rank, store)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step is about to run."""
        super().bind_connector_metadata(connector_metadata)
        self._store.bind_connector_metadata(connector_metadata.store)

    def clear_connector_metadata(self) -> None:
        """It is over."""
        super().clear_connector_metadata()
        self._store.clear_connector_metadata()

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer's part of the step is computed."""
        self._store.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def finish_forward(self) -> None:
        """Model runner V2: the forward pass was launched."""
        super().finish_forward()
        self._store.finish_forward()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The step has ended, perhaps with an exception. Nothing is reported here."""
        loads = self._store.get_transfer_results(finished_req_ids)
        report = self._store.build_connector_worker_meta()
        self._report = (LoadReport(Counter(loads.finished_recving), loads.failed_recving, report or StoreReport())
                        if loads.finished_recving or report is not None else None)
        return super().get_transfer_results(finished_req_ids)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """With the step's output: which loads have ended, and whether the store is used no more."""
        return self._report

    # Figures.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Our figures since the last call: those of the hand-overs and of other hosts' stores in EngineCore, those of
        the store in the worker."""
        ours, stored = super().get_kv_connector_stats(), self._store.get_kv_connector_stats()
        if stored is None:
            return ours
        counted = HandoverStats({"calls": [[_STORE_COUNTS, stored.data]]})
        return counted if ours is None else ours.aggregate(counted)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any) -> KVConnectorPromMetrics:
        """What makes /metrics of both."""
        return PairedPromMetrics(served_name(vllm_config), vllm_config, *arguments)

    # Either role.

    def shutdown(self) -> None:
        """The engine, or the worker, ends."""
        super().shutdown()
        self._store.shutdown()
