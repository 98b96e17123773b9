# SPDX-License-Identifier: Apache-2.0
"""The cache folder: every piece is ``<cache>/<kind>/<key>``, where key is a hash of all that it is made from.

A piece is built under a temporary name beside its place and renamed when it is complete, so what carries the final
name can be trusted and an interrupted build is simply run again. Virtual environments hold their own path and cannot
be renamed: they are built in place and get the file ``.complete`` last; without it they count as absent. Pieces that
nobody has used for long are renamed to ``<key>.gone``, then removed (``prune``).
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

MARKER = ".complete"
GONE = ".gone"  # ends the name of a piece that is being removed


def root() -> Path:
    """The cache folder: $VLLM_PD_CACHE, else vllm-pd in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("VLLM_PD_CACHE") or os.path.join(base, "vllm-pd")).absolute()


def key(*parts: str | bytes | Path) -> str:
    """Hash of strings, bytes and files (contents, not names), in order: 16 hex digits."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        total.update(hashlib.sha256(data).digest())
    return total.hexdigest()[:16]


def tree_key(folder: Path, files: Iterable[Path]) -> str:
    """Hash of names (relative to folder) and contents of files."""
    parts: list[str | Path] = []
    for file in sorted(files):
        parts += [file.relative_to(folder).as_posix(), file]
    return key(*parts)


def say(text: str) -> None:
    """One line of progress, on stderr: stdout belongs to the caller's result."""
    print(f"vllm-pd: {text}", file=sys.stderr, flush=True)


def has(kind: str, name: str) -> bool:
    """Whether the piece (not one built in place) is there."""
    return (root() / kind / name).is_dir()


def piece(kind: str, name: str, build: Callable[[Path], None], what: str, *, in_place: bool = False) -> Path:
    """The folder ``<cache>/kind/name``, made by build(folder) if it is absent.

    The caller holds the lock. Raises what build raises; the half-written folder is removed, now or at the next run.
    """
    place = root() / kind / name
    if (place / MARKER).is_file() if in_place else place.is_dir():
        os.utime(place)  # used now: see prune
        return place
    began_s = time.monotonic()
    say(f"{what} ...")
    work = place if in_place else place.with_name(f"{name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    build(work)
    if in_place:
        (work / MARKER).touch()
    else:
        os.rename(work, place)
    say(f"{what}: {time.monotonic() - began_s:.1f} s")
    return place


def prune(kinds: Iterable[str], keep_s: float) -> None:
    """Remove the pieces of these kinds that nobody has asked for in the last keep_s seconds and that no process uses.
    A piece loses its name first, so that one of which only a part is left is never taken for complete."""
    places = [place for kind in kinds for place in (root() / kind).glob("*")]
    for left in (place for place in places if place.suffix == GONE):
        shutil.rmtree(left, ignore_errors=True)
    old = {place for place in places if place.suffix != GONE and time.time() - place.stat().st_mtime > keep_s}
    for place in old - in_use(old):
        gone = place.with_name(place.name + GONE)
        with contextlib.suppress(OSError):  # what can't be removed stays
            place.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def in_use(places: Collection[Path]) -> set[Path]:
    """Those of these folders from which a running process has loaded a file, or which its command line or its
    environment names, as far as we may see."""
    names = {place: {os.fsencode(place), os.fsencode(place.resolve())} for place in places}
    used: set[Path] = set()
    for file in (file for kind in ("cmdline", "environ", "maps") for file in Path("/proc").glob(f"[0-9]*/{kind}")):
        if len(used) == len(names):
            break
        with contextlib.suppress(OSError):
            text = file.read_bytes()
            used.update(place for place, written in names.items() if any(name in text for name in written))
    return used


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Hold the cache folder for building. A second builder waits (and says so); the kernel lets go when we and the
    commands that we started (``process.run``) have ended."""
    root().mkdir(parents=True, exist_ok=True)
    with open(root() / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that is building in {root()}")
            fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file.fileno(), True)
        yield
