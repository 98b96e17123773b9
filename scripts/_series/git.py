# SPDX-License-Identifier: Apache-2.0
"""git, with nothing of the user's configuration, time or locale in its output."""
import os
import subprocess
from pathlib import Path
from typing import Dict, List, Optional

from .errors import Refusal

# Commits made by these tools have fixed dates, so that the same series gives the same hashes everywhere.
DATE = "2025-01-01T00:00:00+0000"
BASE_AUTHOR = "upstream <upstream@localhost>"
# What a diff of ours looks like, whatever the git version's defaults are.
DIFF = ["--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "-U3", "--inter-hunk-context=0",
        "--diff-algorithm=histogram", "--indent-heuristic", "--src-prefix=a/", "--dst-prefix=b/", "--full-index"]


def _environment(extra: Optional[Dict[str, str]]) -> Dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    kept.update(LC_ALL="C", GIT_CONFIG_NOSYSTEM="1", GIT_CONFIG_GLOBAL=os.devnull, GIT_TERMINAL_PROMPT="0",
                GIT_COMMITTER_NAME="vllm-pd", GIT_COMMITTER_EMAIL="vllm-pd@localhost", GIT_COMMITTER_DATE=DATE,
                GIT_EDITOR="true")
    kept.update(extra or {})
    return kept


class Repo:
    """A git work tree at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    def attempt(self, *args: str, stdin: Optional[bytes] = None,
                env: Optional[Dict[str, str]] = None) -> "subprocess.CompletedProcess[bytes]":
        """Run git; the caller looks at the return code."""
        command = ["git", "-C", str(self.path), "-c", f"safe.directory={self.path}", "-c", "core.autocrlf=false",
                   "-c", "core.quotePath=false", "-c", "core.fsmonitor=false", "-c", "gc.auto=0",
                   "-c", "commit.gpgSign=false", "-c", "core.hooksPath=" + os.devnull, *args]
        try:
            return subprocess.run(command, input=stdin, capture_output=True, env=_environment(env), check=False)
        except FileNotFoundError as error:
            raise Refusal("git is not installed: the patch series needs it (Debian: apt-get install git)") from error

    def run(self, *args: str, stdin: Optional[bytes] = None, env: Optional[Dict[str, str]] = None) -> str:
        """Run git and return its output; a failure becomes a Refusal with git's own words."""
        done = self.attempt(*args, stdin=stdin, env=env)
        if done.returncode != 0:
            words = text(done.stderr).strip() or text(done.stdout).strip() or f"exit status {done.returncode}"
            raise Refusal(f"git {' '.join(args[:3])} in {self.path}: {words}")
        return text(done.stdout)

    def create(self) -> None:
        """Make the folder an empty repository whose branch is `main`."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.run("init", "-q", "--template=")
        self.run("symbolic-ref", "HEAD", "refs/heads/main")

    def commit(self, message: str, author: str = BASE_AUTHOR) -> str:
        """Commit the index as it is; the new commit's hash."""
        name, _, address = author.rpartition(" <")
        self.run("commit", "-q", "--allow-empty", "--no-verify", "--cleanup=verbatim", "-F", "-",
                 stdin=message.encode("utf-8"),
                 env={"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": address.rstrip(">"), "GIT_AUTHOR_DATE": DATE})
        return self.head()

    def commit_all(self, message: str, author: str = BASE_AUTHOR) -> str:
        """Commit every file of the work tree, those that upstream's .gitignore names included."""
        self.run("add", "-A", "-f", ".")
        return self.commit(message, author)

    def head(self) -> str:
        return self.run("rev-parse", "HEAD").strip()

    def dirt(self) -> List[str]:
        """Paths that differ from HEAD or that nobody tracks (ignored files apart)."""
        listed = self.run("status", "--porcelain", "--untracked-files=all")
        return [line[3:] for line in listed.splitlines()]

    def content(self, commit: str, path: str) -> Optional[bytes]:
        """Bytes of `path` at `commit`, None if it isn't there."""
        done = self.attempt("cat-file", "blob", f"{commit}:{path}")
        return done.stdout if done.returncode == 0 else None


def text(raw: bytes) -> str:
    """Bytes of git or of a file as text that `raw_bytes` turns back into the same bytes."""
    return raw.decode("utf-8", "surrogateescape")


def raw_bytes(value: str) -> bytes:
    return value.encode("utf-8", "surrogateescape")


def lines(value: str) -> List[str]:
    """Lines as git sees them: str.splitlines would also split at form feeds and the like."""
    return value[:-1].split("\n") if value.endswith("\n") else value.split("\n") if value else []
