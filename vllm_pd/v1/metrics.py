# SPDX-License-Identifier: Apache-2.0
"""Our figures on the way from EngineCore to /metrics, which the front end serves.

V1's own way for a connector: EngineCore records the calls of `PDMetrics`, they travel with V1's scheduler statistics,
and the front end, which has the registry, makes them there. Nothing is counted with `--disable-log-stats`.
"""
from __future__ import annotations

import collections
import functools
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.stats import SchedulerStats

from vllm_pd.handover.metrics import PDMetrics

MAX_CALLS = 10_000  # kept; a front end that takes nothing must not fill the memory
_GAUGES = ("parked_blocks", "quarantined_blocks", "sending_blocks", "held_blocks", "waiting_fallbacks")
_STATES = ("degraded", "engine_state")
_COUNTS = ("decision", "asked", "attempt", "handover", "parked", "transfer_bytes", "job", "prefix_read",
           "frames_dropped", "hold")


class _RecordedGauge:

    def __init__(self, states: dict[str, list], name: str) -> None:
        self._states = states
        self._name = name

    def set(self, value: float) -> None:
        """The gauge's new value."""
        self._states[self._name] = [value]


class MetricsRecorder:
    """In the place of `PDMetrics`, in EngineCore's thread: has its methods and gauges, and keeps what was called."""

    def __init__(self) -> None:
        self._calls: collections.deque[list] = collections.deque(maxlen=MAX_CALLS)
        self._states: dict[str, list] = {}
        self._sent: dict[str, list] = {}
        for name in _GAUGES:
            setattr(self, name, _RecordedGauge(self._states, name))
        for name in _STATES:
            setattr(self, name, functools.partial(self._set, name))
        for name in _COUNTS:
            setattr(self, name, functools.partial(self._count, name))

    def _set(self, name: str, *arguments: Any) -> None:
        self._states[name] = list(arguments)

    def _count(self, name: str, *arguments: Any) -> None:
        self._calls.append([name, *arguments])

    def take(self) -> HandoverStats | None:
        """What was recorded since the last call, without states that are as they were; None where there is nothing."""
        if not (self._calls or self._states):
            return None
        states = {name: value for name, value in self._states.items() if self._sent.get(name) != value}
        self._sent.update(states)
        calls = [*self._calls, *([name, *value] for name, value in states.items())]
        self._calls.clear()
        self._states.clear()  # a gauge keeps this dict
        return HandoverStats({"calls": calls}) if calls else None

    def states(self) -> HandoverStats:
        """The states as they were last taken, and no counts."""
        return HandoverStats({"calls": [[name, *value] for name, value in self._sent.items()]})


class HandoverStats(KVConnectorStats):
    """Recorded calls, as plain values."""

    def reset(self) -> None:
        """Forget them."""
        self.data = {"calls": []}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """These, then those of `other`."""
        return HandoverStats({"calls": [*self.data.get("calls", ()), *other.data.get("calls", ())]})

    def reduce(self) -> dict[str, int | float]:
        """For V1's log line: how many attempts ended how."""
        return collections.Counter(f"attempts {call[1]}" for call in self.data["calls"] if call[0] == "attempt")

    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        return not self.data.get("calls")


def states_beside(stats: SchedulerStats, ours: HandoverStats) -> SchedulerStats:
    """Statistics with the states of these, as they are, and ours, and without any count."""
    return SchedulerStats(num_running_reqs=stats.num_running_reqs, num_waiting_reqs=stats.num_waiting_reqs,
                          num_skipped_waiting_reqs=stats.num_skipped_waiting_reqs,
                          num_kv_fetch_reqs_by_stage=stats.num_kv_fetch_reqs_by_stage,
                          kv_cache_usage=stats.kv_cache_usage, kv_connector_stats=ours.to_dict())


class HandoverPromMetrics(KVConnectorPromMetrics):
    """Makes the recorded calls in the front end, for each of its engines."""

    def __init__(self, model_name: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._metrics = {engine: PDMetrics(model_name, engine) for engine in self.per_engine_labelvalues}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """What one engine has recorded."""
        metrics = self._metrics[engine_idx]
        for name, *arguments in transfer_stats_data.get("calls", ()):
            if name in _GAUGES:
                getattr(metrics, name).set(*arguments)
            else:
                getattr(metrics, name)(*arguments)
