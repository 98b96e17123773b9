# SPDX-License-Identifier: Apache-2.0
"""The decode engine's half of the binding, for V0's sequence groups: see `vllm_pd.handover.decode`."""
from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.handover.decode import DecodeHandover
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.records import DecodeCapacity
from vllm_pd.peer.decode import DecodeSession
from vllm_pd.protocol.messages import Attempt
from vllm_pd.protocol.rows import BlockRows
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v0.features import can_go_remote

if TYPE_CHECKING:
    from vllm.core.scheduler import Scheduler
    from vllm.sequence import SequenceGroup, SequenceGroupBase


class RemotePrefills(DecodeHandover["SequenceGroup"]):
    """All prompts of one V0 engine that are, or may be, prefilled elsewhere."""

    def __init__(self, config: PDConfig, session: DecodeSession, scheduler: Scheduler, metrics: PDMetrics,
                 split_requests: Mapping[str, SequenceGroupBase], speed: StepSpeed) -> None:
        cache, batch = scheduler.cache_config, scheduler.scheduler_config
        super().__init__(config, session, DecodeCapacity(BlockRows(cache.block_size), cache.num_gpu_blocks,
                                                          batch.max_num_seqs, batch.max_num_batched_tokens),
                         metrics, speed)
        self._scheduler = scheduler
        self._split_requests = split_requests
        self._caching = bool(cache.enable_prefix_caching)

    def waits_for_sibling(self, seq_group: SequenceGroup) -> bool:
        """Whether another part of the same request (n > 1) is parked. Once that one is done, or has to stay here, all
        of them stay."""
        from vllm.sequence import SequenceStatus
        return any(group.first_seq.status is SequenceStatus.REMOTE_PREFILLING for group in self._siblings(seq_group))

    def _parked(self) -> Mapping[Attempt, SequenceGroup]:
        return self._scheduler.remote_prefilling

    def _quarantined(self) -> Collection[Attempt]:
        return self._scheduler.quarantined

    def _has_running(self) -> bool:
        return bool(self._scheduler.running)

    def _can_go_remote(self, request: SequenceGroup) -> bool:
        return can_go_remote(request, () if self._caching else self._split_requests)

    def _extra_args(self, request: SequenceGroup) -> Any:
        return request.sampling_params and request.sampling_params.extra_args

    def _hold(self, request: SequenceGroup) -> Attempt | None:
        return None  # this engine's ranks have no reads that need no step

    def _metaserver(self, request: SequenceGroup) -> str | None:
        return None  # engines of V0 post no jobs: see `vllm_pd.v0.claim`

    def _request_id(self, request: SequenceGroup) -> str:
        return request.request_id

    def _prompt(self, request: SequenceGroup) -> list[int]:
        return list(request.first_seq.prompt_token_ids)

    def _priority(self, request: SequenceGroup) -> int:
        return request.priority

    def _num_tokens(self, request: SequenceGroup) -> int:
        return request.first_seq.get_len()

    def _has_outputs(self, request: SequenceGroup) -> bool:
        return request.first_seq.get_output_len() > 0

    def _awaits_prefill(self, request: SequenceGroup) -> bool:
        return request.is_prefill() and not request.is_finished()

    def _uncomputed(self, request: SequenceGroup) -> int:
        return request.first_seq.data.get_num_uncomputed_tokens() if request.is_prefill() else 0

    def _num_decoding(self) -> int:
        return sum(not group.is_prefill() for group in self._scheduler.running)

    def _is_running(self, request: SequenceGroup) -> bool:
        return True  # the step that takes up the KV schedules it

    def _is_finished(self, request: SequenceGroup) -> bool:
        return request.is_finished()

    def _first_token_at(self, request: SequenceGroup) -> float | None:
        return request.metrics.first_token_time

    def _siblings(self, request: SequenceGroup) -> Collection[SequenceGroup]:
        split = self._split_requests.get(request.request_id)
        return split.to_be_finished.values() if split is not None else ()
