#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build a wheel: the patched vLLM, or the plugin for a stock one.

    python scripts/build_wheel.py --target cpu --out dist     compiled here against this python's torch
    python scripts/build_wheel.py --target cuda --out dist    the official wheel with the patched files put in
    python scripts/build_wheel.py --target plugin --out dist  vllm-pd, pure Python, for vLLM's V1 engine

Compiled and downloaded parts are kept in the cache folder ($VLLM_PD_CACHE, or vllm-pd in the user's caches). Python
3.11 or newer.
"""

import argparse
import os
import sys
import zipfile
from pathlib import Path

from _series.errors import Refusal
from _wheel import cache, process, project, targets

ERRORS = (Refusal, ValueError, OSError, zipfile.BadZipFile, process.BuildError)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("VLLM_PD_TARGET", "cpu")
    parser.add_argument("--target", default=default, choices=project.TARGETS, help="default: $VLLM_PD_TARGET, else cpu")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for the wheel (default: dist)")
    args = parser.parse_args()
    try:
        with cache.lock():
            print(targets.build(args.target, args.out))
    except ERRORS as error:
        print(f"build_wheel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
