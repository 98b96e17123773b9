#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put the pinned upstream source, verified, into a folder; refuse anything else.

    python scripts/upstream.py DEST                        from the package index, through the cache
    python scripts/upstream.py DEST --from GIT_CHECKOUT    from a local checkout at the pinned commit
    python scripts/upstream.py DEST --sdist FILE           from a file that you have

DEST must not exist or be empty; it appears as a whole or not at all. Needs Python 3.9 and pip, nothing else (and git
for --from). Exit status 2 and one message if the source is not the one that UPSTREAM_VERSION names.
"""
import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import List, Optional

from _series import pin, source
from _series.errors import Refusal


def place(origin: source.Source, dest: Path) -> int:
    """Unpack beside `dest`, then move there; the number of files."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise Refusal(f"{dest}: expected a folder that does not exist or is empty; it is neither")
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=dest.name + ".", dir=dest.parent))
    try:
        count = origin.unpack(staging)
        staging.chmod(0o755)
        os.replace(staging, dest)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return count


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path, metavar="DEST")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--from", dest="checkout", type=Path, metavar="GIT_CHECKOUT")
    given.add_argument("--sdist", type=Path, metavar="FILE")
    parser.add_argument("--cache", type=Path, metavar="DIR", default=source.default_cache(),
                        help="where the sdist is kept (default: $VLLM_PD_CACHE, or vllm-pd in the user's caches)")
    parser.add_argument("--root", type=Path, metavar="DIR", default=Path(__file__).resolve().parent.parent,
                        help="the project, with UPSTREAM_VERSION in it (default: this one)")
    args = parser.parse_args(argv)
    try:
        wanted = pin.read(args.root)
        if args.checkout:
            origin = source.checkout(wanted, args.checkout)
        else:
            origin = source.pinned(wanted, args.cache, args.sdist)
        count = place(origin, args.dest)
    except Refusal as refusal:
        print(f"upstream.py: {refusal}", file=sys.stderr)
        return 2
    print(f"{wanted.stem}: {count} files in {args.dest}, from {origin.origin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
