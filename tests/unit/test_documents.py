# SPDX-License-Identifier: Apache-2.0
"""What a reader follows in the README and in docs/ is there: links, files, modules, commands and their options."""
import ast
import functools
import re
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from vllm_pd.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *(file for folder in ("docs", "deploy")
                                           for file in sorted((ROOT / folder).rglob("*.md")))]
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
        holder = path.parent.with_suffix(".py")  # of a function
        assert path.is_dir() or path.with_suffix(".py").exists() or (
            holder.exists() and f"\ndef {path.name}(" in holder.read_text()), name


def test_the_module_map_names_what_there_is():
    """In each row of the rooms: the rooms in the first column, modules of theirs in the last one."""
    text = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| (`vllm_pd\.[^|]*) \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    assert len(rows) > 15
    for first, modules in rows:
        rooms = [ROOT / name.replace(".", "/") for name in re.findall(r"`(vllm_pd\.\w+)`", first)]
        for name in re.findall(r"`(\w+)`", modules):
            assert any((room / f"{name}.py").exists() or (room / name).is_dir() for room in rooms), f"{first}: {name}"


def section(page: str, heading: str) -> str:
    """The text of a page's section, up to the next one."""
    return (ROOT / "docs" / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]


@functools.cache
def names_in(file: str) -> set[str]:
    """The functions and classes of a module of vllm_pd, also those inside others."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse((ROOT / "vllm_pd" / file).read_text())) if isinstance(node, kinds)}


def named_places(text: str) -> list[tuple[str, str]]:
    """(file, function) of all that is written as `file.py`: `function`, `function`."""
    return [(file, name) for file, names in re.findall(r"`([\w/]+\.py)`: (`\w+`(?:, `\w+`)*)", text)
            for name in re.findall(r"`(\w+)`", names)]


def test_each_place_that_a_request_goes_through_is_there_and_they_are_counted():
    text = section("design.md", "One request through the code")
    rows = [[cell.strip() for cell in row.strip("|").split("|")]
            for row in re.findall(r"^\| [1-8] \|.*$", text, re.MULTILINE)]
    assert len(rows) > 25 and {len(row) for row in rows} == {5}
    table = "\n".join("|".join(row) for row in rows)
    places = named_places(table)
    assert len(places) > 80
    assert {file for file, _ in places} == set(re.findall(r"`([\w/]+\.py)`", table)), "a file without a function"
    assert [place for place in places if place[1] not in names_in(place[0])] == []
    patches = "".join(path.read_text() for path in (ROOT / "patches").glob("*.patch"))
    for name in re.findall(r"scheduler's `(\w+)`", table):
        assert re.search(rf"^\+ .*\b(?:def |self\.){name}\b", patches, re.MULTILINE), name
    at = {engine: {file for row in rows if row[1] in (engine, f"{engine}'s rank") for file, _ in named_places(row[2])}
          for engine in ("D", "P")}
    assert (f"D's trip goes through {len(at['D'])} files and `peer/`, that of the job at P through {len(at['P'])} and "
            f"`peer/`; {len(at['D'] & at['P'])} of them are the same files.") in " ".join(text.split())


def test_each_object_that_knows_something_of_an_attempt_is_there():
    rows = re.findall(r"^\| `([\w.]+)` \| ((?:`\w+`(?:, )?)+) \|", section("protocol.md",
                      "Who knows what of an attempt"), re.MULTILINE)
    assert len(rows) > 12
    for module, classes in rows:
        for name in re.findall(r"`(\w+)`", classes):
            assert name in names_in(f"{module.replace('.', '/')}.py"), f"{module}: {name}"


def test_each_thread_that_is_named_is_started():
    started = set(re.findall(r'name="(vllm-pd-[a-z]+)"', "".join(
        path.read_text() for path in (ROOT / "vllm_pd").rglob("*.py"))))
    named = set(re.findall(r"^\| .*", section("design.md", "Processes, threads and sockets"), re.MULTILINE))
    assert (found := {name for row in named for name in re.findall(r"`(vllm-pd-[a-z]+)`", row)})
    assert found <= started


def test_the_bug_of_the_first_hour_can_be_planted_and_its_stops_and_tests_are_there():
    page = (ROOT / "docs" / "first_hour.md").read_text()
    (line,) = re.findall(r"^    -( .+)$", page, re.MULTILINE)
    assert (ROOT / "vllm_pd" / "protocol" / "prefill.py").read_text().count(f"\n{line}\n") == 1
    modules = dict(re.findall(r"vllm_pd\.([\w.]+) as (\w)", page))
    stops = re.findall(r"\(Pdb\) b (\w)\.(\w+)\.(\w+)", page)
    assert len(stops) > 3
    for alias, *names in stops:
        (module,) = [module for module, name in modules.items() if name == alias]
        assert set(names) <= names_in(f"{module.replace('.', '/')}.py"), names
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"\b(test_\w+)(?:\[|` fails)", page):
        assert f"def {name}(" in tests, name


def test_every_script_of_the_lab_makes_figures_of_the_pages_that_it_names():
    lab = ROOT / "scripts" / "lab"
    rows = dict(re.findall(r"^\| `(\w+\.py)` \| (.*) \|$", (lab / "README.md").read_text(), re.MULTILINE))
    assert rows.keys() == {file.name for file in lab.glob("*.py")}
    for script, pages in rows.items():
        for page in re.findall(r"\]\(([^)]+)\)", pages):
            assert f"lab/{script}" in (lab / page).read_text(), f"{script}: {page}"


def test_every_heavy_proof_is_listed_and_no_other():
    page = section("testing.md", "Heavy proofs")
    rows = re.findall(r"^\| (`tests/.*?)(?=: |, [^`])", page, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(.*?)`", row)}
    marked = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")
              if re.search(r"mark\.heavy\b", path.read_text())}
    assert listed <= marked and not {name for name in marked if name not in page}


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
