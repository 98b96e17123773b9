#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the folders of tests/ in two lanes, and what failed once more: scripts/test.sh calls it.

All run in the environment of this process, which is that of engine V0, but tests/v1 and tests/v1_*: theirs is made when
their turn comes.

    run_tests.py [--fast | --rest | --all] [pytest arguments]
"""

import argparse
import os
import sys
from pathlib import Path

from _tests.session import Session

ROOT = Path(__file__).resolve().parents[1]
# The folders of the first lane start engines, those of the second mostly do not.
LANES = {
    "engines": ("v1", ),
    "others": ("series", "unit", "proof", "sockets", "router", "peers", "transfer"),
}
REST = {  # real engines in all their shapes, and what only patches, V0, the step sync, recipes or a network can break
    "engines": ("v1_engines", "e2e", "v1_hosts"),
    "others": ("wheel", "dp", "v1_commands", "upstream", "dp_protocol", "hosts"),
}
# Folders with an environment of their own, and what starts pytest there.
V1_PYTEST = ("bash", "-c", 'VLLM_PD_ENGINE=v1 . scripts/env.sh && exec python -m pytest "$@"', "pytest-v1")
COMMANDS = dict.fromkeys(("tests/v1", "tests/v1_commands", "tests/v1_engines", "tests/v1_hosts"), V1_PYTEST)
FAST = {
    "engines": ("e2e/test_tokens.py::test_b1_greedy_tokens_equal_those_of_one_engine",),
    "others": ("series", "unit", "proof"),
}
# Folders whose tests mostly wait run in several processes of pytest-xdist: "-n", how many.
WORKERS = {"sockets": 4, "peers": 4, "dp_protocol": 2, "hosts": 4, "router": 2, "transfer": 2,
           "v1": 2, "v1_engines": 2}
BY_FILE = ("--dist", "loadfile")  # the tests of a file share its engines
# V1's files with whole servers come first (tests/v1/conftest.py). Of its own accord xdist begins with the files of most
# tests, and with those at the end, when nothing is left to run beside them.
SHARING = {"v1": (*BY_FILE, "--no-loadscope-reorder"), "v1_engines": BY_FILE}
FAST_WORKERS = {"proof": 2}  # there the other lane is soon done
NOT_HEAVY = ("-m", "not heavy")
SKIP_PROVEN = "VLLM_PD_SKIP_PROVEN"  # for tests/searches.py
# Options of which each folder's pytest would spoil what another does, or that say nothing to it.
OF_ONE_PYTEST = ("--basetemp", "--junitxml", "--junit-xml", "--ignore", "--ignore-glob")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fast", action="store_true", help="series, unit, proof, and one prompt through two engines")
    which.add_argument("--rest", action="store_true", help="real engines of all shapes, V0, the step sync, machines")
    which.add_argument("--all", action="store_true", help="everything, with the heavy proofs of docs/testing.md")
    chosen, options = parser.parse_known_args()
    for option in options:
        if option.partition("=")[0] in OF_ONE_PYTEST:
            parser.error(f"{option} can't be used: name what is to run, below tests/: each folder has its own pytest")
    parts = (LANES, REST) if chosen.all else (FAST if chosen.fast else REST if chosen.rest else LANES, )
    lanes = {lane: [f"tests/{name}" for part in parts for name in part[lane]] for lane in LANES}
    if not chosen.all:
        options = [*NOT_HEAVY, *options]
        os.environ[SKIP_PROVEN] = "1"
    counts = FAST_WORKERS if chosen.fast else WORKERS
    workers = {f"tests/{name}": ("-n", str(count), *SHARING.get(name, ())) for name, count in counts.items()}
    kept = ROOT / "build" / ("tests_rest" if chosen.rest else "tests")
    return Session(ROOT, options, kept, workers, COMMANDS).run(lanes)


if __name__ == "__main__":
    sys.exit(main())
