# SPDX-License-Identifier: Apache-2.0
"""Families of figures on /metrics, beside upstream's own, as a process has them for all its engines.

Under `vllm serve` of engine V0 the engine is a process of its own: prometheus_client writes its values to
PROMETHEUS_MULTIPROC_DIR, and the front end adds them up. Of engine V1 the front end counts, for each data-parallel rank
by itself, as the label `engine` says. With several processes each gets some of an engine's figures: a gauge's value is
then the one that was set last, by whichever process.
"""
import functools
from collections.abc import Iterator
from typing import Self

import prometheus_client
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)


class FamilyCollector(Collector):
    """A collector of all metric families that a subclass has as attributes. They live as long as the process. All its
    engines share them and differ in their labels: `model_name`, and with `by_engine` also `engine`.

    The families are not registered one by one: upstream's stat logger, which is built after the scheduler, drops every
    collector whose `_name` contains "vllm", and a second engine in the process would register the same names twice.
    """
    def __init__(self, by_engine: bool = False) -> None:
        self._labels = ["model_name", "engine"] if by_engine else ["model_name"]
        self._by_engine = by_engine

    @classmethod
    @functools.cache
    def of_process(cls, by_engine: bool = False) -> Self:
        """The process's only object of this class with these labels, registered for /metrics."""
        families = cls(by_engine)
        prometheus_client.REGISTRY.register(families)
        return families

    @classmethod
    def of_engine(cls, model_name: str, engine: int | None) -> tuple[Self, tuple[str, ...]]:
        """The process's object for the figures of one engine, and the values of their common labels. `engine` is its
        number in the front end; None: the figures have no such label."""
        labels = (model_name, ) if engine is None else (model_name, str(engine))
        return cls.of_process(engine is not None), labels

    def counter(self, name: str, text: str, *labels: str) -> prometheus_client.Counter:
        """A counter. `labels`: those beside the common ones."""
        return prometheus_client.Counter(name, text, [*self._labels, *labels], registry=None)

    def gauge(self, name: str, text: str, *labels: str, ended: bool = True) -> prometheus_client.Gauge:
        """A gauge. `ended`: whether the value of a process that has ended counts."""
        mode = "mostrecent" if self._by_engine else "sum" if ended else "livesum"
        return prometheus_client.Gauge(name, text, [*self._labels, *labels], registry=None, multiprocess_mode=mode)

    def histogram(self, name: str, text: str, *labels: str) -> prometheus_client.Histogram:
        """A histogram of seconds."""
        return prometheus_client.Histogram(name, text, [*self._labels, *labels], registry=None, buckets=BUCKETS_S)

    def collect(self) -> Iterator[Metric]:
        """The families with their samples."""
        for family in self._families():
            yield from family.collect()

    def describe(self) -> Iterator[Metric]:
        """The families without samples."""
        for family in self._families():
            yield from family.describe()

    def _families(self) -> list[MetricWrapperBase]:
        return [value for value in vars(self).values() if isinstance(value, MetricWrapperBase)]
