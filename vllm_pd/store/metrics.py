# SPDX-License-Identifier: Apache-2.0
"""What an engine counts about the store, as it appears on /metrics. docs/operations.md says what each means."""
from __future__ import annotations

from collections.abc import Mapping

from vllm_pd.metrics import FamilyCollector

BLOCK_EVENTS = ("stored", "present", "busy", "memory", "file", "missing", "written", "no_room", "gone", "not_queued",
                "error")
LOAD_OUTCOMES = ("loaded", "failed", "overdue")


class StoreFamilies(FamilyCollector):
    """The counters of all engines of this process."""

    def __init__(self, by_engine: bool = False) -> None:
        super().__init__(by_engine)
        self.blocks = self.counter("vllm:pd_store_blocks_total", "Blocks of the KV store by what became of them.",
                                   "event")
        self.loads = self.counter("vllm:pd_store_loads_total", "Requests that found their blocks in the KV store, by "
                                  "how their loads ended.", "outcome")


class StoreMetrics:
    """The figures of one engine. `engine` is its number in the front end; None: the figures have no such label."""

    def __init__(self, model_name: str, engine: int | None = None) -> None:
        families, labels = StoreFamilies.of_engine(model_name, engine)
        self._events = {event: families.blocks.labels(*labels, event) for event in BLOCK_EVENTS}
        self._loads = {end: families.loads.labels(*labels, end) for end in LOAD_OUTCOMES}

    def add(self, counts: Mapping[str, int]) -> None:
        """Add these numbers to the counters, by event or outcome; other names are left out."""
        for name, number in counts.items():
            counter = self._events.get(name) or self._loads.get(name)
            if counter is not None:
                counter.inc(number)
