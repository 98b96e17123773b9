# SPDX-License-Identifier: Apache-2.0
"""The series as a git work tree: import makes one, export reads one back."""
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import List, Optional

from . import diff, verify
from .errors import Refusal, refuse_all
from .git import Repo
from .patch import KINDS, TRAILERS, Patch, from_message
from .pin import Pin
from .pin import parse as parse_pin
from .source import Source

UPSTREAM_TAG = "upstream"
NEXT_PIN = "vllm-pd-pin"
_HINTS = {"Kind": "|".join(KINDS), "Depends-On": "none, or subjects of earlier patches; separated like this",
          "Forwarded": "url, or no/not-needed with the reason"}


def create(patches: List[Patch], source: Source, folder: Path) -> Repo:
    """A repository in `folder`, new: upstream as its first commit, tagged `upstream`, then one commit per patch.
    It appears as a whole or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refusal(f"{folder}: expected a folder that does not exist or is empty; it is neither")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        repo = Repo(staging)
        repo.create()
        source.unpack(staging)
        repo.commit_all(f"{source.pin.stem}\n")
        repo.run("tag", UPSTREAM_TAG)
        replay(repo, patches)
        staging.chmod(0o755)
        os.replace(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return Repo(folder)


def replay(repo: Repo, patches: List[Patch]) -> None:
    """Commit `patches` on the checked-out branch, one after the other."""
    for patch in patches:
        refuse_all(f"{patch.name}:", verify.apply(repo, patch, "--index"))
        repo.commit(patch.message, patch.author)


def next_pin(repo: Repo) -> Optional[Pin]:
    """The release onto which `series.py rebase` has moved this work tree, None if it hasn't."""
    path = repo.path / ".git" / NEXT_PIN
    return parse_pin(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else None


def base(repo: Repo) -> str:
    """The upstream commit of a work tree: the tag `upstream`."""
    if repo.attempt("rev-parse", "-q", "--verify", f"refs/tags/{UPSTREAM_TAG}^{{commit}}").returncode != 0:
        raise Refusal(f"{repo.path}: expected a git work tree with the tag `{UPSTREAM_TAG}` at upstream's commit, "
                      "as `series.py import` makes it; found none")
    return repo.run("rev-parse", f"refs/tags/{UPSTREAM_TAG}^{{commit}}").strip()


def commits(repo: Repo) -> List[Patch]:
    """The commits since upstream as patches, oldest first; refuses a dirty tree, merges and unfinished fix-ups."""
    dirt = repo.dirt()
    if dirt:
        raise Refusal(f"{repo.path}: expected a clean tree, found {len(dirt)} changed or untracked files, first "
                      f"{', '.join(dirt[:3])}. Commit them (git commit --fixup=COMMIT) or remove them.")
    start = base(repo)
    listed = repo.run("rev-list", "--reverse", "--topo-order", "--parents", f"{start}..HEAD").splitlines()
    found: List[Patch] = []
    parent = start
    for line in listed:
        commit, *parents = line.split()
        if parents != [parent]:
            raise Refusal(f"{repo.path}: expected one line of commits from `{UPSTREAM_TAG}` to HEAD; {commit[:12]} has "
                          f"the parents {', '.join(name[:12] for name in parents)}")
        author, _, message = repo.run("log", "-1", "--format=%an <%ae>%n%B", commit).partition("\n")
        if message.startswith(("fixup!", "squash!", "amend!")):
            raise Refusal(f"{repo.path}: {commit[:12]} is still a {message.splitlines()[0]!r}. Next: "
                          f"git -C {repo.path} rebase -i --autosquash {UPSTREAM_TAG}")
        found.append(from_message(author, message, diff.between(repo, parent, commit)))
        parent = commit
    return found


def same_base(repo: Repo, source: Source) -> None:
    """Refuse a work tree whose upstream commit has a file that is not as in the pinned source: what was changed there
    would be in no patch."""
    pinned = {member.path: hashlib.sha1(b"blob %d\0" % len(member.data) + member.data).hexdigest()
              for member in source.files()}
    found = {}
    for line in repo.run("ls-tree", "-r", base(repo)).splitlines():
        about, _, path = line.partition("\t")
        found[path] = about.split()[2]
    wrong = [path for path, blob in found.items() if pinned.get(path) != blob]
    refuse_all(f"{repo.path}: its commit `{UPSTREAM_TAG}` is not {source.pin.stem}:",
               [f"{path} {'differs from' if path in pinned else 'is not in'} the pinned source" for path in wrong[:10]])


def begin(repo: Repo, subject: str) -> str:
    """Commit what has changed in the tree as a new patch whose trailers are still to be written; its message."""
    if not repo.dirt():
        raise Refusal(f"{repo.path}: nothing has changed. Edit first, then `new` makes the commit.")
    base(repo)
    trailers = "".join(f"{key}: TODO{' ' + _HINTS[key] if key in _HINTS else ''}\n" for key in TRAILERS)
    message = f"{subject}\n\nTODO the problem, then why this line and no other.\n\n{trailers}"
    repo.run("add", "-A")
    repo.commit(message, "vllm-pd <vllm-pd@localhost>")
    return message
