# SPDX-License-Identifier: Apache-2.0
"""Diffs between two commits, normalised: the same change gives the same bytes with every git.

git's own hunk headings come from patterns that differ between versions, and `index` lines carry hashes; so the headings
are made here (the nearest `class` or `def` above the hunk) and `index` lines are left out.
"""
import re
from typing import List

from .git import DIFF, Repo, lines, text
from .patch import walk

_HEADING = re.compile(r"\s*(?:async\s+def|def|class)\s")
_HEADING_CHARACTERS = 60


def between(repo: Repo, old: str, new: str) -> str:
    """The change from commit `old` to commit `new`, files in git's order (by path)."""
    out: List[str] = []
    before: List[str] = []
    path = ""
    for place, line in walk(lines(repo.run("diff-tree", "-p", "-r", *DIFF, old, new))):
        if place and place.path != path:
            path = place.path
            before = lines(text(repo.content(old, path) or b""))
        if place and line.startswith("@@ "):
            line = place.header + _heading(before, place.start)
        if place or not line.startswith("index "):
            out.append(line)
    return "".join(line + "\n" for line in out)


def _heading(before: List[str], start: int) -> str:
    for line in reversed(before[:max(start - 1, 0)]):
        if _HEADING.match(line):
            return " " + line.strip()[:_HEADING_CHARACTERS].rstrip()
    return ""
