# SPDX-License-Identifier: Apache-2.0
"""From readings of a fleet's figures to looks at it, for `vllm-pd planner`. Pure.

What an engine counted is what its page has more than at the reading before. An engine that was not read, or whose
counters began anew, adds nothing to that look; a figure that is no number, or below 0, counts as 0.
"""
import math

from vllm_pd.decisions.demand import FleetLook, Targets
from vllm_pd.ops.scrape import MetricsSnapshot
from vllm_pd.ops.top import FleetReading, MemberReading

TTFT = "vllm:time_to_first_token_seconds"
ITL_NAMES = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")  # V1's, V0's
PER_REQUEST = "vllm:request_time_per_output_token_seconds"  # V1's; without it the time of each token counts
ANSWERS = "vllm:request_generation_tokens"
WANTED = ("vllm:num_requests_running", "vllm:num_requests_waiting", TTFT, *ITL_NAMES, PER_REQUEST, ANSWERS,
          "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total", "vllm:pd_parked_blocks", "vllm:pd_degraded",
          "vllm:pd_control_dead")
MAX_VALUE = 1e15


def look_at(before: FleetReading, after: FleetReading, targets: Targets) -> FleetLook:
    """What was counted between two readings, and what holds now. A client's request is counted by the engine that it
    asked: a decode engine, or one that is both."""
    earlier = {one.member.incarnation: one for one in before.engines}
    clients = [(earlier.get(one.member.incarnation), one) for one in after.engines
               if one.member.role.decodes and one.figures is not None]
    both = [added for old, new in clients if (added := _added(old, new)) is not None]
    at_s = max((one.at_s for one in after.engines), default=0.0)

    def total(name: str) -> float:
        return math.fsum(_figure(added, name) for added in both)

    first, answers = total(f"{TTFT}_count"), total(f"{ANSWERS}_count")
    tokens = math.fsum(total(f"{name}_count") for name in ITL_NAMES)
    seconds = math.fsum(total(f"{name}_sum") for name in ITL_NAMES)
    running, waiting = (math.fsum(_figure(one.figures, f"vllm:num_requests_{which}") for _, one in clients)
                        for which in ("running", "waiting"))
    paces = (PER_REQUEST, ) if total(f"{PER_REQUEST}_count") else ITL_NAMES
    grown = math.fsum(_open(new.figures) - _open(old.figures) for old, new in clients
                      if old is not None and old.figures is not None)
    prompt_tokens = max(0.0, total("vllm:prompt_tokens_total") - total("vllm:prefix_cache_hits_total"))
    return FleetLook(
        at_s, max(0.0, answers + grown), prompt_tokens, answers, total(f"{ANSWERS}_sum"),
        seconds / tokens if tokens else 0.0, first, _above(both, (TTFT, ), targets.ttft_s) * first, running, waiting,
        len(clients), _prefill_speed(after),
        math.fsum(_figure(one.figures, "vllm:pd_parked_blocks") * max(0, one.member.fingerprint.block_size)
                  for _, one in clients), _above(both, paces, targets.itl_s) * answers)


def _added(before: MemberReading | None, now: MemberReading) -> MetricsSnapshot | None:
    """None where there is nothing to compare with, or the counters began anew."""
    if before is None or before.figures is None or now.at_s <= before.at_s:
        return None
    names = (f"{TTFT}_count", f"{ANSWERS}_count", "vllm:prompt_tokens_total")
    if any(now.figures.value(name) < before.figures.value(name) for name in names):
        return None
    return now.figures.since(before.figures)


def _figure(figures: MetricsSnapshot, name: str) -> float:
    value = figures.value(name)
    return min(max(0.0, value), MAX_VALUE) if not math.isnan(value) else 0.0


def _open(figures: MetricsSnapshot) -> float:
    return _figure(figures, "vllm:num_requests_running") + _figure(figures, "vllm:num_requests_waiting")


def _above(added: list[MetricsSnapshot], names: tuple[str, ...], bound_s: float) -> float:
    """The share of what histograms counted above a bound, of 1: of what is above the first bucket that holds it."""
    buckets: dict[float, float] = {}
    for one in added:
        for name in names:
            for (edge, ), count in one.by(f"{name}_bucket", "le").items():
                if (edge_s := _number(edge)) is not None and math.isfinite(count):
                    buckets[edge_s] = buckets.get(edge_s, 0.0) + max(0.0, count)
    held = min((edge for edge in buckets if edge >= bound_s), default=None)
    whole = buckets.get(math.inf, 0.0)
    return min(1.0, max(0.0, 1 - buckets[held] / whole)) if held is not None and whole > 0 else 0.0


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _prefill_speed(reading: FleetReading) -> float:
    """The mean of the prefill engines that have measured theirs; 0 where none has."""
    speeds = [one.member.load.tokens_per_s for one in reading.engines
              if one.member.role.prefills and math.isfinite(one.member.load.tokens_per_s)
              and one.member.load.tokens_per_s > 0]
    return math.fsum(speeds) / len(speeds) if speeds else 0.0
