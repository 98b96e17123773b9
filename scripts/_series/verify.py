# SPDX-License-Identifier: Apache-2.0
"""Apply a series to the pinned source, in a throw-away folder, and say everything that is wrong with it."""
import hashlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional

from . import diff, folder, lint
from .git import Repo, raw_bytes, text
from .patch import Patch, from_message
from .source import Source

_FAILED = re.compile(r"error: patch failed: (.+):(\d+)")
_MISSING = re.compile(r"error: (.+): (does not exist in index|No such file or directory)")


@dataclass
class Verdict:
    """`problems` is empty if the series is good; then `made` is what patches/ must hold."""

    problems: List[str] = field(default_factory=list)
    made: Dict[str, str] = field(default_factory=dict)
    whole: str = ""


def apply(repo: Repo, patch: Patch, *options: str, env: Optional[Dict[str, str]] = None) -> List[str]:
    """Apply a patch as a whole or not at all, where its whole context is found; file and hunk of each failure.
    `options` say to what: `--index` is the work tree and the index, `--cached` the index that `env` names."""
    done = repo.attempt("apply", "--whitespace=nowarn", *options, "-", stdin=raw_bytes(patch.diff), env=env)
    if done.returncode == 0:
        return []
    failures = []
    for line in text(done.stderr).splitlines():
        failed, missing = _FAILED.match(line), _MISSING.match(line)
        if failed:
            hunk = next((hunk for hunk in patch.hunks()
                         if hunk.path == failed.group(1) and hunk.start == int(failed.group(2))), None)
            where = f"hunk {hunk.number} ({hunk.header})" if hunk else f"the hunk at line {failed.group(2)}"
            failures.append(f"{failed.group(1)}: {where} does not apply")
        elif missing:
            failures.append(f"{missing.group(1)}: no such file")
    return failures or [text(done.stderr).strip()]


def series(patches: List[Patch], source: Source, python: Optional[str] = None) -> Verdict:
    """Check `patches` against `source`; with `python`, an interpreter that has vLLM's requirements, also import the
    touched modules after each patch."""
    verdict = Verdict()
    earlier: List[str] = []
    for patch in patches:
        if patch.name in earlier:
            verdict.problems.append(f"{patch.name}: two patches have this name")
        verdict.problems.extend(lint.problems(patch, earlier))
        earlier.append(patch.name)
    with tempfile.TemporaryDirectory(prefix="vllm-pd-series-") as temporary:
        repo = Repo(Path(temporary, "tree"))
        repo.create()
        touched = {path for patch in patches for path in patch.paths}
        source.unpack(repo.path, None if python else touched)
        base = repo.commit_all("upstream\n")
        written = _apply_all(patches, repo, python, verdict)
        if len(written) == len(patches):
            verdict.whole = diff.between(repo, base, repo.head())
            sums = {path: hashlib.sha256((repo.path / path).read_bytes()).hexdigest()
                    for path in touched if (repo.path / path).is_file()}
            verdict.made = folder.content(written, sums, verdict.whole)
            verdict.problems.extend(_alone(patches, repo, base))
    return verdict


def _apply_all(patches: List[Patch], repo: Repo, python: Optional[str], verdict: Verdict) -> List[Patch]:
    """Apply and commit one after the other; the patches as an export would write them, up to the first that fails."""
    written: List[Patch] = []
    for patch in patches:
        failures = apply(repo, patch, "--index")
        if failures:
            verdict.problems.extend(f"{patch.name}: {failure}" for failure in failures)
            break
        before = repo.head()
        after = repo.commit(patch.message, patch.author)
        written.append(from_message(patch.author, patch.message, diff.between(repo, before, after)))
        verdict.problems.extend(f"{patch.name}: after it {problem}" for problem in compile_all(repo.path, patch.paths))
        if python:
            verdict.problems.extend(f"{patch.name}: after it {problem}"
                                    for problem in _import(repo.path, patch.paths, python))
    return written


def _alone(patches: List[Patch], repo: Repo, base: str) -> List[str]:
    """Patches that don't apply on upstream with nothing but what they say they depend on."""
    by_name = {patch.name: patch for patch in patches}
    order = list(by_name)
    index = {"GIT_INDEX_FILE": str(repo.path / ".git" / "alone")}
    found = []
    for patch in patches:
        needed, waiting = set(), list(patch.depends_on)
        while waiting:
            name = waiting.pop()
            if name in by_name and name not in needed:
                needed.add(name)
                waiting.extend(by_name[name].depends_on)
        repo.run("read-tree", base, env=index)
        said = ", ".join(patch.depends_on) or "none"
        for name in sorted(needed, key=order.index):
            if apply(repo, by_name[name], "--cached", env=index):
                break
        else:
            found += [f"{patch.name}: says Depends-On: {said}, but with that alone {failure}"
                      for failure in apply(repo, patch, "--cached", env=index)]
    return found


def compile_all(root: Path, paths: List[str]) -> List[str]:
    """Touched Python files that don't compile."""
    found = []
    for path in paths:
        if path.endswith(".py") and (root / path).is_file():
            try:
                compile((root / path).read_bytes(), path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                found.append(f"{path} does not compile: {error}")
    return found


def _import(root: Path, paths: List[str], python: str) -> List[str]:
    """Touched modules that `python` can't import from the tree. Nothing is written into the tree."""
    modules = [path[:-3].replace("/", ".").replace(".__init__", "") for path in paths
               if path.endswith(".py") and path.startswith("vllm/")]
    search = [str(root), str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(search), PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([python, "-c", _IMPORTS, *modules], cwd=root, env=environment, capture_output=True,
                          text=True, check=False)
    found = [line[len(_MARK):] for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 and not found:
        found = [f"the imports of {', '.join(modules)} end with status {done.returncode}: {done.stderr.strip()[-300:]}"]
    return found


_PROJECT = Path(__file__).resolve().parent.parent.parent
_MARK = "cannot import: "
_IMPORTS = f"""\
import importlib, sys
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed.append(f"{{name}} cannot be imported: {{type(error).__name__}}: {{str(error).partition(chr(10))[0]}}")
for line in failed:
    print("{_MARK}" + line)
sys.exit(bool(failed))
"""
