# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pd planner` reads of a fleet, pure: from two readings of all engines to those of the two roles, and which
engine may change its role.

An engine that drains counts for nothing. One is *unread* where its figures are not there, now or in the reading before,
or its counters began anew in between; so is each further rank of a data-parallel server, whose figures its first rank
has. What an engine does not say is never taken for idle.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from vllm_pd.decisions.wanted import DecodeReading, PrefillReading
from vllm_pd.ops.scrape import MetricsSnapshot
from vllm_pd.ops.top import WANTED as OF_TOP
from vllm_pd.ops.top import FleetReading, MemberReading, degraded_reason
from vllm_pd.peer.degraded import Cause
from vllm_pd.protocol.messages import Member, Role

TTFT = "vllm:time_to_first_token_seconds"
ITLS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")  # V1's name, V0's
USAGES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
BLOCKS = "vllm:cache_config_info"
JOB_TOKENS, JOBS = "vllm:pd_job_tokens_total", "vllm:pd_jobs_total"
HANDOVER = "vllm:pd_handover_seconds"
STAGES = ("queue", "claim", "prefill", "transfer")  # until the KV has come
WANTED = (*OF_TOP, JOB_TOKENS, BLOCKS, *(f"{name}_{part}" for name in (TTFT, *ITLS) for part in ("sum", "count")))
_GROWING = (JOBS, JOB_TOKENS, f"{TTFT}_count", f"{HANDOVER}_count")


class ReadEngine(NamedTuple):
    """An engine over an interval. `added`: what its counters have gained, None where it is unread."""
    reading: MemberReading
    added: MetricsSnapshot | None
    passed_s: float

    @property
    def member(self) -> Member:
        """Its registry entry."""
        return self.reading.member


def acts_as(member: Member) -> Role:
    """The role that counts: an engine that acts as `kv_both` has clients, and is a decode engine."""
    return Role.DECODE if member.role.decodes else Role.PREFILL


def pair(before: FleetReading | None, after: FleetReading) -> list[ReadEngine]:
    """Each engine that does not drain, with what has happened between the two readings."""
    earlier = {} if before is None else {one.member.incarnation: one for one in before.engines}
    return [_since(earlier.get(one.member.incarnation), one) for one in after.engines if not one.member.draining]


def _since(before: MemberReading | None, now: MemberReading) -> ReadEngine:
    unread = ReadEngine(now, None, 0.0)
    if now.figures is None or now.fault or before is None or before.figures is None or before.at_s >= now.at_s:
        return unread
    added = now.figures.since(before.figures)
    if any(added.value(name) < 0 for name in _GROWING) or now.figures.value("vllm:pd_control_dead"):
        return unread
    return ReadEngine(now, added, now.at_s - before.at_s)


def read_roles(before: FleetReading | None, after: FleetReading) -> tuple[PrefillReading, DecodeReading]:
    """Both roles over the interval between two readings of a fleet."""
    engines = pair(before, after)
    earlier = {} if before is None else {one.member.incarnation: one.member for one in before.engines}
    prefill = [one for one in engines if acts_as(one.member) is Role.PREFILL]
    decode = [one for one in engines if acts_as(one.member) is Role.DECODE]
    work = _read_work(engines, prefill, (0 if before is None else before.queue_length, after.queue_length), earlier)
    return (PrefillReading(len(prefill), _unread(prefill), work.busy, work.wait_s, work.compute_s),
            _read_decode(decode, earlier, work))


def _unread(engines: Iterable[ReadEngine]) -> int:
    return sum(one.added is None for one in engines)


class _Work(NamedTuple):
    """What prefill engines had to do; see `PrefillReading`. `handover_sum_s`: all stages of all hand-overs until their
    KV had come."""
    busy: float
    wait_s: float
    compute_s: float
    handover_sum_s: float


