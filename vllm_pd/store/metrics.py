# SPDX-License-Identifier: Apache-2.0
"""What an engine counts about the store, as it appears on /metrics. docs/operations.md says what each means."""
from __future__ import annotations

from collections.abc import Mapping

from vllm_pd.metrics import FamilyCollector

BLOCK_EVENTS = ("stored", "present", "busy", "memory", "file", "missing", "written", "no_room", "gone", "not_queued",
                "error")
LOAD_OUTCOMES = ("loaded", "failed", "overdue")
FAR_EVENTS = ("found", "fetched", "torn", "late", "sent")
FAR_OUTCOMES = ("whole", "part", "none", "starved")
FAR_FAILURES = ("late", "unreachable", "torn", "garbage")
FAR_REFUSALS = ("busy", "bad_frame")


class StoreFamilies(FamilyCollector):
    """The counters of all engines of this process."""

    def __init__(self, by_engine: bool = False) -> None:
        super().__init__(by_engine)
        self.blocks = self.counter("vllm:pd_store_blocks_total", "Blocks of the KV store by what became of them.",
                                   "event")
        self.loads = self.counter("vllm:pd_store_loads_total", "Requests that found their blocks in the KV store, by "
                                  "how their loads ended.", "outcome")
        self.far_blocks = self.counter("vllm:pd_store_far_blocks_total", "Blocks of other hosts' stores, or for them, "
                                       "by what became of them.", "event")
        self.far_fetches = self.counter("vllm:pd_store_far_fetches_total", "Prompts for whose blocks other hosts were "
                                        "asked, by how much of them has come.", "outcome")
        self.far_failures = self.counter("vllm:pd_store_far_failures_total", "How often a host was not asked for a "
                                         "while, by the reason.", "reason")
        self.far_refused = self.counter("vllm:pd_store_far_refused_total", "Questions of other hosts that were not "
                                        "looked at, by the reason.", "reason")


class StoreMetrics:
    """The figures of one engine. `engine` is its number in the front end; None: the figures have no such label."""

    def __init__(self, model_name: str, engine: int | None = None) -> None:
        families, labels = StoreFamilies.of_engine(model_name, engine)
        self._counters = {f"{prefix}{name}": family.labels(*labels, name) for family, prefix, names in (
            (families.blocks, "", BLOCK_EVENTS), (families.loads, "", LOAD_OUTCOMES),
            (families.far_blocks, "far_", FAR_EVENTS), (families.far_fetches, "far_", FAR_OUTCOMES),
            (families.far_failures, "far_host_", FAR_FAILURES), (families.far_refused, "far_", FAR_REFUSALS))
            for name in names}

    def add(self, counts: Mapping[str, int]) -> None:
        """Add these numbers to the counters, by event, outcome or reason; other names are left out."""
        for name, number in counts.items():
            if (counter := self._counters.get(name)) is not None:
                counter.inc(number)
