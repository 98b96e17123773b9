# SPDX-License-Identifier: Apache-2.0
"""The prefix hits that each routing policy gets out of a trace, against what any could get.

The router's own index and policy decide over simulated `workers`: events reach the index with a delay, loads are
reported as seldom as engines report them, and the router counts on what it has just sent. Beside the policies stand
three results that no router can have: `oracle.bound`, which is what a trace allows at all; *one pool*, a single worker
as large and as fast as all together, with the allocator's own eviction; and the best *placement* that a search finds
which knows the whole trace.
"""
import functools
import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from vllm_pd.bench import report
from vllm_pd.bench.report import ShowLine
from vllm_pd.bench.simulation import oracle
from vllm_pd.bench.simulation.placement import PlacementSearch
from vllm_pd.bench.simulation.prefills import PrefillFigures, PrefillFleet, SimFleet
from vllm_pd.bench.simulation.trace import Arrival, TraceConfig, make
from vllm_pd.bench.simulation.workers import SimSpeed, SimWorker, blocks_of, require_fit
from vllm_pd.errors import ConfigError
from vllm_pd.router.index import PrefixIndex
from vllm_pd.router.policy import Candidate, Choice, ChoiceReason, PlacementRequest, Policy, RoutingPolicyConfig, choose

EXPECT_S = 5.0  # how long the router counts on what it has sent
POOL = "one pool"
PLACED = "offline placement"
Decide = Callable[[PlacementRequest, Sequence[Candidate], random.Random], Choice | None]
POLICIES = (Policy.KV, Policy.CONSISTENT_HASH, Policy.LEAST_LOAD, Policy.ROUND_ROBIN)


class FleetConfig(msgspec.Struct, frozen=True):
    """The workers, and how late the router learns about them."""
    workers: int = 4
    worker_blocks: int = 4096
    block_size: int = 16
    speed: SimSpeed = SimSpeed()
    event_delay_s: float = 0.01
    load_period_s: float = 0.1
    prefill: PrefillFleet | None = None  # prefill engines behind the workers

    def pooled(self) -> "FleetConfig":
        """One worker as large and as fast as all of these together."""
        speed = msgspec.structs.replace(self.speed, prefill_tokens_per_s=self.speed.prefill_tokens_per_s * self.workers)
        return msgspec.structs.replace(self, workers=1, worker_blocks=self.workers * self.worker_blocks, speed=speed)


class HitBench(msgspec.Struct, frozen=True):
    """What is measured: each policy, on a trace for each seed, with each size of cache. A size is all workers' blocks
    together as a share of the distinct blocks of the trace."""
    seeds: tuple[int, ...] = (0, 1, 2)
    pool_shares: tuple[float, ...] = (0.25, 0.5, 1.0)
    trace: TraceConfig = TraceConfig(conversations=300)
    fleet: FleetConfig = FleetConfig()
    policy: RoutingPolicyConfig = RoutingPolicyConfig()
    moves: int = 20_000  # of the search for a placement

    @classmethod
    def of(cls, workers: int | None, seed: int) -> "HitBench":
        """With so many workers (None: the default), and three seeds from `seed` on."""
        workers = FleetConfig().workers if workers is None else workers
        if workers < 1:
            raise ConfigError("--workers", workers, "give 1 or more")
        return cls(seeds=(seed, seed + 1, seed + 2), fleet=FleetConfig(workers=workers))


class HitFigures(msgspec.Struct, frozen=True):
    """The figures of one run. Shares are of 1. `spread`: the most prompt tokens that one worker computed, over the mean
    of all workers."""
    hit_share: float
    mean_ttft_s: float
    p99_ttft_s: float
    spread: float
    reasons: dict[str, int]
    prefill: PrefillFigures | None = None


