# SPDX-License-Identifier: Apache-2.0
"""The pinned source: fetched once into the cache, verified each time it is used, unpacked nowhere before that.

`tree_sha256` of the pin identifies the source independently of its packaging: it is the sha256 over one line
`sha256-of-the-file, two spaces, path, newline` for each regular file, sorted by path, of the folders and files of
`TREE`, without what setuptools writes into an sdist (`GENERATED`).
"""
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Dict, Iterator, List, NamedTuple, Optional, Set

from .errors import Refusal
from .git import Repo
from .pin import PROJECT, Pin

TREE = ("CMakeLists.txt", "cmake", "csrc", "pyproject.toml", "requirements", "setup.py", "vllm")
GENERATED = frozenset(["vllm/_version.py"])
_PIP_CLIENT = Path(__file__).with_name("pip_client.py")


class SourceFile(NamedTuple):
    """One regular file of the source; `path` is relative to the source's root, with forward slashes."""

    path: str
    data: bytes
    executable: bool


def default_cache() -> Path:
    """$VLLM_PD_CACHE, else vllm-pd in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(os.environ.get("VLLM_PD_CACHE") or os.path.join(base, "vllm-pd")).expanduser()


def members(archive: bytes, stem: str) -> Iterator[SourceFile]:
    """The files of a tar archive whose every name begins with `stem/`; links and ways out of it are refused."""
    prefix = stem + "/" if stem else ""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for entry in tar:
                if entry.isdir() or entry.type == tarfile.XGLTYPE:
                    continue
                parts = PurePosixPath(entry.name).parts
                if not entry.isfile() or not entry.name.startswith(prefix) or ".." in parts or entry.name[0] == "/":
                    raise Refusal(f"archive: expected regular files under {prefix or './'}; found {entry.name!r}")
                reader = tar.extractfile(entry)
                assert reader is not None
                yield SourceFile(entry.name[len(prefix):], reader.read(), bool(entry.mode & 0o100))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise Refusal(f"archive of {stem or 'the checkout'}: cannot be read: {error}") from error


@dataclass(frozen=True)
class Source:
    """A verified source; the archive is held in memory, so nobody can change it between the check and the use."""

    pin: Pin
    archive: bytes
    stem: str
    origin: str

    def files(self, wanted: Optional[Set[str]] = None) -> Iterator[SourceFile]:
        for member in members(self.archive, self.stem):
            if wanted is None or member.path in wanted:
                yield member

    def unpack(self, folder: Path, wanted: Optional[Set[str]] = None) -> int:
        """Write the source (or the `wanted` paths) below `folder`; the number of files."""
        count = 0
        for member in self.files(wanted):
            path = folder / member.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(member.data)
            path.chmod(0o755 if member.executable else 0o644)
            count += 1
        return count


def tree_digest(files: Iterator[SourceFile]) -> str:
    lines: Dict[str, str] = {}
    for member in files:
        if member.path.split("/", 1)[0] in TREE and member.path not in GENERATED:
            lines[member.path] = f"{hashlib.sha256(member.data).hexdigest()}  {member.path}\n"
    return hashlib.sha256("".join(lines[path] for path in sorted(lines)).encode()).hexdigest()


def pinned(pin: Pin, cache: Path, sdist: Optional[Path] = None) -> Source:
    """The sdist of `pin`: from the file `sdist` if given, else from the cache, else from the package index."""
    path = sdist or cache / f"{pin.stem}.tar.gz"
    if sdist is None and not path.exists():
        data = download(pin.version).data
        verify_sdist(pin, data, "the package index")
        store(path, data)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refusal(f"{path}: cannot read the sdist: {error.strerror}") from error
    verify_sdist(pin, data, str(path))
    return Source(pin, data, pin.stem, str(path))


def release(version: str, cache: Path, sha256: Optional[str], commit: str) -> Source:
    """The sdist of any release, as the pin it could become. It must have `sha256` if that is given, else the sha256
    that the index states."""
    path = cache / f"{PROJECT}-{version}.tar.gz"
    if path.exists():
        data, expected, origin = path.read_bytes(), sha256, str(path)
    else:
        got = download(version)
        data, expected, origin = got.data, sha256 or got.index_sha256, "the package index"
    found = hashlib.sha256(data).hexdigest()
    if expected not in (None, found):
        raise Refusal(f"{path.name}: expected sha256 {expected}, found {found}")
    if not path.exists():
        store(path, data)
    digest = tree_digest(members(data, f"{PROJECT}-{version}"))
    pin = Pin(version, commit, found, digest)
    return Source(pin, data, pin.stem, origin)


def verify_sdist(pin: Pin, data: bytes, origin: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != pin.sha256:
        raise Refusal(f"{origin}: {pin.stem}.tar.gz is not the pinned source: expected sha256 {pin.sha256}, found "
                      f"{found} ({len(data)} bytes). If it is a file in the cache, remove it and try again.")


def store(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as sink:
            sink.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class Download(NamedTuple):
    """What the index gave: `index_sha256` is what it says about the file, None if it says nothing."""

    data: bytes
    url: str
    index_sha256: Optional[str]


def _interpreters() -> List[str]:
    """Interpreters that may have pip, the running one first (a virtual environment need not have it)."""
    base = getattr(sys, "_base_executable", None)
    found = [sys.executable, base, shutil.which("python3"), "/usr/bin/python3"]
    return list(dict.fromkeys(name for name in found if name and os.path.exists(name)))


def download(version: str) -> Download:
    """Fetch the sdist of `version` from the user's package index with pip's own finder and session."""
    said = []
    with tempfile.TemporaryDirectory(prefix="vllm-pd-") as folder:
        out = Path(folder, "sdist")
        for python in _interpreters():
            done = subprocess.run([python, str(_PIP_CLIENT), PROJECT, version, str(out)], capture_output=True,
                                  text=True, check=False)
            if done.returncode == 0:
                answer = json.loads(done.stdout.splitlines()[-1])
                return Download(out.read_bytes(), answer["url"], answer["sha256"])
            said.append(f"{python}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    raise Refusal(f"cannot fetch the source of {PROJECT} {version} from the package index ({'; '.join(said)}). "
                  f"Any {PROJECT}-{version}.tar.gz from elsewhere will do: --sdist FILE")


def checkout(pin: Pin, folder: Path) -> Source:
    """The source in a local git checkout: its HEAD must be the pinned commit or have the pinned content, and no file
    may differ from HEAD. What is used is HEAD itself, so ignored files play no part."""
    repo = Repo(folder)
    if not folder.is_dir() or repo.attempt("rev-parse", "--verify", "HEAD^{commit}").returncode != 0:
        raise Refusal(f"{folder}: expected a git checkout of {PROJECT} {pin.version}, found "
                      f"{'no commit' if folder.is_dir() else 'no such folder'}")
    if Path(repo.run("rev-parse", "--show-toplevel").strip()).resolve() != repo.path:
        raise Refusal(f"{folder}: expected the top of a git checkout, found a folder inside one")
    dirt = repo.dirt()
    if dirt:
        raise Refusal(f"{folder}: expected a clean checkout, found {len(dirt)} changed or untracked files, first "
                      f"{', '.join(dirt[:3])}")
    commit = repo.head()
    archive = repo.attempt("archive", "--format=tar", "HEAD").stdout
    if commit != pin.commit:
        found = tree_digest(members(archive, ""))
        if found != pin.tree_sha256:
            raise Refusal(f"{folder}: not {PROJECT} {pin.version}: expected commit {pin.commit} or tree_sha256 "
                          f"{pin.tree_sha256}, found commit {commit} and tree_sha256 {found}")
    return Source(pin, archive, "", f"{folder} at {commit[:12]}")
