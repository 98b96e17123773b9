# SPDX-License-Identifier: Apache-2.0
"""One patch: a mail header, a body that ends in trailers, and a diff. It is also a commit: the same author, the same
message, the same change. The text is made of nothing that depends on a date, a hash or a git version, so writing it
twice gives the same bytes.

    From: Name <address>
    Subject: area: imperative

    Why, in prose.

    Kind: seam
    ...
    ---
    diff --git a/vllm/... b/vllm/...
"""
import re
from dataclasses import dataclass
from typing import Dict, Iterator, List, NamedTuple, Tuple

from .errors import Refusal
from .git import lines

KINDS = ("seam", "hook", "backport", "fix", "queue")
TRAILERS = ("Kind", "Why-Not-Plugin", "Used-By", "Forwarded", "Depends-On", "Drop-When")
_TRAILER = re.compile(r"([A-Z][A-Za-z-]*): ?(.*)")
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Hunk(NamedTuple):
    """`number` counts from 1 within its file; `start` is its first line in the file before the patch."""

    path: str
    number: int
    start: int
    header: str


@dataclass(frozen=True)
class Patch:
    """`body` is the message without its subject, trailers included, without blank lines around it."""

    author: str
    subject: str
    body: str
    diff: str

    @property
    def name(self) -> str:
        return file_name(self.subject)

    @property
    def message(self) -> str:
        return f"{self.subject}\n\n{self.body}\n" if self.body else f"{self.subject}\n"

    @property
    def prose(self) -> str:
        """The body without its trailers."""
        return "\n\n".join(self._split()[0])

    @property
    def trailers(self) -> Dict[str, str]:
        """Trailer values by key, in the order in which they are written, each on one line."""
        return dict(self._split()[1])

    @property
    def depends_on(self) -> List[str]:
        """File names of the patches that this one says it needs; it may name them by subject or by file."""
        value = self.trailers.get("Depends-On", "none")
        named = [] if value == "none" else [name.strip() for name in re.split("[,;]", value)]
        return [name if name.endswith(".patch") else file_name(name) for name in named]

    @property
    def paths(self) -> List[str]:
        """Upstream files that the diff touches."""
        return [line[6:].split("\t")[0] for line in lines(self.diff) if line.startswith("--- a/")]

    def added(self) -> List[str]:
        return [line[1:] for line in self._changes("+")]

    def removed(self) -> List[str]:
        return [line[1:] for line in self._changes("-")]

    def _changes(self, sign: str) -> Iterator[str]:
        inside = False
        for line in lines(self.diff):
            if line.startswith("diff --git "):
                inside = False
            elif line.startswith("@@ "):
                inside = True
            elif inside and line.startswith(sign):
                yield line

    def hunks(self) -> Iterator[Hunk]:
        path, number = "", 0
        for line in lines(self.diff):
            if line.startswith("--- a/"):
                path, number = line[6:].split("\t")[0], 0
            found = _HUNK.match(line)
            if found:
                number += 1
                yield Hunk(path, number, int(found.group(1)), found.group(0))

    def only(self, wanted: Hunk) -> "Patch":
        """The patch with nothing but one of its hunks."""
        kept: List[str] = []
        path, number, inside = "", 0, False
        for line in lines(self.diff):
            if line.startswith("--- a/"):
                path, number, inside = line[6:].split("\t")[0], 0, False
                if path == wanted.path:
                    kept += [f"diff --git a/{path} b/{path}", line, f"+++ b/{path}"]
            elif line.startswith("@@ "):
                number += 1
                inside = (path, number) == (wanted.path, wanted.number)
            elif line.startswith("diff --git "):
                inside = False
            if inside:
                kept.append(line)
        return Patch(self.author, self.subject, self.body, "".join(line + "\n" for line in kept))

    def _split(self) -> Tuple[List[str], List[Tuple[str, str]]]:
        paragraphs = self.body.split("\n\n")
        trailers: List[Tuple[str, str]] = []
        for line in paragraphs[-1].splitlines():
            found = _TRAILER.fullmatch(line)
            if found and found.group(1) in TRAILERS:
                trailers.append((found.group(1), found.group(2).strip()))
            elif trailers and line[:1] == " ":
                trailers[-1] = (trailers[-1][0], f"{trailers[-1][1]} {line.strip()}".strip())
            else:
                return paragraphs, []
        return paragraphs[:-1], trailers

    def render(self) -> str:
        return f"From: {self.author}\nSubject: {self.subject}\n\n{self.body}\n---\n{self.diff}"


def file_name(subject: str) -> str:
    """A patch file's name: the subject in small letters, joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-") + ".patch"


def from_message(author: str, message: str, diff: str) -> Patch:
    subject, _, body = message.strip("\n").partition("\n")
    return Patch(author, subject.strip(), "\n".join(line.rstrip() for line in body.strip("\n").splitlines()), diff)


def parse(text: str, name: str) -> Patch:
    """A patch file's text as a Patch; `name` is only for the error."""
    header, begin, diff = text.partition("\n---\n")
    head = lines(header)
    if not begin or len(head) < 3 or not head[0].startswith("From: ") or not head[1].startswith("Subject: ") or head[2]:
        raise Refusal(f"{name}: expected `From:`, `Subject:`, an empty line, the body, a line `---` and the diff")
    return Patch(head[0][6:], head[1][9:], "\n".join(head[3:]), diff)
