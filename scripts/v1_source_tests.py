#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run tests/v1 against another release of vLLM than the installed one, by its Python source.

    export VLLM_PD_ENGINE=v1; . scripts/env.sh
    python scripts/v1_source_tests.py 0.33.0                              what needs no engine
    python scripts/v1_source_tests.py 0.33.0 -- -k "hazard or b93"        options of pytest
    python scripts/v1_source_tests.py 0.33.0 --extension -- -m e2e tests/v1/test_real_engines.py
    python scripts/v1_source_tests.py 0.33.0 --extension --with "orjson>=3.11.6" -- -m heavy tests/v1_engines

For a release whose only wheel is for CUDA. Its source, fetched as scripts/v1_canary.py does, takes the place of the
installed package; all else is that of the environment. With `--extension` the installed package's compiled parts come
along, so that engines run as far as both releases call them alike; that says nothing about the release's own. `--with`
has pip install what the release needs and the environment lacks, for this run alone. The exit
status is that of pytest, or 2 where the release can't be had.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from _series import source  # noqa: E402
from _series.errors import Refusal  # noqa: E402


def main() -> int:
    usage = "%(prog)s [-h] [--extension] [--with PACKAGE] [--cache DIR] VERSION [-- OPTION ...]"
    parser = argparse.ArgumentParser(usage=usage,
                                     description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog='OPTION: of pytest; -m "not e2e" and tests/v1 where it names no others')
    parser.add_argument("release", metavar="VERSION")
    parser.add_argument("--extension", action="store_true", help="copy the installed package's compiled parts")
    parser.add_argument("--with", dest="packages", metavar="PACKAGE", action="append", default=[],
                        help="install this package for the run, without its dependencies; may be repeated")
    parser.add_argument("--cache", type=Path, metavar="DIR", default=source.default_cache(),
                        help="where sdists are kept (default: $VLLM_PD_CACHE, or vllm-pd in the user's caches)")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)  # argparse mixes what is on both sides of it
    args, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1:]
    with tempfile.TemporaryDirectory(prefix="vllm-pd-source-") as folder:
        try:
            install(args.release, args.cache, Path(folder))
            add_packages(args.packages, folder)
        except Refusal as refusal:
            print(f"v1_source_tests: {refusal}", file=sys.stderr)
            return 2
        if args.extension:
            copy_extension(Path(folder) / "vllm")
        if "-m" not in options:
            options = ["-m", "not e2e", *options]
        if not any(option.startswith("tests") for option in options):
            options = [*options, "tests/v1"]
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run([sys.executable, "-m", "pytest", "-q", *options], cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": path}, check=False).returncode


def install(release: str, cache: Path, folder: Path) -> None:
    """Write the package `vllm` of this release into `folder`, with metadata that make vLLM choose its CPU platform.
    Raises Refusal."""
    unpacked = folder / "source"  # its other folders, tests among them, must not be found by an import
    source.release(release, cache, None, "unknown").unpack(unpacked)
    if not (unpacked / "vllm").is_dir():
        raise Refusal(f"{release}: its source has no package vllm")
    (unpacked / "vllm").rename(folder / "vllm")
    version = f"{release}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def add_packages(packages: list[str], folder: str) -> None:
    """Install packages into `folder`. Raises Refusal."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *packages]
    if packages and subprocess.run(command, check=False, timeout=600).returncode:
        raise Refusal(f"--with {' '.join(packages)}: pip could not install it")


def copy_extension(package: Path) -> None:
    """Copy what is compiled in the installed package into `package`."""
    for installed in find_spec("vllm").submodule_search_locations:
        for built in Path(installed).rglob("*.so"):
            place = package / built.relative_to(installed)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built, place)


if __name__ == "__main__":
    sys.exit(main())
