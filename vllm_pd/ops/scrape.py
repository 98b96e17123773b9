# SPDX-License-Identifier: Apache-2.0
"""Reading a server's /metrics page: samples, sums over labels, and differences between two readings."""

import time
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from vllm_pd.ops.client import fetch

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class MetricsSnapshot:
    """All samples of one page, by sample name and labels."""
    samples: dict[Key, float]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples called `name` that carry `labels`; 0 where there is none."""
        wanted = set(labels.items())
        return sum(value for (sample, have), value in self.samples.items() if sample == name and wanted <= have)

    def by(self, name: str, *label_names: str) -> dict[tuple[str, ...], float]:
        """The samples called `name`, summed by the values of `label_names`."""
        sums: dict[tuple[str, ...], float] = {}
        for (sample, have), value in self.samples.items():
            if sample == name:
                labels = dict(have)
                key = tuple(labels.get(label, "") for label in label_names)
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def since(self, earlier: "MetricsSnapshot") -> "MetricsSnapshot":
        """What has been added to each sample since `earlier`; meaningful for counters and histograms."""
        return MetricsSnapshot({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})


def parse(text: str) -> MetricsSnapshot:
    """The samples of a page in Prometheus' text format. Raises ValueError for anything else."""
    samples: dict[Key, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name, frozenset(sample.labels.items())] = sample.value
    except Exception as error:  # the parser raises whatever it meets, an IndexError for one
        raise ValueError(f"no page of metrics: {error!r}") from error
    return MetricsSnapshot(samples)


def scrape(url: str, timeout_s: float = 10.0) -> MetricsSnapshot:
    """The page of the server at `url` (its base, without /metrics). Raises OSError when it does not answer."""
    status, page = fetch(url, "/metrics", timeout_s)
    if status != 200:
        raise ConnectionError(f"{url}/metrics: {status}")
    return parse(page)


def scrape_after_request(url: str, before: MetricsSnapshot, timeout_s: float = 12.0) -> MetricsSnapshot:
    """The page of a decode engine when everything about the one request since `before` is counted, or after
    `timeout_s`. An engine counts some of it shortly after the client has its answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        after = scrape(url)
        if _is_counted(after.since(before)) or time.monotonic() > deadline:
            return after
        time.sleep(0.05)


def _is_counted(added: MetricsSnapshot) -> bool:
    if not added.value("vllm:pd_decisions_total"):
        return False
    remote = added.value("vllm:pd_decisions_total", decision="remote")
    done = added.value("vllm:pd_attempts_total", outcome="done")
    return (added.value("vllm:request_prefill_time_seconds_count") >= 1
            and added.value("vllm:pd_attempts_total") >= remote
            and added.value("vllm:pd_handover_seconds_count", stage="first_step") >= done)
