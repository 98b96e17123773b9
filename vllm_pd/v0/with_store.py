# SPDX-License-Identifier: Apache-2.0
"""`V0Handover` of an engine with the key `store`: what the store has becomes a prefix hit first, and by that it is
decided who computes the rest (`vllm_pd.v0.stored`).
"""
from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import vllm

from vllm_pd.handover.engine import finalize
from vllm_pd.model.fingerprint import weights_state
from vllm_pd.protocol.messages import Attempt
from vllm_pd.settings.engine import PDConfig
from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.metrics import StoreMetrics
from vllm_pd.store.view import StoreView
from vllm_pd.store.worker import StoreWorker, byte_rows, model_of
from vllm_pd.v0.checks import sample_cache
from vllm_pd.v0.engine import V0Handover
from vllm_pd.v0.fingerprint import fingerprint, given_weights
from vllm_pd.v0.stored import StoredPrefixes

if TYPE_CHECKING:
    from vllm.core.scheduler import SchedulerOutputs
    from vllm.engine.llm_engine import LLMEngine
    from vllm.sequence import SequenceGroup

LOOK_S = 0.005  # between two looks for the end of a load, while the engine sleeps


class V0HandoverWithStore(V0Handover):
    """Its methods are those of `V0Handover`, which say what each is for."""

    def __init__(self, engine: LLMEngine, settings: dict[str, Any]) -> None:
        with contextlib.ExitStack() as opened:  # closes the store if the start fails
            config = PDConfig.parse(settings["kv_role"], settings["extra"])
            self._stored = _open_store(engine, config.store, opened)
            self._store_metrics = StoreMetrics(engine.model_config.served_model_name)
            super().__init__(engine, settings)
            self._store_finalizer = finalize(self, opened.pop_all().close)

    def choose_remote_prefill(self, seq_group: SequenceGroup, num_cached_tokens: int) -> Attempt | None:
        """A group for which blocks of the store are loaded is parked under an attempt of the store."""
        load = self._guard(self._stored.choose, seq_group, num_cached_tokens)
        return load or super().choose_remote_prefill(seq_group, num_cached_tokens)

    def waits_for_sibling(self, seq_group: SequenceGroup) -> bool:
        """Also while its beginning is loaded for another group."""
        return self._guard(self._stored.waits, seq_group) or super().waits_for_sibling(seq_group)

    def start_remote_prefill(self, attempt: Attempt, seq_group: SequenceGroup, block_ids: list[int],
                             num_cached_tokens: int) -> None:
        """Also begins a load."""
        if not self._stored.begin(attempt, block_ids):
            super().start_remote_prefill(attempt, seq_group, block_ids, num_cached_tokens)

    def abort_remote_prefill(self, attempt: Attempt) -> None:
        """Also of a group for which blocks are loaded."""
        if not self._stored.aborted(attempt):
            super().abort_remote_prefill(attempt)

    def after_schedule(self, outputs: SchedulerOutputs) -> None:
        """Also notes what the step fills."""
        self._guard(self._stored.scheduled, outputs)
        super().after_schedule(outputs)

    def return_transfer_requests(self, outputs: SchedulerOutputs) -> None:
        """What the step would have filled is not put."""
        self._stored.step_given_up()
        super().return_transfer_requests(outputs)

    def expects_steps(self) -> bool:
        """A step has ended in order: put what it has filled."""
        self._guard(self._stored.step_ended)
        return super().expects_steps()

    def close(self) -> None:
        """Also gives the store back."""
        super().close()
        self._store_finalizer()

    def _collect(self) -> None:
        if self._guard(self._stored.take_ended, self._progress):
            self.stalled = False
        super()._collect()

    def _next_look(self) -> float | None:
        when = super()._next_look()
        if not self._stored.is_loading:
            return when
        look = time.monotonic() + LOOK_S
        return look if when is None else min(when, look)

    def _update_metrics(self) -> None:
        if time.monotonic() >= self._metrics_due:
            self._store_metrics.add(self._stored.take_counts())
        super()._update_metrics()


def _open_store(engine: LLMEngine, settings: StoreSettings, opened: contextlib.ExitStack) -> StoredPrefixes:
    """The store as this engine uses it; `opened` closes it. Raises ConfigError."""
    config, caches = engine.vllm_config, engine.model_executor.driver_worker.worker.kv_cache[0]
    layout = sample_cache(config).layout.value
    model = model_of(fingerprint(config, layout), 0, vllm.__version__,
                     weights_state(config, given_weights(config)))
    worker = StoreWorker(settings, model, byte_rows([plane for cache in caches for plane in cache]), ())
    opened.callback(worker.close)
    view = StoreView(settings, worker.slot_bytes, (model, ))
    opened.callback(view.close)
    return StoredPrefixes(worker, view, engine.scheduler[0].block_manager)
