# SPDX-License-Identifier: Apache-2.0
"""What a patch must say about itself, and what its diff must not do."""
import re
from typing import Iterator, List

from .git import lines
from .patch import KINDS, TRAILERS, Patch

AREAS = ("alloc", "config", "connector", "cpu", "dp", "engine", "events", "executor", "fix", "frontend", "metrics",
         "outputs", "platform", "sched", "worker")
SUBJECT_CHARACTERS = 72
# Only the first word after the area is looked at: `adds`, `added`, `adding` are not imperative.
_NOT_IMPERATIVE = re.compile(r"[a-z]+(?:(?<!e)ed|ing|[^s]s)")
_IMPERATIVE = frozenset(["bring", "embed", "focus", "ping", "shed"])
_OWN = re.compile(r"vllm_pd")
_OWN_ALLOWED = re.compile(r"from vllm_pd\.v0 import hooks|vllm_pd\.v0\.hooks")
_HEADER_REFUSED = {"new file mode": "adds a file", "deleted file mode": "deletes a file", "old mode": "changes a mode",
                   "Binary files": "changes a binary file", "GIT binary patch": "changes a binary file",
                   "rename from": "renames a file", "index ": "has an index line"}


def problems(patch: Patch, earlier: List[str]) -> Iterator[str]:
    """What is wrong with `patch`, which follows the files `earlier` in the series. Nothing if all is well."""
    for problem in (*_subject(patch), *_body(patch), *_trailers(patch, earlier), *_diff(patch)):
        yield f"{patch.name}: {problem}"


def _subject(patch: Patch) -> Iterator[str]:
    area, colon, rest = patch.subject.partition(": ")
    if not colon or area not in AREAS:
        yield f"subject must begin with one of the areas {', '.join(AREAS)} and `: `; found {patch.subject!r}"
        rest = rest or patch.subject
    word = rest.split(" ")[0]
    if word not in _IMPERATIVE and _NOT_IMPERATIVE.fullmatch(word) or not word[:1].islower():
        yield f"subject must be imperative (`{area}: add ...`), in small letters; found {word!r}"
    if len(patch.subject) > SUBJECT_CHARACTERS or patch.subject.endswith(".") or not patch.subject.isascii():
        yield (f"subject must be at most {SUBJECT_CHARACTERS} ASCII characters without a full stop; "
               f"found {patch.subject!r}")
    if not re.fullmatch(r"[^<>\n]+ <[^<>\s]+>", patch.author):
        yield f"author must be `Name <address>`; found {patch.author!r}"


def _body(patch: Patch) -> Iterator[str]:
    if len(patch.prose.split()) < 8:
        yield "body must say the problem, and why this line and no other (at least a sentence before the trailers)"
    for line in patch.body.splitlines():
        # git am would end the message, or take a header from it, at such a line.
        if re.match(r"---|diff -|Index: |From: |Date: |Subject: |>From ", line):
            yield f"body may not have a line that git takes for a separator: {line!r}"


def _trailers(patch: Patch, earlier: List[str]) -> Iterator[str]:
    found = patch.trailers
    for key in TRAILERS:
        if key not in found:
            yield f"trailer {key}: is missing (the last paragraph must have {', '.join(TRAILERS)}, and nothing else)"
        elif not found[key] or "TODO" in found[key]:
            yield f"trailer {key}: has no value yet"
    if found and [key for key in found if key in TRAILERS] != [key for key in TRAILERS if key in found]:
        yield f"trailers must come in the order {', '.join(TRAILERS)}"
    if "Kind" in found and found["Kind"] not in KINDS:
        yield f"Kind: must be one of {', '.join(KINDS)}; found {found['Kind']!r}"
    for name in patch.depends_on:
        if name not in earlier:
            yield f"Depends-On: must be `none` or earlier patches of the series, separated by `;`; found {name!r}"


def _diff(patch: Patch) -> Iterator[str]:
    if not patch.paths:
        yield "has no diff"
    for line in lines(patch.diff):
        for start, meaning in _HEADER_REFUSED.items():
            if line.startswith(start):
                yield f"{meaning}: only changes inside existing text files are allowed; found {line!r}"
    kind = patch.trailers.get("Kind")
    for line in patch.added():
        if not _OWN.search(line):
            continue
        if kind not in ("hook", "queue"):
            yield f"a {kind} must not name vllm_pd; found {line.strip()!r}"
        elif not _OWN_ALLOWED.search(line):
            yield f"patches may reach vllm_pd only through vllm_pd.v0.hooks; found {line.strip()!r}"
    for line in patch.added():
        if line != line.rstrip():
            yield f"adds white space at the end of a line: {line!r}"
