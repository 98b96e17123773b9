# SPDX-License-Identifier: Apache-2.0
"""What a run has seen, and its figures by phase.

A request that did not end with its answer has *failed*, unless the decode engine that streamed it was killed meanwhile:
then it was *cut*, as it would have been without prefill engines. A request, and a pause, belongs to the phase in which
it ended. A pause is the time between two tokens of a streamed answer to a short prompt.
"""
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from _behind.load import AskedRequest
from _behind.watch import EngineReading, added
from vllm_pd.bench.report import MS, summary

PAUSES = "p50 p90 p99 max"
SHOWN_ERRORS = 5


@dataclass(frozen=True)
class RunPhase:
    """A phase. Times are `time.perf_counter()`. `prefill_engines`: how many there are all the time, None
    where something changes."""
    name: str
    begun_s: float
    ended_s: float
    prefill_engines: int | None = None


@dataclass(frozen=True)
class KilledEngine:
    """An engine that got SIGKILL at `at_s` and was gone at `gone_s`. `address`: as the gateway names it."""
    place: str
    address: str
    at_s: float
    gone_s: float

    def has_cut(self, request: AskedRequest) -> bool:
        """Whether this request was a stream of this engine when it was killed."""
        return (request.begun and request.stream and request.sent_s < self.gone_s and request.ended_s > self.at_s
                and self.place.startswith("D") and request.engine in (self.address, ""))


@dataclass
class BehindRecord:
    """All that was seen. `engines`: (when, place, whether an engine is there from then on)."""
    gateway: str = ""
    phases: list[RunPhase] = field(default_factory=list)
    killed: list[KilledEngine] = field(default_factory=list)
    engines: list[tuple[float, str, bool]] = field(default_factory=list)
    asked: list[AskedRequest] = field(default_factory=list)
    readings: list[EngineReading] = field(default_factory=list)

    def cut(self) -> list[AskedRequest]:
        """The requests that were cut by a kill of their decode engine."""
        return [one for one in self.asked if one.answer is None and any(kill.has_cut(one) for kill in self.killed)]

    def failed(self) -> list[AskedRequest]:
        """Those that have no answer for another reason."""
        cut = self.cut()
        return [one for one in self.asked if one.answer is None and one not in cut]

    def changed(self) -> list[AskedRequest]:
        """Those with other tokens than the engine alone has given."""
        return [one for one in self.asked if one.changed]

    def faults(self) -> list[str]:
        """What must not be."""
        handed_over = sum(reading.attempts["done"] for reading in self.last_readings())
        found = [f"{len(requests)} {what}" for what, requests in (("requests failed", self.failed()),
                                                                  ("answers have changed", self.changed())) if requests]
        return [*found, *sorted({one.error for one in self.failed()})[:SHOWN_ERRORS],
                *["no prompt was handed over"] * (not handed_over)]

    def last_readings(self) -> list[EngineReading]:
        """The last one of each engine."""
        return list({(one.place, one.life): one for one in self.readings}.values())

    def pauses(self, begun_s: float, ended_s: float) -> list[tuple[float, float]]:
        """(when it ended, its seconds) of each pause in this time."""
        return [(at_s, pause_s) for one in self.asked if not one.long for at_s, pause_s in one.pauses()
                if begun_s <= at_s < ended_s]

    def figures(self) -> dict[str, Any]:
        """For the JSON: all together, and each phase."""
        whole = RunPhase("all", self.phases[0].begun_s, float("inf"))
        by_count = {count: self._pauses_ms([phase for phase in self.phases if phase.prefill_engines == count])
                    for count in (0, 2)}
        return {"gateway": self.gateway, **self._figures(whole),
                "errors": sorted({one.error for one in self.failed()})[:SHOWN_ERRORS],
                "pause_ms_without_prefill_engines": by_count[0], "pause_ms_with_two_prefill_engines": by_count[2],
                "phases": [{"phase": phase.name, "from_s": round(phase.begun_s - whole.begun_s, 1),
                            "to_s": round(phase.ended_s - whole.begun_s, 1), **self._figures(phase)}
                           for phase in self.phases]}

    def _figures(self, phase: RunPhase) -> dict[str, Any]:
        def count(requests: Sequence[AskedRequest]) -> int:
            return sum(phase.begun_s <= one.ended_s < phase.ended_s for one in requests)

        degraded: dict[str, set[str]] = {}
        for reading in self.readings:
            if phase.begun_s <= reading.at_s < phase.ended_s and reading.degraded:
                degraded.setdefault(reading.place, set()).update(reading.degraded)
        return {"requests": count(self.asked), "failed": count(self.failed()), "cut": count(self.cut()),
                "changed": count(self.changed()), "pause_ms": self._pauses_ms([phase]),
                "decisions": dict(added(self.readings, "decisions", phase.begun_s, phase.ended_s).most_common()),
                "attempts": dict(added(self.readings, "attempts", phase.begun_s, phase.ended_s).most_common()),
                "degraded": {place: sorted(reasons) for place, reasons in sorted(degraded.items())}}

    def _pauses_ms(self, phases: Sequence[RunPhase]) -> dict[str, float]:
        found = [pause_s for phase in phases for _, pause_s in self.pauses(phase.begun_s, phase.ended_s)]
        return {name: round(value, 1) for name, value in summary(found, PAUSES, MS).items()} if found else {}
