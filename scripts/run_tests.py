#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run all folders of tests/, fast ones first, and what failed once more: scripts/test.sh calls it."""

import sys
from pathlib import Path

from _tests.session import Session

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("series", "unit", "proof", "transfer", "peers", "router", "upstream", "wheel", "dp", "e2e")

if __name__ == "__main__":
    try:
        sys.exit(Session(ROOT, sys.argv[1:], ROOT / "build" / "failures").run([f"tests/{name}" for name in FOLDERS]))
    except KeyboardInterrupt:
        sys.exit(130)
