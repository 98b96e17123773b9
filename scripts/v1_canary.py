#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tell whether a release of vLLM has the names that the V1 binding stands on, from its source; nothing of it is run.

    python scripts/v1_canary.py 0.33.0 0.32.0         releases of the package index, through the cache
    python scripts/v1_canary.py FOLDER                a folder with the package vllm in it, or that package itself

Prints one line for each, and the missing names. Exit status 1 if one lacks any, 2 if one can't be read. The names are
in vllm_pd/v1/required.py. Needs Python 3.11 and pip.
"""
import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from _series import source  # noqa: E402
from _series.errors import Refusal  # noqa: E402

from vllm_pd.model.source_names import missing_names  # noqa: E402
from vllm_pd.v1.required import REQUIRED  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="VERSION_OR_FOLDER")
    parser.add_argument("--cache", type=Path, default=source.default_cache(),
                        help="where sdists are kept (default: $VLLM_PD_CACHE, or vllm-pd in the user's caches)")
    args = parser.parse_args()
    worst = 0
    for release in args.releases:
        try:
            read = folder(Path(release)) if Path(release).is_dir() else sdist(release, args.cache)
            missing = missing_names(REQUIRED, read)
        except Refusal as refusal:
            print(f"v1_canary: {refusal}", file=sys.stderr)
            worst = 2
            continue
        total = sum(len(names) for names in REQUIRED.values())
        print(f"{release}: {f'lacks {len(missing)} of {total}' if missing else f'has all {total}'}")
        print("".join(f"    {name}\n" for name in missing), end="", flush=True)
        worst = max(worst, 1 if missing else 0)
    return worst


def folder(path: Path) -> Callable[[str], str | None]:
    """Reads files of the package vllm in a folder. Raises Refusal if there is none."""
    package = path / "vllm" if (path / "vllm").is_dir() else path
    if not (package / "engine").is_dir():
        raise Refusal(f"{path}: expected the package vllm, or a folder with it")
    return lambda file: (package / file).read_text(encoding="utf-8") if (package / file).is_file() else None


def sdist(version: str, cache: Path) -> Callable[[str], str | None]:
    """Reads files of the package vllm in a release's sdist, which is fetched if the cache has none. Raises Refusal."""
    origin = source.release(version, cache, None, "unknown")
    files = {member.path: member.data.decode() for member in origin.files({f"vllm/{file}" for file in REQUIRED})}
    return lambda file: files.get(f"vllm/{file}")


if __name__ == "__main__":
    sys.exit(main())
