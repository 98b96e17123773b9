# SPDX-License-Identifier: Apache-2.0
"""The pinned upstream source in the cache: plain, and with the patch series applied. Both are read-only for everyone."""

import sys
from pathlib import Path

from _series import pin

from . import cache, process, project

SCRIPTS = project.ROOT / "scripts"


def upstream_pin() -> pin.Pin:
    return pin.read(project.ROOT)


def patches() -> list[Path]:
    """The patch files in the order of ``patches/series``."""
    series = project.ROOT / "patches" / "series"
    if not series.is_file():
        return []
    names = (line.split("#")[0].strip() for line in series.read_text().splitlines())
    return [series.parent / name for name in names if name]


def series_key() -> str:
    """Hash of the pin and of every patch, in order."""
    return cache.key(upstream_pin().sha256, *patches())


def upstream(python: str = sys.executable) -> Path:
    """The unpacked, verified sdist. python: an interpreter that may have pip, for the download."""
    wanted = upstream_pin()

    def build(folder: Path) -> None:
        sdists = cache.root() / "downloads"
        process.run([python, str(SCRIPTS / "upstream.py"), str(folder / wanted.stem), "--cache", str(sdists)])

    return cache.piece("source", wanted.sha256[:16], build, f"fetching the source of {wanted.stem}") / wanted.stem


def patched(python: str = sys.executable) -> Path:
    """The sdist's tree with the series applied."""
    plain, wanted = upstream(python), upstream_pin()
    if not patches():
        return plain

    def build(folder: Path) -> None:
        process.run(["cp", "-r", str(plain), str(folder / wanted.stem)])
        for patch in patches():
            process.run(["git", "-C", str(folder / wanted.stem), "apply", "--whitespace=nowarn", str(patch)])

    return cache.piece("patched", series_key(), build, f"applying {len(patches())} patches") / wanted.stem


def package(tree: Path) -> dict[str, Path]:
    """Entry name -> file for all of the package ``vllm`` in tree; ``vllm/_version.py`` is the wheel's own."""
    files = (f for f in (tree / "vllm").rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    found = {f.relative_to(tree).as_posix(): f for f in files}
    found.pop("vllm/_version.py", None)
    return found
