# SPDX-License-Identifier: Apache-2.0
"""What a reader follows in the README and in docs/ is there: links, files, modules, commands and their options."""
import functools
import re
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from vllm_pd.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"vllm-pd((?: [a-z]+)+)([^|`]*)")


def anchors(document: Path) -> set[str]:
    """Those of its headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@functools.cache
def root() -> TyperGroup:
    """The command `vllm-pd`."""
    return typer.main.get_command(app)


def find(words: list[str]) -> TyperCommand | None:
    """The command that these words begin with; None where they name none."""
    command = root()
    while isinstance(command, TyperGroup):
        if not words or words[0] not in command.commands:
            return None
        command, words = command.commands[words[0]], words[1:]
    return command


def commands(text: str) -> list[tuple[str, TyperCommand | None, list[str]]]:
    """(how it is written, the command, the options) of all that a text has someone run. What is quoted or comes after
    a `--` is for other programs."""
    written = []
    for line in re.sub(r"\\\n *", "", text).splitlines():
        line = line.partition(" #")[0]
        for match in COMMAND.finditer(re.sub(r"\"[^\"]*\"|'[^']*'", "''", line)):
            words, rest = match[1].split(), match[2].partition(" -- ")[0]
            written.append((match[0], find(words), re.findall(r"--[a-z][a-z-]*", rest)))
    return written


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        name, _, anchor = target.partition("#")
        there = document.parent / name if name else document
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_is_there(document):
    for name in re.findall(r"\b(?:tests|scripts|vllm_pd)/[\w/.-]+\.(?:py|sh|pml)\b", document.read_text()):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_module_that_is_named_is_there(document):
    for name in re.findall(r"`(vllm_pd(?:\.[a-z]\w*)+)`", document.read_text()):
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name


def test_the_module_map_names_what_there_is():
    """In each row of the rooms: the rooms in the first column, modules of theirs in the last one."""
    text = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| (`vllm_pd\.[^|]*) \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    assert len(rows) > 15
    for first, modules in rows:
        rooms = [ROOT / name.replace(".", "/") for name in re.findall(r"`(vllm_pd\.\w+)`", first)]
        for name in re.findall(r"`(\w+)`", modules):
            assert any((room / f"{name}.py").exists() or (room / name).is_dir() for room in rooms), f"{first}: {name}"


def test_every_script_of_the_lab_makes_figures_of_the_pages_that_it_names():
    lab = ROOT / "scripts" / "lab"
    rows = dict(re.findall(r"^\| `(\w+\.py)` \| (.*) \|$", (lab / "README.md").read_text(), re.MULTILINE))
    assert rows.keys() == {file.name for file in lab.glob("*.py")}
    for script, pages in rows.items():
        for page in re.findall(r"\]\(([^)]+)\)", pages):
            assert f"lab/{script}" in (lab / page).read_text(), f"{script}: {page}"


def test_every_result_is_linked():
    linked = {(document.parent / target).resolve() for document in DOCUMENTS
              for target in re.findall(r"\]\(([^)\s#]+)\)", document.read_text())}
    results = [path for path in (ROOT / "docs" / "results").rglob("*") if path.suffix in (".json", ".png")]
    assert results and set(results) <= linked, set(results) - linked


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_knows_the_options_that_are_shown_with_it(document):
    for written, command, options in commands(document.read_text()):
        if command is None:
            assert not options, f"{written}: no such command"
            continue
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert set(options) <= known | {"--nats-"}, written


def test_commands_are_found_in_the_documents():
    assert len([one for path in DOCUMENTS for one in commands(path.read_text()) if one[1] is not None]) > 30
    assert commands("`vllm-pd status --broker X`")[0][2] == ["--broker"] and find(["nonesuch"]) is None


def test_every_patch_was_tried_on_the_other_releases():
    text = (ROOT / "docs" / "rebasing.md").read_text()
    series = (ROOT / "patches" / "series").read_text().split()
    subjects = re.findall(r"^\| ([a-z]+: .+?) \|", text, re.MULTILINE)
    assert [re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-") + ".patch" for subject in subjects] == [
        name for name in series if name.endswith(".patch")]
