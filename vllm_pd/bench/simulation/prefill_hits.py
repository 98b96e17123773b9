# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench router --hit-rate --prefill N`: what the choice of the prefill engine is worth.

The same trace, router and decode engines each time; behind them the prefill engines and the broker's registry, with
four rules. *slots*: credits count jobs alone, as those of older releases, and the engine with the most free slots gets
a job. *tokens*: the broker's rule. *nats*: the same rule without a broker, by each decode engine for its own jobs. *one
pool*: no choice is left, one engine is as large and as fast as all together.
"""
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from vllm_pd.bench import report
from vllm_pd.bench.report import ShowLine
from vllm_pd.bench.simulation import oracle
from vllm_pd.bench.simulation.hits import POOL, FleetConfig, HitFigures, by_policy, simulate
from vllm_pd.bench.simulation.prefills import PrefillFleet
from vllm_pd.bench.simulation.trace import Arrival, TraceConfig, make
from vllm_pd.bench.simulation.workers import blocks_of, require_fit
from vllm_pd.errors import ConfigError
from vllm_pd.router.policy import Policy, RoutingPolicyConfig

SPEED = 8000.0  # prompt tokens per second of one engine
RULES = ("slots", "nats", "tokens", POOL)


class PrefillBench(msgspec.Struct, frozen=True):
    """What is measured: each rule, on a trace for each seed, at each rate at which conversations begin. The caches of
    all decode engines, and those of all prefill engines, hold these shares of the distinct blocks of the trace."""
    prefills: int = 4
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (3.0, 6.0)
    decode_share: float = 0.25
    prefill_share: float = 0.5
    trace: TraceConfig = TraceConfig(conversations=400, documents=60, document_tokens=4000, document_share=0.6)
    fleet: FleetConfig = FleetConfig()
    policy: RoutingPolicyConfig = RoutingPolicyConfig()

    @classmethod
    def of(cls, prefills: int, workers: int | None, seed: int) -> "PrefillBench":
        """With so many engines of both kinds (None: the default), and three seeds from `seed` on."""
        workers = FleetConfig().workers if workers is None else workers
        for name, value in (("--workers", workers), ("--prefill", prefills)):
            if value < 1:
                raise ConfigError(name, value, "give 1 or more")
        return cls(prefills, (seed, seed + 1, seed + 2), fleet=FleetConfig(workers=workers))


def measure(bench: PrefillBench, show: ShowLine = print) -> dict[str, Any]:
    """Runs it all, showing a line for each run. The report, ready for JSON."""
    runs = []
    traces = {(seed, rate): make(msgspec.structs.replace(bench.trace, seed=seed, conversations_per_s=rate))
              for seed in bench.seeds for rate in bench.rates}
    for trace in traces.values():
        _check(bench, trace)
    for (seed, rate), trace in traces.items():
        footprint = oracle.footprint_blocks(trace, bench.fleet.block_size)
        for rule in RULES:
            result = simulate(trace, fleet_of(bench, rule, footprint), by_policy(bench.policy, Policy.KV), seed)
            show(f"seed {seed}, {rate:g}/s, {rule}: {_line(result)}")
            runs.append({"seed": seed, "rate": rate, "rule": rule, "requests": len(trace),
                         "footprint_blocks": footprint, "result": msgspec.to_builtins(result)})
    return {"bench": msgspec.to_builtins(bench), "runs": runs, "summary": [
        _over_seeds(rate, rule, [run["result"] for run in runs if (run["rate"], run["rule"]) == (rate, rule)])
        for rate in bench.rates for rule in RULES]}


def _check(bench: PrefillBench, trace: Sequence[Arrival]) -> None:
    """Raises ConfigError where a request of the trace fits no engine."""
    size = bench.fleet.block_size
    footprint = oracle.footprint_blocks(trace, size)
    require_fit("--workers", bench.fleet.workers, bench.decode_share * footprint,
                max(blocks_of(arrival, size) for arrival in trace))
    require_fit("--prefill", bench.prefills, bench.prefill_share * footprint,
                max(len(arrival.prompt) // size + 1 for arrival in trace))


def fleet_of(bench: PrefillBench, rule: str, footprint: int) -> FleetConfig:
    """The engines, for a trace with so many distinct blocks."""
    blocks = round(bench.prefill_share * footprint / bench.prefills)
    prefill = PrefillFleet((SPEED, ) * bench.prefills, blocks, bench.fleet.block_size, count_tokens=rule != "slots",
                           nats=rule == "nats")
    if rule == POOL:
        prefill = msgspec.structs.replace(prefill, speeds=(SPEED * bench.prefills, ), blocks=blocks * bench.prefills,
                                          max_prefill_jobs=prefill.max_prefill_jobs * bench.prefills)
    worker_blocks = round(bench.decode_share * footprint / bench.fleet.workers)
    return msgspec.structs.replace(bench.fleet, worker_blocks=worker_blocks, prefill=prefill)


def _line(result: HitFigures) -> str:
    prefill = result.prefill
    if prefill is None:
        return "no prompt went to a prefill engine"
    return (f"{prefill.jobs} jobs, {prefill.hit_share:.1%} hits on P, skew {prefill.skew:.2f}, {prefill.mean_s:.3f} s, "
            f"TTFT {result.mean_ttft_s:.3f} s, {result.hit_share:.1%} hits on D")


def _over_seeds(rate: float, rule: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds; of hits and skew also the lowest and the highest."""
    means: dict[str, Any] = {"rate": rate, "rule": rule}
    for key in ("hit_share", "mean_ttft_s", "p99_ttft_s"):
        means[key] = statistics.fmean(result[key] for result in results)
    found = [result["prefill"] for result in results if result["prefill"] is not None]
    for key in ("jobs", "computed_tokens", "hit_share", "skew", "mean_s", "p99_s") if found else ():
        values = [each[key] for each in found]
        means[f"p_{key}"] = statistics.fmean(values)
        if key in ("hit_share", "skew"):
            means |= {f"p_{key}_low": min(values), f"p_{key}_high": max(values)}
    return means


def table(found: dict[str, Any]) -> Table:
    """The means over the seeds."""
    rows = [[f"{each['rate']:g}", each["rule"], f"{each['p_hit_share']:.1%}",
             f"{each['p_hit_share_low']:.1%} to {each['p_hit_share_high']:.1%}", f"{each['p_computed_tokens']:,.0f}",
             f"{each['p_skew']:.2f} ({each['p_skew_high']:.2f})", f"{each['p_mean_s']:.3f} / {each['p_p99_s']:.3f}",
             f"{each['mean_ttft_s']:.3f} / {each['p99_ttft_s']:.3f}", f"{each['hit_share']:.1%}"]
            for each in found["summary"] if "p_jobs" in each]
    return report.table(["rate", "rule", "hits on P", "range", "computed on P", "skew (most)", "job mean / p99, s",
                         "TTFT mean / p99, s", "hits on D"], rows, text=2)
