# SPDX-License-Identifier: Apache-2.0
"""`PDStoreConnector`: V1's KV connector over the store, without peers. It only passes on.

Scheduler role, in EngineCore: `StorePlan` says what a request can load and what a step has filled. A request that loads
waits as one that waits for a peer does (V1's asynchronous load). Before that, with `hosts`, it may wait for blocks of
other hosts to come into the arena (`FarStore`): V1 asks again with each step. Worker role: `StoreWorker`.
"""
from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from vllm_pd.errors import ConfigError
from vllm_pd.handover.reload import WEIGHT_CALLS
from vllm_pd.model.fingerprint import weights_state
from vllm_pd.model.layers import check_stored_groups
from vllm_pd.model.store_checks import check_store
from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.beyond.waits import WaitAnswer
from vllm_pd.store.plan import LATE_BYTES, NamedBlock, StorePlan
from vllm_pd.store.view import StoreView
from vllm_pd.store.worker import StoreWorker, byte_rows, model_of
from vllm_pd.v1.features import scores_prompt
from vllm_pd.v1.settings import asked_layout, given_weights, served_name
from vllm_pd.v1.store.stats import StorePromMetrics, StoreStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_pd.store.beyond.far import FarStore

logger = logging.getLogger("vllm.pd")

IDLE_S = 1.0  # without steps, and so without reports: all blocks of earlier steps count as stored then


@dataclass(frozen=True)
class StoreHandshake(KVConnectorHandshakeMetadata):
    """What a rank tells EngineCore: by which name its parts of blocks are stored, their size, and how many may be on
    their way to the store; None: none ever is."""
    model: bytes
    slot_bytes: int
    rows: int | None = None


@dataclass
class StoreStep(KVConnectorMetadata):
    """What the workers are to do with a step. Plain values: the executor pickles it."""
    number: int = 0  # from 1 on
    has_tokens: bool = False  # whether there is anything to compute
    loads: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)
    puts: list[tuple[bytes, int]] = field(default_factory=list)
    stops: bool = False  # whether this engine uses the store no more


@dataclass
class StoreReport(KVConnectorWorkerMetadata):
    """What a rank reports with a step. `ended`: how many of the blocks that its steps named are stored or left out.
    `has_stopped`: it uses the store no more, for its weights are loaded anew, or a step of it was not computed whole.
    """
    ended: int = 0
    has_stopped: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoreReport:
        """This one and another rank's."""
        return StoreReport(min(self.ended, other.ended), self.has_stopped or other.has_stopped)


