#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`vllm_pd.decisions.splits` under loads that shift, beside each fixed split in hindsight, in simulated time.

    python scripts/lab/planner_splits.py --out planner_splits.json --picture planner_splits.png
    python scripts/lab/planner_splits.py --load step --seeds 1

The queues are simulated (`_planner.fleet`); the rule and what it measures are real. It needs numba, which every vLLM
brings. The same arguments give the same figures.
"""
import argparse
import json
import multiprocessing
import sys

from _planner.fleet import Fleet, Machine, Run
from _planner.loads import draw, loads
from _planner.picture import draw_picture
from _planner.splits import SplitFleet

from vllm_pd.bench.checks import argument_count
from vllm_pd.bench.outputs import argument_file
from vllm_pd.decisions.demand import DemandMeter, FleetLook, Targets
from vllm_pd.decisions.splits import SplitPlanner
from vllm_pd.decisions.wanted import WantedEngines

ENGINES = 8
STARTS = (2, 4, 6)
TARGETS = Targets(5.0, 0.04)
MACHINE = Machine()
CHANGE_S = 30.0
GOAL = 0.95


class Planned:
    """The rule as a plan of a fleet that begins with `prefills` prefill engines."""

    def __init__(self, prefills: int, at_once: int) -> None:
        self._meter = DemandMeter(TARGETS)
        self._splits = SplitPlanner(ENGINES, prefills, TARGETS, CHANGE_S, at_once)

    def __call__(self, look: FleetLook, prefills: int) -> int:
        demand = self._meter.receive(look)
        choice = None if demand is None else self._splits.receive(look, demand, prefills)
        return prefills if choice is None else choice.prefills


def split(prefills: int) -> WantedEngines:
    """All engines, so divided."""
    return WantedEngines(prefills, ENGINES - prefills)


def planned(arrivals, prefills: int, at_once: int) -> Run:
    """A run whose split the rule chooses."""
    return SplitFleet(split(prefills), MACHINE, TARGETS, Planned(prefills, at_once), CHANGE_S, at_once).run(arrivals)


def measure(task: tuple[str, int, int]) -> dict:
    """One load with one seed: the share of good requests of each fixed split, and of the rule from each start."""
    name, seed, at_once = task
    seconds, mix = loads()[name]
    arrivals = draw(seconds, mix, seed)
    fixed = {prefills: Fleet(split(prefills), MACHINE, TARGETS).run(arrivals).share for prefills in range(1, ENGINES)}
    best = max(fixed, key=fixed.get)
    found = {}
    for start in STARTS:
        run = planned(arrivals, start, at_once)
        found[start] = {"share": round(run.share, 4), "ratio": round(run.share / fixed[best], 3),
                        "changes": len(run.orders)}
    return {"load": name, "seed": seed, "at_once": at_once, "requests": len(arrivals), "best": best,
            "best_share": round(fixed[best], 4), "starts": found,
            "fixed": {prefills: round(share, 4) for prefills, share in fixed.items()}}


def main() -> int:
    """Simulates, prints a table, and writes JSON and picture anew after each load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", action="append", choices=list(loads()), help="default: all")
    parser.add_argument("--seeds", type=argument_count, default=2)
    parser.add_argument("--at-once", type=argument_count, default=ENGINES // 2,
                        help="engines that may change at a time")
    parser.add_argument("--processes", type=argument_count, default=2)
    parser.add_argument("--out", type=argument_file)
    parser.add_argument("--picture", type=argument_file)
    options = parser.parse_args()
    tasks = [(name, seed, options.at_once) for name in options.load or loads() for seed in range(1, options.seeds + 1)]
    found = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for one in pool.imap(measure, tasks):
            found.append(one)
            starts = "  ".join(f"from {start}: {each['ratio']:.2f} ({each['changes']} changes)"
                               for start, each in one["starts"].items())
            print(f"{one['load']:20} seed {one['seed']}  best {one['best']}: {one['best_share']:.3f}  {starts}",
                  flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
            if options.picture is not None:
                draw_picture(found, GOAL, options.picture)
    ratios = [each["ratio"] for one in found for each in one["starts"].values()]
    print(f"{sum(ratio >= GOAL for ratio in ratios)} of {len(ratios)} runs have {GOAL} of the best fixed split or more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
