# SPDX-License-Identifier: Apache-2.0
"""The pinned upstream source in the cache: plain, and with the patch series applied. Nobody writes there."""

import hashlib
import shutil
import sys
from pathlib import Path

from _series import folder, pin, verify
from _series.git import Repo

from . import cache, project
from .process import BuildError, run

PATCHES = project.ROOT / "patches"


def upstream_pin() -> pin.Pin:
    return pin.read(project.ROOT)


def patches() -> list[Path]:
    """The patch files in the order of ``patches/series``."""
    return [PATCHES / name for name in folder.names(PATCHES)]


def series_key() -> str:
    """Hash of the pin, of every patch in order, and of the sums that they must lead to."""
    return cache.key(upstream_pin().sha256, PATCHES / folder.SUMS, *patches())


def upstream(python: str = sys.executable) -> Path:
    """The unpacked, verified sdist. python: an interpreter that may have pip, for the download."""
    wanted = upstream_pin()

    def build(place: Path) -> None:
        fetch = project.ROOT / "scripts" / "upstream.py"
        run([python, fetch, place / wanted.stem, "--cache", cache.root()])

    return cache.piece("source", wanted.sha256[:16], build, f"fetching the source of {wanted.stem}") / wanted.stem


def patched(python: str = sys.executable) -> Path:
    """The sdist's tree with the series applied. BuildError names patch, file and hunk that does not apply."""
    plain, wanted = upstream(python), upstream_pin()
    if not patches():
        return plain

    def build(place: Path) -> None:
        tree = place / wanted.stem
        shutil.copytree(plain, tree, ignore=shutil.ignore_patterns("__pycache__"))
        apply_series(tree)

    return cache.piece("patched", series_key(), build, f"applying {len(patches())} patches") / wanted.stem


def apply_series(tree: Path) -> None:
    """Apply the series to the unpacked sdist in tree; what it touched must then have the sums of patches/SHA256SUMS."""
    repo = Repo(tree)
    repo.create()  # so that git takes no repository around the cache folder for the patches' root
    for patch in folder.patches(folder.load(PATCHES)):
        if failures := verify.apply(repo, patch):
            raise BuildError("\n".join(f"{patch.name}: {failure}" for failure in failures))
    shutil.rmtree(tree / ".git")
    for line in (PATCHES / folder.SUMS).read_text().splitlines():
        digest, _, name = line.partition("  ")
        if hashlib.sha256((tree / name).read_bytes()).hexdigest() != digest:
            raise BuildError(f"{name}: not what patches/{folder.SUMS} says; run scripts/series.py check")


def package(tree: Path) -> dict[str, Path]:
    """Entry name -> file for all of the package ``vllm`` in tree; ``vllm/_version.py`` is the wheel's own."""
    files = (f for f in (tree / "vllm").rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    found = {f.relative_to(tree).as_posix(): f for f in files}
    found.pop("vllm/_version.py", None)
    return found
