# SPDX-License-Identifier: Apache-2.0
"""patches/for_upstream: mends of ours that upstream needs too, as it would take them: each by itself on the newest
release, with its tests in upstream's folders and signed off by its sender.
"""
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

from . import diff, verify, work
from .errors import Refusal, refuse_all
from .git import raw_bytes, text
from .patch import Patch, parse
from .pin import parse_pairs
from .source import Source

FOLDER = "for_upstream"
RELEASE = "RELEASE"
DROP_WHEN = "DROP_WHEN"
_SHAPES = {"version": re.compile(r"\d+(\.\d+)+"), "sha256": re.compile(r"[0-9a-f]{64}")}


class Release(NamedTuple):
    """The release that the proposals are for, and the sha256 of its source distribution."""
    version: str
    sha256: str


def release(folder: Path) -> Release:
    """That of patches/for_upstream. Refuses a file with anything but one line `key = value` for each of both."""
    path = folder / RELEASE
    try:
        return Release(**parse_pairs(path.read_text(encoding="utf-8"), str(path), _SHAPES))
    except OSError as error:
        raise Refusal(f"{path}: cannot read the release: {error.strerror}") from error


def load(folder: Path) -> List[Patch]:
    """All proposals, by file name. Refuses one without a test, and none at all."""
    found = [parse(text(path.read_bytes()), path.name) for path in sorted(folder.glob("*.patch"))]
    if not found:
        raise Refusal(f"{folder}: expected proposals, NAME.patch; found none")
    problems = [f"{patch.name}: changes no file below tests/" for patch in found
                if not any(path.startswith("tests/") for path in touched(patch))]
    refuse_all(f"{folder}:", problems)
    return found


def touched(patch: Patch) -> List[str]:
    """The files that a proposal changes or makes; a patch of the series makes none."""
    return patch.paths + re.findall(r"^--- /dev/null\n\+\+\+ b/(.*)$", patch.diff, re.MULTILINE)


def sender() -> Tuple[str, str]:
    """Name and address for Signed-off-by, which certifies the origin of a change: those of the user's git, since nobody
    else can certify it."""
    said = []
    for key in ("user.name", "user.email"):
        done = subprocess.run(["git", "config", key], capture_output=True, text=True, check=False)
        if not done.stdout.strip():
            raise Refusal(f"git config {key} is not set: Signed-off-by says who certifies that a change may be given "
                          f"to upstream. Write git config --global {key} NAME")
        said.append(done.stdout.strip())
    return said[0], said[1]


def write(patches: List[Patch], source: Source, folder: Path, name: str, address: str) -> List[Path]:
    """Make `folder`, new: a git work tree of the release, on the branch `main`, with a branch for each proposal, and a
    file to mail or to apply beside each. Refuses a proposal that does not apply as it is, or does not compile."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refusal(f"{folder}: expected a folder that does not exist or is empty; it is neither")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        repo = work.create([], source, staging / "tree")
        upstream = repo.head()
        problems: List[str] = []
        for patch in patches:
            branch = patch.name[:-len(".patch")]
            repo.run("checkout", "-q", "-b", branch, upstream)
            wrong = verify.apply(repo, patch, "--index")
            if wrong:
                problems += [f"{patch.name}: {one}" for one in wrong]
                repo.run("reset", "-q", "--hard", upstream)
                continue
            problems += [f"{patch.name}: {one}" for one in verify.compile_all(repo.path, touched(patch))]
            signed = Patch(f"{name} <{address}>", patch.subject, f"{patch.body}\n\nSigned-off-by: {name} <{address}>",
                           patch.diff)
            commit = repo.commit(signed.message, signed.author)
            mailed = Patch(signed.author, signed.subject, signed.body, diff.between(repo, upstream, commit))
            (staging / patch.name).write_bytes(raw_bytes(mailed.render()))
        refuse_all(f"not as {source.pin.stem} needs it:", problems)
        repo.run("checkout", "-q", "main")
        staging.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.replace(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return [folder / patch.name for patch in patches]


class Condition(NamedTuple):
    """What a trailer Drop-When waits for, and how it is seen in a release: `file` is `absent`, or its text has
    `pattern`, or with `negated` has it no more."""
    text: str
    file: str
    absent: bool
    negated: bool
    pattern: str

    def holds(self, content: Optional[str]) -> bool:
        """Whether it is true, by the content of the file; None: there is no such file. Refuses that where the content
        was to be read: the file has another name now, and the condition is to be written anew."""
        if self.absent:
            return content is None
        if content is None:
            raise Refusal(f"{DROP_WHEN}: {self.text}: the release has no {self.file}: say where it is seen now")
        return bool(re.search(self.pattern, content, re.DOTALL)) is not self.negated


def conditions(folder: Path) -> List[Condition]:
    """All of `DROP_WHEN`. Refuses a line that is none."""
    path, found = folder / DROP_WHEN, []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Refusal(f"{path}: cannot read the conditions: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ", 2)]
        if len(parts) < 3 or not all(parts):
            raise Refusal(f"{path}:{number}: expected condition | file | absent, PATTERN or not PATTERN; found "
                          f"{line!r}")
        negated = parts[2].startswith("not ")
        pattern = parts[2][4:] if negated else parts[2]
        try:
            re.compile(pattern)
        except re.error as error:
            raise Refusal(f"{path}:{number}: {pattern!r} is no pattern: {error}") from error
        found.append(Condition(parts[0], parts[1], parts[2] == "absent", negated, pattern))
    return found


def dropped(series: List[Patch], known: List[Condition], source: Source) -> Dict[str, List[str]]:
    """The conditions that are true in this source, and the patches of the series that wait for each. Refuses a
    condition on upstream that no patch has, or that a patch has and nobody can see."""
    waiting: Dict[str, List[str]] = {}
    for patch in series:
        waiting.setdefault(patch.trailers["Drop-When"], []).append(patch.name)
    texts = {one.text for one in known}
    problems = [f"no patch waits for {text!r}" for text in sorted(texts - waiting.keys())]
    problems += [f"{', '.join(names)}: nothing says how to see {text!r}" for text, names in waiting.items()
                 if text.startswith(("upstream", "the V0 engine")) and text not in texts]
    refuse_all(f"{DROP_WHEN}:", problems)
    files = {one.path: text(one.data) for one in source.files({one.file for one in known})}
    return {one.text: waiting[one.text] for one in known if one.holds(files.get(one.file))}