def _read_work(engines: Iterable[ReadEngine], prefill: list[ReadEngine], queued: tuple[int, int],
               earlier: Mapping[str, Member]) -> _Work:
    """`queued`: jobs that wait at the broker, before and now. The work is what prefill engines have computed, and what
    has piled up; what decode engines that act as `kv_both` do beside is not theirs."""
    read = [one for one in engines if one.added is not None]
    of_job = _tokens_of_job(read)
    speeds = [one.member.load.tokens_per_s for one in prefill if one.member.load.tokens_per_s]
    done = [one.added.value(JOB_TOKENS) for one in prefill if one.added is not None]
    speed = _mean(speeds) * len(prefill)  # one that has computed nothing yet is as fast as the others
    backlog_before, backlog = (
        jobs * of_job + sum(one.load.job_tokens for one in members) for jobs, members in zip(queued, (
            [earlier[one.member.incarnation] for one in prefill if one.member.incarnation in earlier],
            [one.member for one in prefill]), strict=True))
    passed_s = _mean([one.passed_s for one in read])
    handovers = _sum(read, f"{HANDOVER}_count", stage="prefill")
    sums_s = {stage: _sum(read, f"{HANDOVER}_sum", stage=stage) for stage in STAGES}
    mean_s = {stage: seconds / handovers if handovers else 0.0 for stage, seconds in sums_s.items()}
    compute_s = min(of_job / _mean(speeds), mean_s["prefill"]) if speeds else mean_s["prefill"]
    waited_s = mean_s["queue"] + mean_s["prefill"] - compute_s
    could = _mean(speeds) * len(done) * passed_s  # tokens, of those that were read
    return _Work(max(0.0, (sum(done) + backlog - backlog_before) / could) if could else 0.0,
                 max(waited_s, backlog / speed if speed else 0.0), compute_s + mean_s["transfer"], sum(sums_s.values()))


def _tokens_of_job(read: Collection[ReadEngine]) -> float:
    """How long a job was on average in the interval; without one since the engines' starts."""
    jobs, tokens = _sum(read, JOBS), _sum(read, JOB_TOKENS)
    if not jobs:
        jobs, tokens = (sum(one.reading.figures.value(name) for one in read) for name in (JOBS, JOB_TOKENS))
    return tokens / jobs if jobs else 0.0


def _read_decode(decode: list[ReadEngine], earlier: Mapping[str, Member], work: _Work) -> DecodeReading:
    """Requests that wait at one moment may be gone in the next, so the lower number of both counts."""
    read = [one for one in decode if one.added is not None]
    blocks = sum(map(_blocks, read))
    parked = sum(one.reading.figures.value("vllm:pd_parked_blocks") for one in read)
    first_tokens = _sum(read, f"{TTFT}_count")
    return DecodeReading(
        len(decode), _unread(decode), _mean([_usage(one.reading.figures) for one in read]),
        min(1.0, parked / blocks) if blocks else 0.0, sum(one.member.load.running for one in decode),
        min(sum(one.member.load.waiting for one in decode),
            sum(earlier[one.member.incarnation].load.waiting for one in decode if one.member.incarnation in earlier)),
        _mean_of(read, *ITLS), _mean_of(read, TTFT),
        work.handover_sum_s / first_tokens if first_tokens else 0.0)


def _usage(figures: MetricsSnapshot) -> float:
    """The share of its KV blocks in use; of several ranks the mean."""
    return _mean([value for name in USAGES for value in figures.by(name, "engine").values()])


def _blocks(one: ReadEngine) -> float:
    """Its KV blocks; 0 where it does not say."""
    found = one.reading.figures.by(BLOCKS, "num_gpu_blocks")
    return sum(float(number) for (number, ) in found if number.isdecimal())


def _sum(read: Iterable[ReadEngine], name: str, **labels: str) -> float:
    return sum(one.added.value(name, **labels) for one in read)


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _mean_of(read: Collection[ReadEngine], *names: str) -> float | None:
    """The mean of histograms; None where nothing was counted."""
    count = sum(_sum(read, f"{name}_count") for name in names)
    return sum(_sum(read, f"{name}_sum") for name in names) / count if count > 0 else None


def choose(before: FleetReading | None, after: FleetReading, to: Role, avoided: Collection[str]) -> Member | None:
    """The engine of the other role that has least to do, and may change its role; None without one. Not one that
    drains, is degraded, was not read, or is one of several ranks of a server; nor those `avoided`, nor the last one of
    its role that is well."""
    engines = pair(before, after)
    lacking = not any(acts_as(one.member) is to for one in engines)
    well = [one for one in engines if acts_as(one.member) is not to and one.added is not None
            and _is_well(one.reading, lacking)]
    found = [one for one in well if one.member.incarnation not in avoided
             and len(one.reading.figures.by("vllm:num_requests_running", "engine")) <= 1]
    return min(found, key=_burden).member if found and len(well) > 1 else None


def _is_well(reading: MemberReading, lacking: bool) -> bool:
    """Whether it is not degraded; for nobody to work with only where there is nobody, which the change mends."""
    reason = degraded_reason(reading.figures)
    return not reason or (lacking and reason == Cause.PEER.value)


def _burden(one: ReadEngine) -> tuple[float, float, str]:
    figures, load = one.reading.figures, one.member.load
    requests = figures.value("vllm:num_requests_running") + figures.value("vllm:num_requests_waiting")
    return requests, load.job_tokens, one.member.incarnation
