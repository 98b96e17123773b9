#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`vllm_pd.decisions.wanted` as the rule of an autoscaler, beside fixed fleets in hindsight, in simulated time.

    python scripts/lab/planner_scaling.py --out planner_scaling.json
    python scripts/lab/planner_scaling.py --load step --seeds 1

The queues are simulated (`_planner.fleet`); the rule and what it measures are real. It needs numba, which every vLLM
brings. The same arguments give the same figures.
"""
import argparse
import json
import multiprocessing
import sys

from _planner.fleet import Fleet, Machine, Run
from _planner.loads import draw, loads

from vllm_pd.bench.checks import argument_count
from vllm_pd.bench.outputs import argument_file
from vllm_pd.decisions.demand import DemandMeter, FleetLook, Targets
from vllm_pd.decisions.wanted import WantedBounds, WantedCounter, WantedEngines

FIRST = WantedEngines(2, 2)
MOST = 12  # of a role
TARGETS = Targets(5.0, 0.04)
MACHINE = Machine()
ENOUGH = 0.95  # good requests of a fixed fleet, with which the rule is compared


class Planned:
    """The rule as the plan of a fleet."""

    def __init__(self) -> None:
        self._meter = DemandMeter(TARGETS)
        self._counter, self._wanted = WantedCounter(TARGETS, WantedBounds(most=MOST)), FIRST

    def __call__(self, look: FleetLook) -> WantedEngines:
        demand = self._meter.receive(look)
        if demand is not None:
            self._wanted = self._counter.receive(demand)
        return self._wanted


def scaled(arrivals) -> Run:
    """A run whose engines the rule chooses."""
    return Fleet(FIRST, MACHINE, TARGETS, Planned(), 4 * MOST).run(arrivals)


def measure(task: tuple[str, int]) -> dict:
    """One load with one seed: the rule, and the smallest fixed fleet with enough good requests; where none has, the
    best one."""
    name, seed = task
    seconds, mix = loads()[name]
    arrivals = draw(seconds, mix, seed)
    fixed = {(prefills, decodes): Fleet(WantedEngines(prefills, decodes), MACHINE, TARGETS).run(arrivals).share
             for prefills in range(1, MOST + 1) for decodes in range(1, MOST + 1)}
    enough = [split for split, share in fixed.items() if share >= ENOUGH]
    best = min(enough, key=lambda split: (sum(split), -fixed[split])) if enough else max(fixed, key=fixed.get)
    run = scaled(arrivals)
    return {"load": name, "seed": seed, "requests": len(arrivals), "fixed": best, "fixed_share": round(fixed[best], 4),
            "share": round(run.share, 4), "engines": round(run.engine_s / seconds, 2), "orders": len(run.orders)}


def main() -> int:
    """Simulates, prints a table, and writes JSON anew after each load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", action="append", choices=list(loads()), help="default: all")
    parser.add_argument("--seeds", type=argument_count, default=2)
    parser.add_argument("--processes", type=argument_count, default=2)
    parser.add_argument("--out", type=argument_file)
    options = parser.parse_args()
    tasks = [(name, seed) for name in options.load or loads() for seed in range(1, options.seeds + 1)]
    found = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for one in pool.imap(measure, tasks):
            found.append(one)
            prefills, decodes = one["fixed"]
            print(f"{one['load']:20} seed {one['seed']}  good {one['share']:.3f} with {one['engines']:5.2f} engines, "
                  f"{one['orders']:3} orders; fixed {prefills}+{decodes}: {one['fixed_share']:.3f}", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
