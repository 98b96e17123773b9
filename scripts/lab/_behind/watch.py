# SPDX-License-Identifier: Apache-2.0
"""Reads each engine's counters once a second, in a thread of its own: decisions by reason, attempts by their end, why
an engine is degraded."""
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from _behind.fleet import EnginePlace
from vllm_pd.ops.client import fetch
from vllm_pd.ops.scrape import MetricsSnapshot, parse

PERIOD_S = 1.0
ANSWER_S = 5.0
OURS = "vllm:pd_"


@dataclass(frozen=True)
class EngineReading:
    """One reading of one engine. `at_s`: `time.perf_counter()`. Counters are since the start of the engine, which is
    the one of number `life` in its place. `degraded`: the reasons."""
    at_s: float
    place: str
    life: int
    decisions: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    jobs: float = 0.0
    degraded: tuple[str, ...] = ()

    @classmethod
    def of(cls, at_s: float, place: EnginePlace, page: MetricsSnapshot) -> "EngineReading":
        return cls(
            at_s, place.name, place.life,
            Counter({f"{decision}: {reason}": count for (decision, reason), count in
                     page.by(f"{OURS}decisions_total", "decision", "reason").items() if count}),
            Counter({outcome: count for (outcome,), count in page.by(f"{OURS}attempts_total", "outcome").items()
                     if count}),
            page.value(f"{OURS}jobs_total"),
            tuple(sorted(reason for (reason,), said in page.by(f"{OURS}degraded", "reason").items() if said)))


def read(place: EnginePlace) -> EngineReading:
    """Raises OSError where the engine does not answer."""
    status, page = fetch(place.url, "/metrics", ANSWER_S)
    if status != 200:
        raise ConnectionError(f"{place.url}/metrics: {status}")
    ours = "\n".join(line for line in page.splitlines() if line.startswith(OURS))  # the others take the time
    return EngineReading.of(time.perf_counter(), place, parse(ours + "\n"))


def is_busy(place: EnginePlace) -> bool:
    """Whether this prefill engine has a prompt of a decode engine. Raises OSError where it does not answer."""
    return json.loads(fetch(place.url, "/pd/status", ANSWER_S)[1])["gauges"]["prefill_jobs"] > 0


class EngineWatch:
    """Reads from `start` to `stop`. `readings` are in the order of time; one that does not answer has none."""

    def __init__(self, places: Sequence[EnginePlace]) -> None:
        self.readings: list[EngineReading] = []
        self._places = places
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="watch")

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def stop(self) -> None:
        """Returns after the last reading."""
        self._ending.set()
        self._thread.join()

    def _read_on(self) -> None:
        while not self._ending.wait(PERIOD_S):
            for place in self._places:
                try:
                    self.readings.append(read(place))
                except OSError:
                    continue


def added(readings: Iterable[EngineReading], counter: str, begun_s: float, ended_s: float) -> Counter[str]:
    """What all engines have counted in this time, by the name of their counter: `decisions` or `attempts`. What an
    engine counts after the last reading before its end is not in it."""
    total: Counter[str] = Counter()
    last: dict[tuple[str, int], Counter[str]] = {}
    for reading in readings:
        key, counts = (reading.place, reading.life), getattr(reading, counter)
        if begun_s <= reading.at_s < ended_s:
            total += counts - last.get(key, Counter())
        last[key] = counts
    return total
