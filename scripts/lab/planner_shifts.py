#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd planner --flip` against every fixed ratio of prefill to decode engines, over loads that shift, in simulated
time.

    python scripts/lab/planner_shifts.py --json planner_shifts.json --picture planner_shifts.png

The fleet is simulated (`_planner.fleet`), the rule is the planner's own. Goodput is the requests a second that met both
targets. The best fixed ratio is that of the same requests in hindsight. The same arguments give the same figures.
"""
import argparse
import dataclasses
import sys

from _planner.compare import INTERVAL_S, RULES, Compared, compare
from _planner.fleet import ENGINES, SPEED, TARGETS
from _planner.loads import LOADS
from _planner.picture import draw_shifts
from rich.console import Console

from vllm_pd.bench.checks import argument_count
from vllm_pd.bench.outputs import argument_file, write_json
from vllm_pd.bench.report import table


def shown(found: Compared) -> dict:
    """One load with one seed, for the JSON."""
    return {"offered_per_s": round(found.offered, 3), "planned_per_s": round(found.planned, 3),
            "fixed_per_s": {prefill: round(rate, 3) for prefill, rate in found.static.items()},
            "best_fixed": found.best, "ratio": round(found.ratio, 4), "changes": len(found.changed_s)}


def main() -> int:
    """Simulates, prints a table, and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", action="append", choices=LOADS, help="default: all")
    parser.add_argument("--seeds", type=argument_count, default=3)
    parser.add_argument("--json", type=argument_file, help="also write the figures there")
    parser.add_argument("--picture", type=argument_file, help="also draw the first seed of each load there")
    options = parser.parse_args()
    found = {load: [compare(LOADS[load], seed) for seed in range(1, options.seeds + 1)]
             for load in options.load or LOADS}
    rows = [[load, f"{one.offered:.1f}", str(one.best), f"{one.static[one.best]:.2f}", f"{one.planned:.2f}",
             f"{one.ratio:.3f}", str(len(one.changed_s))] for load, each in found.items() for one in each]
    Console().print(table(["load", "offered/s", "best fixed", "its goodput", "planner", "ratio", "changes"], rows))
    if options.json is not None:
        write_json(options.json, {
            "engines": ENGINES, "interval_s": INTERVAL_S, "cool_down_s": RULES.cool_down_s,
            "speed": dataclasses.asdict(SPEED), "targets": dataclasses.asdict(TARGETS),
            "loads": {load: [shown(one) for one in each] for load, each in found.items()}})
    if options.picture is not None:
        draw_shifts({load: each[0] for load, each in found.items()}, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
