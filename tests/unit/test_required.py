# SPDX-License-Identifier: Apache-2.0
"""B92: how the names that the V1 binding stands on are looked for in a source, and what the documents say of them."""
import re
from pathlib import Path

import pytest

from vllm_pd.model.source_names import Required, missing_names
from vllm_pd.v1.required import REQUIRED, SUPPORTED

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = [one.name for names in REQUIRED.values() for one in names]
NO_PATCH = "Not two lines"  # the section of docs/upstreaming.md that proposes nothing
REMOVED = re.compile(r"^Private names removed: (\d+)(?: \(([^)]*)\))?\.(?:$| )", re.MULTILINE)

SOURCE = """
class Pool:
    size: int = 0
    def __init__(self, blocks): self.blocks = blocks; self.seen: set[str] = set()
    def touch(self, blocks, owner=None): ...
    @property
    def free(self): return 1
class Struct:
    name: str
    age: int = 0
def made(name, *, age): ...
"""


@pytest.mark.parametrize("name, given, fits", [
    ("Pool", {}, True), ("Pool.size", {}, True), ("Pool.blocks", {}, True), ("Pool.seen", {}, True),
    ("Pool.free", {}, True), ("Pool.gone", {}, False), ("Gone", {}, False), ("Gone.size", {}, False),
    ("Struct.blocks", {}, False), ("Pool.touch", {"takes": ("blocks", )}, True),
    ("Pool.touch", {"takes": ("blocks", "owner")}, True), ("Pool.touch", {"takes": ()}, False),
    ("Pool.touch", {"takes": ("blocks", "other")}, False), ("Pool.touch", {"exactly": ("blocks", )}, False),
    ("Pool.touch", {"exactly": ("blocks", "owner")}, True), ("Struct", {"takes": ("name", )}, True),
    ("Struct", {"takes": ("age", )}, False), ("made", {"takes": ("name", "age")}, True),
    ("made", {"takes": ("name", )}, False), ("made", {}, True),
])
def test_b92_a_name_is_found_with_its_parameters(name, given, fits):
    """B92"""
    found = missing_names({"file.py": (Required(name, "reason", **given), )}, {"file.py": SOURCE}.get)
    assert (found == []) is fits
    assert all(name in text and "vllm/file.py" in text for text in found)


def test_b92_a_missing_file_is_named():
    """B92"""
    assert missing_names({"file.py": (), "gone.py": ()}, {"file.py": ""}.get) == ["vllm/gone.py"]


def test_every_name_has_a_reason():
    assert all(one.reason for names in REQUIRED.values() for one in names)


def proposal_problems(text: str) -> list[str]:
    """What is wrong with the figures of the proposals in a text as docs/upstreaming.md: each section has one, with as
    many names of the list."""
    problems = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        said = REMOVED.findall(section)
        if title == NO_PATCH and not said:
            continue
        if len(said) != 1:
            problems.append(f"{title}: {len(said)} figures")
            continue
        [(count, listed)] = said
        names = re.findall(r"`([^`]+)`", listed)
        if len(names) != int(count):
            problems.append(f"{title}: {count} are {len(names)}")
        problems += [f"{title}: {name}" for name in names if name not in NAMES or names.count(name) > 1]
    return problems


def test_each_proposal_says_how_many_private_names_it_would_remove():
    text = (DOCS / "upstreaming.md").read_text()
    assert proposal_problems(text) == []
    assert len(REMOVED.findall(text)) >= 14
    assert f"stands on {len(NAMES)} private names" in text


@pytest.mark.parametrize("text, problems", [
    ("## A\n", ["A: 0 figures"]), ("## A\nPrivate names removed: 0.\n", []), ("## Not two lines\n- B\n", []),
    ("## A\nPrivate names removed: 0.\n## B\n", ["B: 0 figures"]),
    ("## A\nPrivate names removed: 1.\n", ["A: 1 are 0"]),
    ("## A\nPrivate names removed: 1 (`Scheduler.nonesuch`).\n", ["A: Scheduler.nonesuch"]),
    ("## A\nPrivate names removed: 2 (`Scheduler.running`,\n`Scheduler.running`). B\n", ["A: Scheduler.running"] * 2),
    ("## A\nPrivate names removed: 1 (`Scheduler.running`). B\n", []),
])
def test_a_wrong_figure_of_a_proposal_is_seen(text, problems):
    assert proposal_problems(text) == problems


def test_the_documents_say_how_many_names_each_release_has():
    """A row of an older release is right for the list of the day on which it was looked for."""
    text = (DOCS / "rebasing.md").read_text()
    assert f"have all {len(NAMES)} names of today's list" in text
    [listed] = map(int, re.findall(r"for the (\d+) names of that day's list", text))
    rows = [(releases.split(", "), int(has), int(lacks)) for releases, has, lacks in re.findall(
        r"^\| (\d[\d., ]+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)]
    assert len(rows) >= 8 and all(has + lacks == listed for _, has, lacks in rows)
    whole = [release.rpartition(".")[0] for releases, _, lacks in rows for release in releases if lacks == 0]
    assert sorted(whole) == sorted(SUPPORTED)
