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
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

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
        return list(dict.fromkeys(place.path for place, _ in walk(lines(self.diff)) if place))

    def added(self) -> List[str]:
        return self._changed("+")

    def removed(self) -> List[str]:
        return self._changed("-")

    def hunks(self) -> List[Hunk]:
        return list(dict.fromkeys(place for place, _ in walk(lines(self.diff)) if place))

    def only(self, wanted: Hunk) -> "Patch":
        """The patch with nothing but one of its hunks."""
        head = [f"diff --git a/{wanted.path} b/{wanted.path}", f"--- a/{wanted.path}", f"+++ b/{wanted.path}"]
        kept = head + [line for place, line in walk(lines(self.diff)) if place == wanted]
        return Patch(self.author, self.subject, self.body, "".join(line + "\n" for line in kept))

    def _changed(self, sign: str) -> List[str]:
        return [line[1:] for place, line in walk(lines(self.diff)) if place and line.startswith(sign)]

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


def walk(diff: List[str]) -> Iterator[Tuple[Optional[Hunk], str]]:
    """Each line of a diff with the hunk that it belongs to, None for the lines between hunks. Which is which goes by
    the hunks' line counts: a removed line may look like a header."""
    path, number, old, new, place = "", 0, 0, 0, None
    for line in diff:
        found = _HUNK.match(line)
        if old <= 0 and new <= 0 and not line.startswith("\\"):
            place = None
            if line.startswith("--- a/"):
                path, number = line[6:].split("\t")[0], 0
            elif found:
                number += 1
                old, new = (int(found.group(group) or 1) for group in (2, 4))
                place = Hunk(path, number, int(found.group(1)), found.group(0))
        elif place:
            old -= line[:1] in " -"
            new -= line[:1] in " +"
        yield place, line


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