class FixedPlacement:
    """Decides from a list: `workers` has the number of a worker for each request of the trace."""

    def __init__(self, workers: Sequence[int]) -> None:
        self.workers = workers

    def __call__(self, request: PlacementRequest, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        chosen = candidates[self.workers[request.turn]]
        return Choice(chosen.name, Policy.KV, ChoiceReason.TURN, chosen.overlap_blocks, request.prompt_blocks,
                      len(candidates))


def simulate(trace: Sequence[Arrival], fleet: FleetConfig, decide: Decide, seed: int = 0,
             placed: list[int] | None = None) -> HitFigures:
    """Routes the trace. What is drawn comes from `seed`. The number of each request's worker is appended to
    `placed`."""
    rng = random.Random(seed)
    index = PrefixIndex(fleet.block_size)
    in_flight: list[tuple[float, int, tuple]] = []  # heap: when it arrives, number, event
    numbers = iter(range(1 << 62))

    def stored(worker: SimWorker, hashes: list[int], parent: int | None, token_ids: list[int], at_s: float) -> None:
        event = (worker.name, hashes, parent, token_ids, fleet.block_size)
        heapq.heappush(in_flight, (at_s + fleet.event_delay_s, next(numbers), event))

    def removed(worker: SimWorker, hashes: list[int], at_s: float) -> None:
        heapq.heappush(in_flight, (at_s + fleet.event_delay_s, next(numbers), (worker.name, hashes)))

    workers = {name: SimWorker(name, fleet.worker_blocks, fleet.block_size, fleet.speed, stored, removed)
               for name in (f"w{number}" for number in range(fleet.workers))}
    engines = SimFleet(list(workers.values()), fleet.prefill)
    names_of = list(workers)
    loads = {name: worker.load() for name, worker in workers.items()}
    sent = dict.fromkeys(workers, 0)
    reasons = dict.fromkeys(ChoiceReason, 0)
    reported_s = 0.0
    for turn, arrival in enumerate(trace):
        while reported_s + fleet.load_period_s <= arrival.at_s:
            reported_s += fleet.load_period_s
            if arrival.at_s - reported_s < fleet.load_period_s:  # only the last report before a request matters
                engines.advance(reported_s)
                for name, worker in workers.items():
                    loads[name], sent[name] = worker.load(), 0
        engines.advance(arrival.at_s)
        while in_flight and in_flight[0][0] <= arrival.at_s:
            event = heapq.heappop(in_flight)[2]
            (index.stored if len(event) > 2 else index.removed)(*event)
        names = index.hashes(arrival.prompt)
        overlaps = index.matches(names, arrival.at_s)
        request = PlacementRequest(len(arrival.prompt), len(names), str(arrival.conversation), turn)
        choice = decide(request, [Candidate(name, overlaps.get(name, 0), 0, loads[name], sent[name])
                                  for name in workers], rng)
        assert choice is not None
        if placed is not None:
            placed.append(names_of.index(choice.worker))
        reasons[choice.reason] += 1
        sent[choice.worker] += len(arrival.prompt) - choice.overlap_blocks * fleet.block_size
        index.expect(choice.worker, names, arrival.at_s + EXPECT_S)
        workers[choice.worker].submit(arrival, arrival.at_s)
    engines.advance(float("inf"))
    figures = figures_of(list(workers.values()), reasons)
    return msgspec.structs.replace(figures, prefill=engines.figures())


def figures_of(workers: Sequence[SimWorker], reasons: dict[str, int]) -> HitFigures:
    """The figures of workers that have finished everything."""
    runs = [run for worker in workers for run in worker.done]
    hit = sum(run.hit_tokens for run in runs)
    asked = sum(len(run.arrival.prompt) for run in runs)
    ttft_s = report.summary((run.first_token_s - run.arrival.at_s for run in runs), "mean p99")
    computed = [sum(len(run.arrival.prompt) - run.hit_tokens for run in worker.done) for worker in workers]
    return HitFigures(hit / asked, ttft_s["mean"], ttft_s["p99"],
                      max(computed) / max(1.0, statistics.fmean(computed)),
                      {str(reason): count for reason, count in reasons.items() if count})


def measure(bench: HitBench, show: ShowLine = print) -> dict[str, Any]:
    """Runs it all, showing a line for each run. The report, ready for JSON."""
    runs, size = [], bench.fleet.block_size
    traces = [make(msgspec.structs.replace(bench.trace, seed=seed)) for seed in bench.seeds]
    for trace in traces:
        require_fit("--workers", bench.fleet.workers, min(bench.pool_shares) * oracle.footprint_blocks(trace, size),
                    max(blocks_of(arrival, size) for arrival in trace))
    for seed, trace in zip(bench.seeds, traces, strict=True):
        footprint = oracle.footprint_blocks(trace, size)
        for share in bench.pool_shares:
            fleet = msgspec.structs.replace(bench.fleet, worker_blocks=round(share * footprint / bench.fleet.workers))
            bound = oracle.bound(trace, size, fleet.workers * fleet.worker_blocks)
            results = {POOL: simulate(trace, fleet.pooled(), by_policy(bench.policy, Policy.KV), seed), PLACED: None}
            placed: list[int] = []
            for policy in POLICIES:
                results[policy.value] = simulate(trace, fleet, by_policy(bench.policy, policy), seed,
                                                 placed if policy is Policy.KV else None)
            search = PlacementSearch(trace, size, fleet.worker_blocks, placed, fleet.workers, seed)
            results[PLACED] = simulate(trace, fleet, FixedPlacement(search.best(bench.moves)), seed)
            show(f"seed {seed}, {fleet.workers} x {fleet.worker_blocks} blocks: bound {bound:.3f}, "
                 + ", ".join(f"{name} {result.hit_share:.3f}" for name, result in results.items()))
            runs.append({"seed": seed, "pool_share": share, "worker_blocks": fleet.worker_blocks, "bound": bound,
                         "requests": len(trace), "footprint_blocks": footprint,
                         "results": {name: msgspec.to_builtins(result) for name, result in results.items()}})
    return {"bench": msgspec.to_builtins(bench), "runs": runs, "summary": [
        _over_seeds(share, [run for run in runs if run["pool_share"] == share]) for share in bench.pool_shares]}


def by_policy(config: RoutingPolicyConfig, policy: Policy) -> Decide:
    """The router's choice with this policy, and the weights of `config`."""
    return functools.partial(choose, msgspec.structs.replace(config, policy=policy))


def _over_seeds(share: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds; of the ratios to what no router can have also the lowest and the highest."""
    names = runs[0]["results"]
    policies = {}
    for name in names:
        results = [run["results"][name] for run in runs]
        means = {key: statistics.fmean(result[key] for result in results)
                 for key in ("hit_share", "mean_ttft_s", "p99_ttft_s", "spread")}
        for key, shares in {"of_bound": [run["bound"] for run in runs],
                            "of_pool": [run["results"][POOL]["hit_share"] for run in runs],
                            "of_placed": [run["results"][PLACED]["hit_share"] for run in runs]}.items():
            ratios = [result["hit_share"] / share for result, share in zip(results, shares, strict=True)]
            means |= {key: statistics.fmean(ratios), f"{key}_low": min(ratios), f"{key}_high": max(ratios)}
        policies[name] = means
    return {"pool_share": share, "bound": statistics.fmean(run["bound"] for run in runs), "policies": policies}


def table(found: dict[str, Any]) -> Table:
    """The means over the seeds."""
    rows: list[list[str]] = []
    for part in found["summary"]:
        rows.append([f"{part['pool_share']:.0%}", "bound", f"{part['bound']:.1%}"])
        rows += [["", name, *(f"{each[key]:.1%}" for key in ("hit_share", "of_bound", "of_pool", "of_placed")),
                  f"{each['mean_ttft_s']:.3f} / {each['p99_ttft_s']:.3f}", f"{each['spread']:.2f}"]
                 for name, each in part["policies"].items()]
    return report.table(["cache", "policy", "hits", "of the bound", "of one pool", "of the placement",
                         "TTFT mean / p99, s", "most computed"], rows, text=1)


def picture(found: dict[str, Any], path: Path) -> None:
    """Hits and the time to the first token over the size of the cache."""
    from matplotlib.figure import Figure

    parts = found["summary"]
    sizes = [part["pool_share"] * 100 for part in parts]
    figure = Figure(figsize=(10, 4), layout="tight")
    hits, waits = figure.subplots(1, 2)
    hits.plot(sizes, [part["bound"] * 100 for part in parts], "k--", label="bound (clairvoyant pool)")
    for name in parts[0]["policies"]:
        style = {"color": {POOL: "0.5", PLACED: "0.0"}[name], "linestyle": ":"} if name in (POOL, PLACED) else {}
        for axis, key, factor in ((hits, "hit_share", 100), (waits, "mean_ttft_s", report.MS)):
            axis.plot(sizes, [part["policies"][name][key] * factor for part in parts], marker="o", label=name, **style)
    hits.set_ylabel("prompt tokens that hit, %")
    hits.set_ylim(0, 100)
    hits.legend(fontsize=8)
    waits.set_ylabel("mean time to the first token, ms (simulated)")
    waits.set_ylim(bottom=0)
    for axis in (hits, waits):
        axis.set_xlabel("blocks of all workers, % of the trace's")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
