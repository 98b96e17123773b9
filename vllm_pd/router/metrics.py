# SPDX-License-Identifier: Apache-2.0
"""A router's Prometheus metrics. Each router has its own registry."""
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_pd.router.index import PrefixIndex

_Labelled = prometheus_client.Counter | prometheus_client.Gauge

SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RouterMetrics:
    """Belongs to the router's event loop. docs/router.md describes each metric; a test compares the two."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        counter = functools.partial(prometheus_client.Counter, registry=self.registry)
        gauge = functools.partial(prometheus_client.Gauge, registry=self.registry)
        histogram = functools.partial(prometheus_client.Histogram, registry=self.registry, buckets=SECONDS)
        self.requests = counter("vllm:pd_router_requests_total", "Answers to clients by path and status.",
                                ["path", "status"])
        self.decisions = counter("vllm:pd_router_decisions_total", "Choices of a worker by policy and reason.",
                                 ["policy", "reason"])
        self.tries = counter("vllm:pd_router_tries_total", "Requests sent to workers by how the try ended.",
                             ["worker", "outcome"])
        self.refused = counter("vllm:pd_router_refused_total", "Requests that no worker could be given.", ["reason"])
        self.broken_streams = counter("vllm:pd_router_broken_streams_total", "Answers that broke after their first "
                                      "byte.", ["worker"])
        self.continued_streams = counter("vllm:pd_router_continued_streams_total", "Broken answers that went on at "
                                         "this worker.", ["worker"])
        self.clients_gone = counter("vllm:pd_router_clients_gone_total", "Requests whose client went away first.")
        self.failures = counter("vllm:pd_router_worker_failures_total", "How often a worker was taken out, and why.",
                                ["worker", "kind"])
        self.probes = counter("vllm:pd_router_probes_total", "Generation probes by outcome.", ["worker", "outcome"])
        self.worker_up = gauge("vllm:pd_router_worker_up", "1 while a worker gets requests.", ["worker"])
        self.in_flight = gauge("vllm:pd_router_in_flight", "Requests that are open at a worker through this router.",
                               ["worker"])
        self.tokenized = counter("vllm:pd_router_tokenized_total", "Prompts by the outcome of tokenising them.",
                                 ["outcome"])
        self.deferred = counter("vllm:pd_router_rests_total", "Deferred prompts that were tokenised whole "
                                "after all, by outcome.", ["outcome"])
        self.prompt_blocks = counter("vllm:pd_router_prompt_blocks_total", "Full KV blocks of the prompts routed.")
        self.overlap_blocks = counter("vllm:pd_router_overlap_blocks_total", "Of these, those that the chosen worker "
                                      "was known to hold.")
        self.route_s = histogram("vllm:pd_router_route_seconds", "From a whole request to its worker being chosen.")
        self.first_byte_s = histogram("vllm:pd_router_first_byte_seconds", "From a whole request to the first byte of "
                                      "its answer.")
        self.prefill_first = counter("vllm:pd_router_prefill_first_total", "Requests that came in the order "
                                     "prefill-first by what became of their prefill.", ["outcome"])
        self.prefill_s = histogram("vllm:pd_router_prefill_seconds", "From the choice of a prefill engine to its "
                                   "answer that says where the KV is.")
        self.posts = counter("vllm:pd_router_posts_total", "Jobs that decode engines have posted to the metaserver by "
                             "what became of them.", ["outcome"])
        self.clients_cut = counter("vllm:pd_router_clients_cut_total", "Connections of clients that were ended by a "
                                   "limit.", ["reason"])
        self.connections = gauge("vllm:pd_router_connections", "Connections of clients.")
        self.body_bytes = gauge("vllm:pd_router_body_bytes", "Bytes of the bodies of open requests.")
        self.registry_silent = gauge("vllm:pd_router_registry_silent", "1 while the broker does not answer.")
        self.source_problem = gauge("vllm:pd_router_source_problem", "1 while a source of workers, DNS or a file, "
                                    "can't be read or names none.", ["source"])
        self._of: dict[str, set[tuple[_Labelled, tuple[str, ...]]]] = {}  # by worker: its time series
        self.indexes = IndexCollector()
        self.registry.register(self.indexes)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)

    def of(self, worker: str, family: _Labelled, *labels: str) -> Any:
        """The worker's time series of a metric whose first label is the worker; `labels` are the other labels."""
        self._of.setdefault(worker, set()).add((family, labels))
        return family.labels(worker, *labels)

    def forget(self, worker: str) -> None:
        """Remove all time series of a worker that has left; otherwise the page would grow without end."""
        for family, labels in self._of.pop(worker, ()):
            family.remove(worker, *labels)


class IndexCollector:
    """Reads the counts that the indexes keep themselves, at each scrape. `present` returns the present indexes."""

    def __init__(self) -> None:
        self.present: Callable[[], Iterable[PrefixIndex]] = lambda: ()
        self._retired: Counter[str] = Counter()

    def retire(self, index: PrefixIndex) -> None:
        """Keep the counts of a removed index: counters must not fall."""
        self._retired.update(dataclasses.asdict(index.counts))

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at each scrape."""
        blocks = CounterMetricFamily("vllm:pd_router_index_blocks_total", "Blocks in the workers' events by what the "
                                     "index did with them.", labels=["kind"])
        drops = CounterMetricFamily("vllm:pd_router_index_drops_total", "How often the index forgot a worker.")
        entries = GaugeMetricFamily("vllm:pd_router_index_entries", "Entries of the index by table.", labels=["table"])
        counts, sizes = Counter(self._retired), Counter()
        for index in self.present():
            counts.update(dataclasses.asdict(index.counts))
            sizes.update(index.sizes())
        if counts:
            drops.add_metric([], counts.pop("drops", 0))
            for kind, count in counts.items():
                blocks.add_metric([kind], count)
            for table, size in sizes.items():
                entries.add_metric([table], size)
        yield from (blocks, drops, entries)
