# SPDX-License-Identifier: Apache-2.0
"""What an engine shows on /metrics of its KV events and its load."""

from collections.abc import Mapping

from vllm_pd.events.messages import EngineLoad
from vllm_pd.metrics import FamilyCollector


class EventFamilies(FamilyCollector):
    """What is counted about events; docs/operations.md says what each means."""

    def __init__(self, by_engine: bool = False) -> None:
        super().__init__(by_engine)
        self.announced_blocks = self.gauge("vllm:pd_events_announced_blocks", "KV blocks that were announced as prefix "
                                           "hits and not as removed since.")
        self.event_counts = self.counter("vllm:pd_events_total", "What became of KV events, see docs/events.md.",
                                         "kind")
        for name in EngineLoad.__struct_fields__:
            setattr(self, f"load_{name}",
                    self.gauge(f"vllm:pd_load_{name}", f"The load that is reported to routers: {name}."))


class EventMetrics:
    """The figures of one engine's events and its load. Used by the announcer's thread only."""

    def __init__(self, model_name: str) -> None:
        families = EventFamilies.of_process()
        self._model_name = model_name
        self._announced_blocks = families.announced_blocks.labels(model_name)
        self._event_counts = families.event_counts
        self._load = {name: getattr(families, f"load_{name}").labels(model_name)
                      for name in EngineLoad.__struct_fields__}
        self._counted: dict[str, int] = {}

    def show(self, load: EngineLoad, counts: Mapping[str, int], announced_blocks: int) -> None:
        """Set the present load, and the totals by kind since this engine was started."""
        for name, gauge in self._load.items():
            gauge.set(getattr(load, name))
        self._announced_blocks.set(announced_blocks)
        for kind, count in counts.items():
            added = count - self._counted.get(kind, 0)
            if added > 0:
                self._event_counts.labels(self._model_name, kind).inc(added)
                self._counted[kind] = count
