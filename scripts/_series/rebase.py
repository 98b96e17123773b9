# SPDX-License-Identifier: Apache-2.0
"""Move the series to another upstream release.

A rebase lives in a git work tree with three points: the tag `series-OLD` (the old upstream and the patches on it), the
tag `upstream` (the new upstream) and the branch, onto which git cherry-picks the patches one by one, three-way where
the context has changed. Running the same command again goes on where it stopped; all state is git's own.
"""
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import List

from . import verify, work
from .errors import Refusal
from .git import Repo, text
from .patch import Patch
from .source import Source


@dataclass(frozen=True)
class Fate:
    """What became of a patch: `word` is clean, fuzz, 3-way, contained or conflict."""

    patch: Patch
    word: str
    remarks: List[str]


def begin(patches: List[Patch], old: Source, new: Source, folder: Path) -> Repo:
    """A work tree in `folder` with the new upstream checked out and nothing picked yet."""
    repo = work.create(patches, old, folder)
    repo.run("tag", f"upstream-{old.pin.version}", work.UPSTREAM_TAG)
    repo.run("tag", f"series-{old.pin.version}")
    repo.run("reset", "-q", "--hard", work.UPSTREAM_TAG)
    repo.run("rm", "-r", "-f", "-q", ".")
    new.unpack(repo.path)
    repo.commit_all(f"{new.pin.stem}\n")
    repo.run("tag", "-f", work.UPSTREAM_TAG)
    (repo.path / ".git" / work.NEXT_PIN).write_text(new.pin.text(), encoding="utf-8")
    return repo


def pick(repo: Repo) -> List[str]:
    """Pick the patches of a rebase that has just begun; what stands in the way, file by file, nothing if all are in."""
    return _through(repo, repo.attempt("cherry-pick", _old_series(repo)))


def go_on(repo: Repo) -> List[str]:
    """Pick the rest, if what stood in the way has been mended, or all of them if none has been picked; as `pick`."""
    stuck = _stuck(repo)
    if stuck:
        return stuck
    if (repo.path / ".git" / "sequencer").is_dir() or _picking(repo):
        return _through(repo, repo.attempt("cherry-pick", "--continue"))
    return pick(repo) if repo.head() == work.base(repo) else []


def left_out(repo: Repo) -> List[str]:
    """Subjects of the old series that no commit on the new upstream has, in order."""
    there = repo.run("log", "--format=%s", f"{work.UPSTREAM_TAG}..HEAD").splitlines()
    old = repo.run("log", "--reverse", "--format=%s", _old_series(repo)).splitlines()
    return [subject for subject in old if subject not in there]


def _old_series(repo: Repo) -> str:
    """The patches on the old upstream, as a range of commits."""
    tag = repo.run("tag", "--list", "series-*").strip()
    return f"upstream-{tag[len('series-'):]}..{tag}"


def _through(repo: Repo, done: "subprocess.CompletedProcess[bytes]") -> List[str]:
    while done.returncode != 0:
        stuck = _stuck(repo)
        empty = _picking(repo) and repo.attempt("diff", "--cached", "--quiet").returncode == 0
        if stuck or not empty:
            return stuck or [text(done.stderr).strip()]
        # Nothing is left of the patch: the new upstream contains it.
        done = repo.attempt("cherry-pick", "--skip")
    return []


def current(repo: Repo) -> str:
    """Subject of the patch at which the picking stands."""
    return text(repo.attempt("log", "-1", "--format=%s", "CHERRY_PICK_HEAD").stdout).strip() or "no patch"


def fates(repo: Repo, patches: List[Patch], old_version: str) -> List[Fate]:
    """Try each patch on the new upstream; one that conflicts is left out, and the next is tried without it."""
    commits = repo.run("rev-list", "--reverse", f"upstream-{old_version}..series-{old_version}").split()
    found: List[Fate] = []
    for patch, commit in zip(patches, commits):
        strict = verify.apply(repo, patch, "--check", "--index")
        fuzzy = bool(strict) and not verify.apply(repo, patch, "--check", "--index", "-C1")
        done = repo.attempt("cherry-pick", commit)
        remarks: List[str] = []
        if done.returncode == 0:
            word = "clean" if not strict else "fuzz" if fuzzy else "3-way"
            remarks = verify.compile_all(repo.path, patch.paths)
        else:
            remarks = _stuck(repo) and _where(repo, patch)
            word = "conflict" if remarks else "contained"
            repo.run("cherry-pick", "--abort")
        found.append(Fate(patch, word, remarks))
    return found


def table(found: List[Fate]) -> str:
    """What would become of each patch on another release, as a Markdown table, and how many go which way."""
    rows = ["| patch | on the new release | where |", "|---|---|---|"]
    rows += [f"| {fate.patch.subject} | {fate.word} | {'; '.join(fate.remarks)} |" for fate in found]
    words = [fate.word for fate in found]
    return "\n".join(rows) + "\n\n" + ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def _picking(repo: Repo) -> bool:
    return repo.attempt("rev-parse", "-q", "--verify", "CHERRY_PICK_HEAD").returncode == 0


def _stuck(repo: Repo) -> List[str]:
    """Files in conflict, with the lines of each conflict in the work tree."""
    listed = repo.run("diff", "--name-only", "--diff-filter=U").splitlines()
    found = []
    for path in listed:
        file = repo.path / path
        marks = [number for number, line in enumerate(file.read_bytes().split(b"\n"), 1)
                 if re.match(rb"<<<<<<< ", line)] if file.is_file() else []
        places = f"conflicts at line {', '.join(map(str, marks))}" if marks else "no conflict marks, but not added yet"
        found.append(f"{path}: {places if file.is_file() else 'is gone from the new release'}")
    return found


def _where(repo: Repo, patch: Patch) -> List[str]:
    """The hunks of `patch` that don't apply by themselves on HEAD."""
    index = {"GIT_INDEX_FILE": str(repo.path / ".git" / "head-index")}
    repo.run("read-tree", "HEAD", env=index)
    found = []
    for hunk in patch.hunks():
        if repo.content("HEAD", hunk.path) is None:
            found.append(f"{hunk.path}: no such file")
        elif verify.apply(repo, patch.only(hunk), "--cached", "--check", env=index):
            found.append(f"{hunk.path}: hunk {hunk.number} ({hunk.header})")
    return list(dict.fromkeys(found))


def resume(folder: Path, version: str) -> Repo:
    """The work tree of a rebase that was begun; refuses one of something else."""
    repo = Repo(folder)
    pin = work.next_pin(repo)
    if pin is None or pin.version != version:
        raise Refusal(f"{folder}: expected a folder that does not exist, or the work tree of a rebase to {version}; "
                      f"found {'a rebase to ' + pin.version if pin else 'neither'}")
    return repo
