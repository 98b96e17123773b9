# SPDX-License-Identifier: Apache-2.0
"""The store's figures on V1's own way for a connector, from the worker to /metrics in the front end."""
from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_pd.store.metrics import StoreMetrics


class StoreStats(KVConnectorStats):
    """Numbers by event or outcome."""

    def reset(self) -> None:
        """Forget them."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """These and those of `other`."""
        return StoreStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """For V1's log line."""
        return self.data

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class StorePromMetrics(KVConnectorPromMetrics):
    """Adds them up in the front end, for each of its engines."""

    def __init__(self, model_name: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._metrics = {engine: StoreMetrics(model_name, engine) for engine in self.per_engine_labelvalues}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """What one engine has counted."""
        self._metrics[engine_idx].add(transfer_stats_data)