class PDStoreConnector(KVConnectorBase_V1):
    """Without `SupportsHMA`: V1 then keeps all layers in one group of blocks."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings, digest = StoreSettings.parse_connector(
            vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        check_store(vllm_config, digest)
        check_stored_groups(kv_cache_config.kv_cache_groups)
        self._config = vllm_config
        self._block_size = vllm_config.cache_config.block_size
        self._worker: StoreWorker | None = None
        self._handshake: StoreHandshake | None = None
        self._view: StoreView | None = None
        self._far: FarStore | None = None
        self._plan: StorePlan | None = None
        self._manager: KVCacheManager | None = None
        self._requests: dict[str, Request] = {}
        self._loads: dict[str, list[NamedBlock]] = {}
        self._steps = 0
        self._rows: int | None = None
        self._sent = self._ended = 0  # blocks to put, and of these the ones that are on their way no more
        self._stepped_at = 0.0
        self._put_step: StoreStep | None = None  # the last one whose blocks the worker has put
        self.ranks = 1  # of the engine
        self.owner: KVConnectorBase_V1 = self  # the connector that V1 knows

    # The scheduler role.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The caches of all ranks are known: open the store."""
        self.ranks = self._config.parallel_config.world_size
        models = {theirs.model for theirs in metadata.values()}
        sizes = {theirs.slot_bytes for theirs in metadata.values()}
        if len(models) != self.ranks or len(sizes) > 1:
            raise ConfigError("tensor_parallel_size", self.ranks, "each rank must have its part of a block, all of one "
                              f"size: there are {len(models)}, of {sorted(sizes)} bytes")
        self._rows = min((theirs.rows for theirs in metadata.values() if theirs.rows is not None), default=None)
        self._view = StoreView(self._settings, *sizes, models)
        if self._settings.is_far:
            from vllm_pd.store.beyond.far import FarStore
            self._far = FarStore(self._settings, self._view.arena, models)
        late = max(1, LATE_BYTES // min(sizes)) if self._rows is None else self._rows  # the step's thread copies none
        self._plan = StorePlan(self._block_size, self._view.contains, late)
        filled = self._config.scheduler_config.max_num_batched_tokens // self._block_size
        if self._rows is not None and self._rows < filled:
            logger.warning("store: a step may fill %d blocks, and %d can be on their way (pinned_gib=%g): of a request "
                           "that ends with such a step the others are not stored", filled, self._rows,
                           self._settings.pinned_gib)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """It knows the blocks of each request."""
        self._manager = kv_cache_manager

    def on_new_request(self, request: Request) -> None:
        """A request has come. Untouched are those whose prompt is more than token ids, or has more to give than KV."""
        params = request.sampling_params
        if (self._plan is not None and not request.mm_features and request.prompt_embeds is None
                and not (params is not None and scores_prompt(params))):
            self._requests[request.request_id] = request
            self._plan.add(request.request_id)

    def first_name(self, request: Request, computed_tokens: int) -> bytes | None:
        """The name of the block that a load for this request would begin with, whether the store has it or not; None
        where the request is not loaded for."""
        if self._plan is None or request.num_preemptions:
            return None
        return self._plan.first_name(request.request_id, self._names(request), request.num_tokens, computed_tokens)

    @property
    def is_used(self) -> bool:
        """Whether blocks are loaded and put: not any more after `reset_cache`."""
        return self._plan is not None

    @property
    def is_fetching(self) -> bool:
        """Whether a request waits for blocks of other hosts."""
        return self._far is not None and self._far.is_waited_for

    def load_failed(self, request: Request) -> None:
        """Its load failed: it is not tried again, and its blocks are put when they are computed."""
        if self._plan is not None and self._requests.get(request.request_id) is request:
            self._plan.failed(request.request_id)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that are loaded, True); (0, False): compute it; (None, False): ask with the next step."""
        if self.first_name(request, num_computed_tokens) is None:
            return 0, False
        if (self._far is not None and not request.skip_reading_prefix_cache
                and self._waits(request, num_computed_tokens)):
            return None, False
        tokens = self._plan.loadable_tokens(request.request_id, self._names(request), request.num_tokens,
                                            num_computed_tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: V1 must not zero blocks that are loaded."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has blocks, and waits where `num_external_tokens` is more than 0."""
        if num_external_tokens:
            self._loads[request.request_id] = self._plan.loads(request.request_id, self._names(request),
                                                               blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What goes to the worker with this step."""
        self._steps += 1
        now = time.monotonic()
        if now - self._stepped_at > IDLE_S:
            self._ended = self._sent
        self._stepped_at = now
        step = StoreStep(self._steps, scheduler_output.total_num_scheduled_tokens > 0)
        if self._plan is None:
            step.stops = self._view is not None
            return step
        step.loads, self._loads = {one: [tuple(block) for block in blocks] for one, blocks in self._loads.items()}, {}
        cached = scheduler_output.scheduled_cached_reqs
        self._plan.begin_step(None if self._rows is None else self._rows - (self._sent - self._ended))
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, before in computed.items():
            request = self._requests.get(request_id)
            if request is not None and not request.mm_features:  # further input of a session may have some
                after = before + scheduler_output.num_scheduled_tokens[request_id]
                step.puts += map(tuple, self._plan.puts(request_id, self._names(request), lambda one=request_id:
                                                        self._manager.get_block_ids(one)[0], before, after))
        self._sent += len(step.puts)
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers reported, when the last of them did: a load that failed on any rank is not tried again. If a
        rank uses the store no more, this engine does not either."""
        if (report := connector_output.kv_connector_worker_meta) is not None:
            self.take_report(report)
        if self._plan is not None:
            for request_id in connector_output.failed_recving or ():
                self._plan.failed(request_id)

    def take_report(self, report: StoreReport) -> None:
        """What all ranks have said with a step."""
        self._ended = max(self._ended, report.ended)
        if report.has_stopped:
            self.reset_cache()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended."""
        self._requests.pop(request.request_id, None)
        if self._plan is not None:
            self._plan.end(request.request_id)
        if self._far is not None:
            self._far.end_request(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Cached KV is not to be used any more, as after a change of the weights. The store is not this engine's alone:
        it stays, and this engine stops using it. What it loads at present fails. It goes on to serve other hosts."""
        self._plan, self._requests = None, {}
        if self._far is not None:
            self._far.end_requests()
        return True

    # EngineCore, before the caches are allocated.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """As PDConnector asks for, so that engines of both find each other's blocks."""
        return asked_layout(vllm_config)

    # The worker role.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches of all layers are allocated."""
        import vllm
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from vllm_pd.transfer.layout import describe_views, distinct_caches
        from vllm_pd.v1.fingerprint import engine_name, fingerprint
        if (named := get_kv_transfer_group()) is not self.owner:
            raise ConfigError("kv_connector", type(named).__name__, "name PDStoreConnector by itself: the store is not "
                              "tried together with another connector")
        views = distinct_caches(kv_caches)
        description = describe_views(list(views.values()), num_blocks=self._config.cache_config.num_gpu_blocks,
                                     block_size=self._block_size)
        ours = fingerprint(self._config, description, engine_name(self._config, views))
        model = model_of(ours, self._config.parallel_config.rank, vllm.__version__,
                         weights_state(self._config, given_weights(self._config)))
        self._worker = StoreWorker(self._settings, model, byte_rows(list(views.values())), list(views))
        self._handshake = StoreHandshake(model, self._worker.slot_bytes, self._worker.copies.rows)
        stop_before_reload(self._worker)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """For `set_xfer_handshake_metadata`."""
        return self._handshake

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The step has ended, perhaps with an exception: put what it filled if it was computed whole, begin its loads,
        report those that have ended."""
        step = self._get_connector_metadata()
        self._end_step(step)
        self._worker.stop_loads(finished_req_ids)
        self._worker.begin_loads({one: [NamedBlock(*block) for block in blocks] for one, blocks in step.loads.items()})
        ended, failed = self._worker.take_ended()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """With the step's output: how many blocks have been put, where they are put behind the steps; and whether the
        store is used no more, until EngineCore says so itself."""
        has_stopped = not (self._worker.is_on or self._get_connector_metadata().stops)
        return StoreReport(self._worker.copies.ended, has_stopped) if has_stopped or self._worker.on_device else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Our figures since the last call: those of other hosts in EngineCore, all else in the worker."""
        source = self._worker or self._far
        counts = source.take_counts() if source is not None else None
        return StoreStats(counts) if counts else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads begin after the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all its KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer's part of the step is computed. Whole blocks are put after the step."""
        self._worker.steps.layer_computed(self._get_connector_metadata().number, layer_name)

    def finish_forward(self) -> None:
        """Model runner V2: the forward pass was launched, and nothing was sampled yet (`vllm_pd.store.copies`)."""
        if self._worker.on_device:
            self._end_step(self._get_connector_metadata())

    def wait_for_save(self) -> None:
        """Nothing."""

    # The front end.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """What `get_kv_connector_stats` gave, from its data."""
        return StoreStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, metric_types: dict, labelnames: list[str],
                           per_engine_labelvalues: dict[int, list[object]]) -> KVConnectorPromMetrics:
        """What makes /metrics of those."""
        return StorePromMetrics(served_name(vllm_config), vllm_config, metric_types, labelnames,
                                per_engine_labelvalues)

    # Either role.

    def shutdown(self) -> None:
        """Give the store back."""
        if self._worker is not None:
            self._worker.close()
        far_has_ended = self._far is None or self._far.close()
        if self._view is not None and far_has_ended:
            self._view.close()

    def debug_state(self) -> dict[str, int]:
        """For tests alone: how many requests are known here, and how many to the plan."""
        return {"requests": len(self._requests), "planned": len(self._plan or ())}

    def _end_step(self, step: StoreStep) -> None:
        """Once for each step: put what it filled."""
        if step is self._put_step:
            return
        self._put_step = step
        if step.stops:
            self._worker.stop("the cache was reset")
        self._worker.end_step(step.number, step.has_tokens, [NamedBlock(*one) for one in step.puts],
                              sys.exc_info()[0] is not None)

    def _waits(self, request: Request, computed_tokens: int) -> bool:
        """Whether it waits for blocks of other hosts."""
        request_id = request.request_id
        answer = self._far.ask(request_id, lambda: self._plan.absent_names(
            request_id, self._names(request), request.num_tokens, computed_tokens))
        if answer is WaitAnswer.LOOK:
            self._plan.look_anew(request_id)
        return answer is WaitAnswer.WAIT

    def _names(self, request: Request) -> list[bytes]:
        """The chain hashes of the request's full blocks; none where V1 hashes in another unit."""
        names = request.block_hashes
        return names if len(names) == request.num_tokens // self._block_size else []


def stop_before_reload(worker: StoreWorker) -> None:
    """Stop it before vLLM's worker in this process loads its weights anew: the digest that names KV is of the old ones.
    """
    from vllm.v1.worker.gpu_worker import Worker
    for name in WEIGHT_CALLS:
        setattr(Worker, name, _stopping(worker, getattr(Worker, name)))


def _stopping(worker: StoreWorker, load: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(load)
    def stop_and_load(self: Worker, *arguments: Any, **keywords: Any) -> Any:
        worker.stop("the weights are loaded anew")
        return load(self, *arguments, **keywords)

    return stop_and_load
