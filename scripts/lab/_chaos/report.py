# SPDX-License-Identifier: Apache-2.0
"""The record of a run, its figures as one JSON object, and whether they are what was promised."""
import collections
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from _chaos.blows import Blow, GivenBlow
from _chaos.load import ChaosRequest
from _chaos.rest import Rest
from vllm_pd.bench.report import MS, summary

DONE = "attempts_total:done"  # of a decode engine: the prompts whose KV it got from a prefill engine
OTHER_RUNS = {"warm_up": "in the warm-up", "calm": "in the calm run", "afterwards": "after the last blow"}


@dataclass
class GaugeSample:
    """The gauges of one engine at one time."""
    place: str
    time: float
    gauges: dict


@dataclass
class SeenFallback:
    """An attempt that ended without the KV, and the blow to its prefill engine that caused it, if one did."""
    request: int
    reason: str
    time: float
    cause: GivenBlow | None


@dataclass
class RunRecord:
    """All that was seen in one run. `handed_over`: how many prompts were prefilled elsewhere in it."""
    requests: dict[int, ChaosRequest] = field(default_factory=dict)
    struck: list[GivenBlow] = field(default_factory=list)
    fallbacks: list[SeenFallback] = field(default_factory=list)
    samples: list[GaugeSample] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # how long each engine took to come up, in seconds
    counters: dict[str, dict[str, float]] = field(default_factory=dict)  # the last of each engine, also of dead ones
    handed_over: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0


def spread(values: Iterable[float], scale: float = 1.0) -> dict[str, float]:
    """Count, p50, p99 and max of values."""
    found = list(values)
    return {"count": len(found), **summary(found, "p50 p99 max", scale)}


def handed_over(before: Mapping[str, dict[str, float]], after: Mapping[str, dict[str, float]]) -> int:
    """How many prompts were handed over between two readings of the counters of each engine's life. A life that was not
    there before began at 0."""
    return round(sum(counters.get(DONE, 0) - before.get(life, {}).get(DONE, 0) for life, counters in after.items()))


def judge(warm_up: RunRecord, calm: RunRecord, chaos: RunRecord, afterwards: RunRecord, rest: Rest,
          growth: dict) -> dict:
    """The figures of a session's runs, in this order. Times are in seconds, ITL in milliseconds."""
    requests = list(chaos.requests.values())
    kills, stops = ({blow for blow in Blow if blow.is_kill is is_kill} for is_kill in (True, False))
    to_end_after_kill = _from_blow_to_end(chaos, kills)
    return {
        "requests": len(requests),
        "requests_by_end": _count(request.end.value for request in requests),
        "blows": len(chaos.struck),
        "kills": sum(struck.blow in kills for struck in chaos.struck),
        "stops": sum(struck.blow in stops for struck in chaos.struck),
        "blows_by_kind": dict(collections.Counter(struck.blow.value for struck in chaos.struck)),
        "wrong_answers": sum(request.wrong for request in requests),
        "wrong_requests": [request.number for request in requests if request.wrong],
        "unfinished": sum(request.is_open for request in requests),
        "unfinished_requests": [request.number for request in requests if request.is_open],
        "leaked_blocks": rest.leaked_blocks,
        "not_at_rest": rest.left,
        "grown_since_calm": growth,
        "handed_over": chaos.handed_over,
        "lost_with_their_d": sum(request.tries > 1 for request in requests),
        "lost_with_their_d_answered_right_elsewhere": sum(
            request.tries > 1 and request.answered and request.right for request in requests),
        "felt_a_blow": sum(bool(request.hit_by) for request in requests),
        "fell_back": sum(bool(request.fallbacks) for request in requests),
        "fallbacks_by_reason": _count(fallback.reason for fallback in chaos.fallbacks),
        "fallbacks_without_a_blow_to_p": _count(f.reason for f in chaos.fallbacks if f.cause is None),
        "longest_from_kill_to_end_s": max(to_end_after_kill, default=0.0),
        "from_kill_to_end_s": spread(to_end_after_kill),
        "from_stop_to_end_s": spread(_from_blow_to_end(chaos, stops)),
        "from_kill_of_p_to_fallback_s": spread(_from_blow_to_fallback(chaos, Blow.KILL_P, "peer")),
        "from_stop_of_p_to_fallback_s": spread(_from_blow_to_fallback(chaos, Blow.STOP_P, "lease")),
        "itl_calm_ms": spread(_gaps(calm.requests.values()), MS),
        "itl_unaffected_ms": spread(_gaps(r for r in requests if _unaffected(r)), MS),
        "unaffected": sum(_unaffected(request) for request in requests),
        "time_to_end_calm_s": spread(_durations(calm.requests.values())),
        "time_to_end_s": spread(_durations(requests)),
        "engine_start_s": spread(chaos.starts),
        "counters": _sum(chaos.counters.values()),
        "took_s": round(chaos.ended_at - chaos.began_at, 1),
        "warm_up": _in_short(warm_up),
        "calm": _in_short(calm),
        "afterwards": _in_short(afterwards),
    }


