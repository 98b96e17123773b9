#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Break what lies between machines, and count what comes of it (B105 to B107): cables, firewalls, addresses, links, the
broker. All faults of tests/hosts/matrix.py, each in a fleet of its own on hosts that are namespaces of this machine.

    . scripts/env.sh
    python scripts/lab/hosts_faults.py --json docs/results/hosts_faults.json

It wants root, and what tests/hosts/rack.py names. With `--chaos N` come N prompts over three machines on which faults
of all kinds follow each other, as drawn from `--seed`.

Exit status 1 if anything is not as it must be: an answer that was wrong, a prompt that did not end, a block that did
not come back or was written while it was free, or prompts that were not handed over again in time.
"""
from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import random
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests

from tests.hosts.chaos import Chaos
from tests.hosts.matrix import FAULTS, Fault, judge, run
from tests.hosts.rack import Rack, unavailable
from vllm_pd.bench.outputs import argument_file, write_json
from vllm_pd.bench.report import table

CHAOS_LASTS_S = 3600.0
FIGURES = {"prompts": "prompts", "remote": "by P", "wrong": "wrong", "unfinished": "unfinished", "leaked": "leaked",
           "overwritten": "overwritten", "longest_s": "longest, s", "back_after_s": "back after, s"}


def broken(fault: Fault) -> dict:
    """One fault, in a rack of its own: what came of it, and `failed`, why that is not as it must be."""
    found: dict = {"fault": str(fault), "failed": ""}
    with tempfile.TemporaryDirectory() as folder, Rack(Path(folder)) as rack:
        try:
            outcome = run(rack, fault)
            found |= dataclasses.asdict(outcome)
            judge(fault, outcome)
        except AssertionError as error:  # the figures say it; or an engine has ended
            found["failed"] = str(error)
    return found


def stirred(prompts: int, seed: int) -> dict:
    """The chaos with so many prompts: what was done and what came of it, and `failed`."""
    begin_s = time.monotonic()
    found: dict = {"seed": seed, "failed": ""}
    with tempfile.TemporaryDirectory() as folder, Rack(Path(folder)) as rack:
        chaos = Chaos(rack, seed)
        try:
            chaos.run(prompts, CHAOS_LASTS_S)
            found["longest_s"] = round(chaos.longest_s, 2)
        except AssertionError as error:
            found["failed"] = str(error)
        return found | {"prompts": chaos.requests, "ended": dict(chaos.ends), "faults": dict(chaos.counts),
                        "seconds": round(time.monotonic() - begin_s)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="faults whose names fit it, as in a shell")
    parser.add_argument("--chaos", type=int, default=0, metavar="N", help="also the chaos, with so many prompts")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the chaos; default: drawn")
    parser.add_argument("--json", type=argument_file, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.chaos < 0:
        parser.error("--chaos must be 0 or more")
    faults = [fault for fault in FAULTS if fnmatch.fnmatch(str(fault), arguments.only)]
    if not faults and not arguments.chaos:
        parser.error(f"--only {arguments.only!r} fits no fault; there are: {', '.join(map(str, FAULTS))}")
    if reason := unavailable():
        parser.error(f"this machine can have no hosts: {reason}")
    console, found = Console(width=150), []
    for number, fault in enumerate(faults, 1):
        found.append(broken(fault))
        console.print(f"{number} of {len(faults)}: {fault}: {'FAILED' if found[-1]['failed'] else 'as it must be'}",
                      style="dim")
    if found:
        rows = [[one["fault"], *(str(one.get(name, "-")) for name in FIGURES)] for one in found]
        console.print(table(["fault", *FIGURES.values()], rows))
    result: dict = {"faults": found}
    if arguments.chaos:
        console.print(f"chaos, {arguments.chaos} prompts, seed {arguments.seed}", style="dim")
        result["chaos"] = stirred(arguments.chaos, arguments.seed)
        console.print(result["chaos"])
    if arguments.json:
        write_json(arguments.json, result)
    failed = [one["failed"] for one in [*found, *([result["chaos"]] if arguments.chaos else [])] if one["failed"]]
    for reason in failed:
        console.print(f"FAILED {reason}", style="red", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
