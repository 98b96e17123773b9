#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the folders of tests/ in two lanes, and what failed once more: scripts/test.sh calls it."""

import sys
from pathlib import Path

from _tests.session import Session

ROOT = Path(__file__).resolve().parents[1]
# The folders of the first lane start engines and mostly wait for them; those of the second mostly compute.
LANES = {
    "engines": ("e2e", "dp"),
    "others": ("series", "unit", "proof", "dp_protocol", "upstream", "sockets", "transfer", "peers", "router", "wheel"),
}
# Folders whose tests mostly wait run in so many processes of pytest-xdist.
WORKERS = {"sockets": 4, "peers": 4, "dp_protocol": 2, "router": 2}

if __name__ == "__main__":
    lanes = {lane: [f"tests/{name}" for name in names] for lane, names in LANES.items()}
    workers = {f"tests/{name}": ("-n", str(count)) for name, count in WORKERS.items()}
    sys.exit(Session(ROOT, sys.argv[1:], ROOT / "build" / "tests", workers).run(lanes))
