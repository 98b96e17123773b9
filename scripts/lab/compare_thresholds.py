#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`max_local_prefill_tokens: auto` against fixed numbers, over the loads of `vllm-pd bench serve`, in simulated time.

    python scripts/lab/compare_thresholds.py --out docs/results/thresholds.json        all machines, three rounds
    python scripts/lab/compare_thresholds.py --machine cpu --rounds 1

Engines are simulated (`_thresholds.engine`), the policy and what it measures are real. The same arguments give the same
figures. For real engines: `vllm-pd bench serve MODEL --arm pd --pd max_local_prefill_tokens=auto`.
"""
import argparse
import json
import sys

from _thresholds.compare import MACHINES, arms, compare, verdicts

from vllm_pd.bench.checks import argument_count
from vllm_pd.bench.outputs import argument_file

FIGURES = ("requests", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def main() -> int:
    """Simulates, prints tables, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: all")
    parser.add_argument("--rounds", type=argument_count, default=3)
    parser.add_argument("--out", type=argument_file)
    options = parser.parse_args()
    found = {}
    for name in options.machine or MACHINES:
        machine = MACHINES[name]
        loads = compare(machine, options.rounds)
        judged = {arm: verdicts(loads, arm) for arm in arms(machine) if arm.startswith("auto")}
        found[name] = {"machine": machine.text, "rounds": options.rounds, "loads": loads, "verdicts": judged}
        print(f"\n{name}: {machine.text}")
        for label, figures in loads.items():
            print(f"\n  {label}" + "".join(f"{figure:>12}" for figure in FIGURES) + "  decisions")
            for arm, one in figures.items():
                print(f"    {arm:20}" + "".join(f"{one.get(figure, 0):12.1f}" for figure in FIGURES), one["decisions"])
        for arm, judged_arm in judged.items():
            print(f"\n  {arm}: TTFT p50 to the best fixed one with the same ITL p99 or a lower one")
            for label, one in judged_arm["by_load"].items():
                print(f"    {label:32} {one['best'] or '-':10} {one['ratio'] or '-'}")
            print("   ", {fixed: ratios for fixed, ratios in judged_arm["overall"].items()})
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
