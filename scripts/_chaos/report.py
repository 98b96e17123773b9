# SPDX-License-Identifier: Apache-2.0
"""What a run showed, as one JSON object, and whether it is what was promised."""
import collections
from collections.abc import Iterable

from _chaos.blows import Blow
from _chaos.load import ChaosRequest, RequestEnd
from _chaos.record import RunRecord
from _chaos.rest import Rest

PERCENTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def spread(values: Iterable[float], scale: float = 1.0) -> dict[str, float]:
    """count, p50, p99 and max of values."""
    ordered = sorted(values)
    result: dict[str, float] = {"count": len(ordered)}
    for name, share in PERCENTILES.items() if ordered else ():
        result[name] = round(scale * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
    return result


def judge(calm: RunRecord, chaos: RunRecord, rest: Rest, growth: dict) -> dict:
    """The figures of a run. Times are in seconds, ITL in milliseconds."""
    requests = list(chaos.requests.values())
    blows = collections.Counter(struck.blow.value for struck in chaos.struck)
    return {
        "requests": len(requests),
        "requests_by_end": _count(request.end.value for request in requests),
        "blows": len(chaos.struck),
        "kills": sum(struck.blow.is_kill for struck in chaos.struck),
        "stops": sum(not struck.blow.is_kill for struck in chaos.struck),
        "blows_by_kind": dict(blows),
        "wrong_answers": sum(request.end is RequestEnd.ANSWERED and not request.right for request in requests),
        "wrong_requests": [request.number for request in requests
                           if request.end is RequestEnd.ANSWERED and not request.right],
        "unfinished": sum(request.end is RequestEnd.OPEN for request in requests),
        "unfinished_requests": [request.number for request in requests if request.end is RequestEnd.OPEN],
        "leaked_blocks": rest.leaked_blocks,
        "not_at_rest": rest.left,
        "grown_since_calm": growth,
        "lost_with_their_d": sum(request.tries > 1 for request in requests),
        "lost_with_their_d_answered_right_elsewhere": sum(
            request.tries > 1 and request.end is RequestEnd.ANSWERED and request.right for request in requests),
        "felt_a_blow": sum(bool(request.hit_by) for request in requests),
        "fell_back": sum(bool(request.fallbacks) for request in requests),
        "fallbacks_by_reason": _count(fallback.reason for fallback in chaos.fallbacks),
        "fallbacks_without_a_blow_to_p": _count(f.reason for f in chaos.fallbacks if f.cause is None),
        "longest_from_kill_to_end_s": max(_from_blow_to_end(chaos, {b for b in Blow if b.is_kill}), default=0.0),
        "from_kill_to_end_s": spread(_from_blow_to_end(chaos, {b for b in Blow if b.is_kill})),
        "from_stop_to_end_s": spread(_from_blow_to_end(chaos, {b for b in Blow if not b.is_kill})),
        "from_kill_of_p_to_fallback_s": spread(_from_blow_to_fallback(chaos, Blow.KILL_P, "peer")),
        "from_stop_of_p_to_fallback_s": spread(_from_blow_to_fallback(chaos, Blow.STOP_P, "lease")),
        "itl_calm_ms": spread(_gaps(calm.requests.values()), 1000),
        "itl_unaffected_ms": spread(_gaps(r for r in requests if _unaffected(r)), 1000),
        "unaffected": sum(_unaffected(request) for request in requests),
        "time_to_end_calm_s": spread(_durations(calm.requests.values())),
        "time_to_end_s": spread(_durations(requests)),
        "engine_start_s": spread(chaos.starts),
        "counters": _sum(chaos.counters.values()),
        "took_s": round(chaos.ended_at - chaos.began_at, 1),
        "calm": {"requests": len(calm.requests), "fallbacks": _count(f.reason for f in calm.fallbacks),
                 "wrong_answers": sum(r.end is RequestEnd.ANSWERED and not r.right for r in calm.requests.values()),
                 "unfinished": sum(r.end is RequestEnd.OPEN for r in calm.requests.values())},
    }


def faults(figures: dict) -> list[str]:
    """What is not as promised; nothing else makes a run fail."""
    found = [f"{figures[name]} {name.replace('_', ' ')}: {figures.get(detail, '')}"
             for name, detail in (("wrong_answers", "wrong_requests"), ("unfinished", "unfinished_requests"))
             if figures[name]]
    found += [f"{figures['calm'][name]} {name.replace('_', ' ')} in the calm run" for name in
              ("wrong_answers", "unfinished") if figures["calm"][name]]
    found += [f"{place} is not at rest (is, should be): {counts}" for place, counts in figures["not_at_rest"].items()]
    found += [f"{place} has grown (is, was): {counts}" for place, counts in figures["grown_since_calm"].items()]
    return found


def _unaffected(request: ChaosRequest) -> bool:
    return request.end is RequestEnd.ANSWERED and not request.hit_by and not request.fallbacks


def _gaps(requests: Iterable[ChaosRequest]) -> Iterable[float]:
    for request in requests:
        times = request.token_times
        yield from (later - earlier for earlier, later in zip(times, times[1:], strict=False))


def _durations(requests: Iterable[ChaosRequest]) -> Iterable[float]:
    return (request.ended_at - request.asked_at for request in requests if request.end is RequestEnd.ANSWERED)


def _from_blow_to_end(record: RunRecord, kinds: set[Blow]) -> list[float]:
    """From a blow to the end of each request that felt it. A broker's blow is felt by nobody in particular."""
    return [round(request.ended_at - struck.at, 3) for struck in record.struck if struck.blow in kinds
            for request in map(record.requests.get, struck.felt_by) if request.end is RequestEnd.ANSWERED
            and request.ended_at > struck.at]


def _from_blow_to_fallback(record: RunRecord, kind: Blow, reason: str) -> list[float]:
    """From a blow to a P to the moment at which D's step loop has the fallback of an attempt that P held."""
    return [fallback.time - fallback.cause.at for fallback in record.fallbacks
            if fallback.cause is not None and fallback.cause.blow is kind and fallback.reason == reason]


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(values).items()))


def _sum(counters: Iterable[dict[str, float]]) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for counts in counters:
        total.update({name: value for name, value in counts.items() if not name.startswith("handover_seconds")})
    return {name: round(value, 3) for name, value in sorted(total.items()) if value}