def faults(figures: dict) -> list[str]:
    """What is not as promised. Nothing else makes a run fail."""
    found = [f"{figures[name]} {name.replace('_', ' ')}: {figures.get(detail, '')}"
             for name, detail in (("wrong_answers", "wrong_requests"), ("unfinished", "unfinished_requests"))
             if figures[name]]
    found += [f"{figures[run][name]} {name.replace('_', ' ')} {where}" for run, where in OTHER_RUNS.items()
              for name in ("wrong_answers", "unfinished") if figures[run][name]]
    found += [f"no prompt was handed over {where}" for where, count in (
        ("during the blows", figures["handed_over"]),
        (OTHER_RUNS["afterwards"], figures["afterwards"]["handed_over"])) if not count]
    found += [f"{place} is not at rest: {counts}" for place, counts in figures["not_at_rest"].items()]
    found += [f"{place} has grown (is, was): {counts}" for place, counts in figures["grown_since_calm"].items()]
    return found


def _in_short(record: RunRecord) -> dict:
    requests = record.requests.values()
    return {"requests": len(requests), "handed_over": record.handed_over,
            "fallbacks": _count(fallback.reason for fallback in record.fallbacks),
            "wrong_answers": sum(request.wrong for request in requests),
            "unfinished": sum(request.is_open for request in requests)}


def _unaffected(request: ChaosRequest) -> bool:
    return request.answered and not request.hit_by and not request.fallbacks


def _gaps(requests: Iterable[ChaosRequest]) -> Iterable[float]:
    for request in requests:
        yield from (later - earlier for earlier, later in itertools.pairwise(request.token_times))


def _durations(requests: Iterable[ChaosRequest]) -> Iterable[float]:
    return (request.ended_at - request.asked_at for request in requests if request.answered)


def _from_blow_to_end(record: RunRecord, kinds: set[Blow]) -> list[float]:
    """Seconds from a blow to the end of each request that it affected. A blow to the broker affects none directly."""
    return [round(request.ended_at - struck.at, 3) for struck in record.struck if struck.blow in kinds
            for request in map(record.requests.get, struck.felt_by)
            if request.answered and request.ended_at > struck.at]


def _from_blow_to_fallback(record: RunRecord, kind: Blow, reason: str) -> list[float]:
    """Seconds from a blow to a P until D's step loop has the fallback of an attempt that this P had."""
    return [fallback.time - fallback.cause.at for fallback in record.fallbacks
            if fallback.cause is not None and fallback.cause.blow is kind and fallback.reason == reason]


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(values).items()))


def _sum(counters: Iterable[dict[str, float]]) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for counts in counters:
        total.update({name: value for name, value in counts.items() if not name.startswith("handover_seconds")})
    return {name: round(value, 3) for name, value in sorted(total.items()) if value}
