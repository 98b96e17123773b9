# SPDX-License-Identifier: Apache-2.0
"""The rooms of vllm_pd import each other as docs/design.md says, and log where vLLM's handlers see it."""
import functools
import graphlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from tests.searches import imported_names

ROOT = Path(__file__).resolve().parents[2]
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
         for path in sorted((ROOT / "vllm_pd").rglob("*.py"))}  # fmt: skip
ImportGraph = Mapping[str, Collection[str]]


def imported(file: Path) -> set[str]:
    """The modules of ours that a module imports."""
    names = set(imported_names(file))
    return (names | {name.rpartition(".")[0] for name in names}) & FILES.keys() - {"vllm_pd"}


@functools.cache
def modules() -> dict[str, set[str]]:
    """What each module imports. A package's __init__ comes with its modules, and is not followed."""
    return {name: {one for one in imported(file) if one != name and not name.startswith(f"{one}.")}
            for name, file in FILES.items()}  # fmt: skip


def room(module: str) -> str:
    """The package or the module below vllm_pd."""
    return ".".join(module.split(".")[:2])


@functools.cache
def floors() -> list[list[str]]:
    """The rooms in each row of the table, the lowest first."""
    text = (ROOT / "docs" / "design.md").read_text()
    rows = text[text.index("## Rooms"):text.index("## Life of a request")]
    firsts = re.findall(r"^\| (`vllm_pd[^|]*)\|", rows, re.MULTILINE)
    return [re.findall(r"`(vllm_pd\.\w+)`", first) for first in firsts]


def upward(graph: ImportGraph) -> list[tuple[str, str]]:
    """The imports that go to a room of the same row or of a later one."""
    floor = {name: number for number, rooms in enumerate(floors()) for name in rooms}
    return [(name, one) for name, ones in graph.items() for one in ones
            if room(name) != room(one) and floor[room(one)] >= floor[room(name)]]  # fmt: skip


def test_a_room_imports_only_rooms_above_its_own_in_the_table():
    assert len(modules()["vllm_pd.peer.thread"]) > 5, "the graph is not seen"
    assert sorted(name for row in floors() for name in row) == sorted({room(name) for name in FILES} - {"vllm_pd"})
    assert upward({name: ones for name, ones in modules().items() if name != "vllm_pd"}) == []


def test_modules_import_each_other_in_no_circle():
    assert list(graphlib.TopologicalSorter(modules()).static_order())


@pytest.mark.parametrize("name", FILES)
def test_names_of_modules_are_written_in_full(name):
    assert not re.search(r"^\s*from \.", FILES[name].read_text(), re.MULTILINE)


def test_an_import_back_is_seen():
    assert upward({"vllm_pd.errors": {"vllm_pd.v1.claim"}, "vllm_pd.v0.claim": {"vllm_pd.v1.claim"}}) == [
        ("vllm_pd.errors", "vllm_pd.v1.claim"), ("vllm_pd.v0.claim", "vllm_pd.v1.claim")]
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter({**modules(), "vllm_pd.errors": {"vllm_pd.cli"}}).static_order())


def test_every_logger_is_below_vllm_pd_of_vllm():
    """vLLM sets up handlers for `vllm` and what is below; other loggers print warnings without a prefix."""
    loggers = [one for file in FILES.values() for one in re.findall(r"getLogger\((.*?)\)", file.read_text())]
    assert len(loggers) > 10
    assert {name for name in loggers if not re.fullmatch(r'"vllm\.pd(\.[a-z]+)?"', name)} == set()
