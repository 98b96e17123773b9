#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the folders of tests/ in two lanes, and what failed once more: scripts/test.sh calls it.

All run in the environment of this process, which is that of engine V0, but tests/v1: that folder's is made when its
turn comes.

    run_tests.py [--fast | --all] [pytest arguments]
"""

import argparse
import sys
from pathlib import Path

from _tests.session import Session

ROOT = Path(__file__).resolve().parents[1]
# The folders of the first lane start engines and mostly wait for them; those of the second mostly compute.
LANES = {
    "engines": ("e2e", "dp"),
    "others": ("series", "unit", "proof", "v1", "dp_protocol", "upstream", "sockets", "transfer", "peers", "router",
               "wheel"),
}
# Folders with an environment of their own, and what starts pytest there.
V1_PYTEST = ("bash", "-c", 'VLLM_PD_ENGINE=v1 . scripts/env.sh && exec python -m pytest "$@"', "pytest-v1")
COMMANDS = {"tests/v1": V1_PYTEST}
FAST = {
    "engines": ("e2e/test_tokens.py::test_b1_greedy_tokens_equal_those_of_one_engine",),
    "others": ("series", "unit", "proof"),
}
# Folders whose tests mostly wait run in several processes of pytest-xdist: "-n", how many.
WORKERS = {"sockets": 4, "peers": 4, "dp_protocol": 2, "router": 2}
FAST_WORKERS = {"proof": 2}  # there the other lane is soon done
NOT_HEAVY = ("-m", "not heavy")
# Options of which each folder's pytest would spoil what another does, or that say nothing to it.
OF_ONE_PYTEST = ("--basetemp", "--junitxml", "--junit-xml", "--ignore", "--ignore-glob")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fast", action="store_true", help="series, unit, proof, and one prompt through two engines")
    which.add_argument("--all", action="store_true", help="with the heavy proofs of docs/testing.md")
    chosen, options = parser.parse_known_args()
    for option in options:
        if option.partition("=")[0] in OF_ONE_PYTEST:
            parser.error(f"{option} can't be used: name what is to run, below tests/: each folder has its own pytest")
    lanes = {lane: [f"tests/{name}" for name in names] for lane, names in (FAST if chosen.fast else LANES).items()}
    if not chosen.all:
        options = [*NOT_HEAVY, *options]
    counts = FAST_WORKERS if chosen.fast else WORKERS
    workers = {f"tests/{name}": ("-n", str(count)) for name, count in counts.items()}
    return Session(ROOT, options, ROOT / "build" / "tests", workers, COMMANDS).run(lanes)


if __name__ == "__main__":
    sys.exit(main())
