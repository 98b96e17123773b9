#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a fleet over NATS is without prefills when the worst of three servers goes, the one that leads the jobs: a
time for each of `--rounds`, where it was killed, frozen (SIGSTOP), cut off from everybody, and alone: cut off from the
other servers, but not from the engines. From that moment until a decode engine has the KV of a new prompt from its
prefill engine. Meanwhile it answers by itself.

Servers and engines (light ones: no model) are each on a host of its own (tests/hosts): wants root.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests

from tests.hosts.nats_fleet import FAULTS, NatsFleet
from tests.hosts.rack import Rack, unavailable
from vllm_pd.bench.outputs import argument_file, write_json
from vllm_pd.bench.report import table

HELD_S, BACK_S = 60.0, 60.0


def measure(rounds: int, console: Console) -> dict[str, list[float]]:
    """By fault, the seconds of each round until the next job."""
    found: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    with tempfile.TemporaryDirectory() as folder, Rack(Path(folder)) as rack:
        fleet = NatsFleet([rack.host(name) for name in ("n1", "n2", "n3")])
        engines = p, d = fleet.pair(rack.host("p"), rack.host("d"))
        for number in range(1, rounds + 1):
            for fault, times in found.items():
                _, leader, others = fleet.jobs("n1")
                with fleet.without(rack, leader, fault, engines):
                    times.append(round(d.hands_over(HELD_S), 2))
                console.print(f"{number} of {rounds}: {fault}: {times[-1]:.1f} s")
                fleet.holds_all(leader, others[0], BACK_S)
                d.hands_over(HELD_S)
        for engine in engines:
            engine.rests(BACK_S)
            engine.keeps_free_blocks()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=argument_file, help="also write the figures there")
    arguments = parser.parse_args()
    if reason := unavailable():
        parser.error(reason)
    console = Console()
    found = measure(arguments.rounds, console)
    console.print(table(["the leader is", "rounds", "median, s", "longest, s"], [
        [fault, str(len(times)), f"{statistics.median(times):.1f}", f"{max(times):.1f}"]
        for fault, times in found.items()]))
    if arguments.json:
        write_json(arguments.json, {"rounds": arguments.rounds, "next_job_s": found})


if __name__ == "__main__":
    main()
