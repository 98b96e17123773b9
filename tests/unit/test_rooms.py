# SPDX-License-Identifier: Apache-2.0
"""The packages of vllm_pd import each other in one direction, and log where vLLM's handlers see it."""
import ast
import functools
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "vllm_pd").rglob("*.py"))


def imported(file: Path) -> Iterator[str]:
    """The modules of ours that a module imports when it runs, by their full names."""
    package = file.relative_to(ROOT).parent.parts
    waiting = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else ()
            name = ".".join((*base, *filter(None, [node.module])))
            yield from (f"{name}.{alias.name}" for alias in node.names) if name == "vllm_pd" else (name,)


def room(name: str) -> str:
    """The package or the top-level module below vllm_pd."""
    return (name.split(".") + [""])[1]


@functools.cache
def rooms() -> dict[str, set[str]]:
    """For each, those that it imports."""
    graph: dict[str, set[str]] = defaultdict(set)
    for file in MODULES:
        own = room(".".join(file.relative_to(ROOT).with_suffix("").parts))
        graph[own] |= {room(name) for name in imported(file) if name.startswith("vllm_pd.")} - {own}
    return graph


def test_rooms_import_each_other_in_one_direction():
    graph = rooms()
    assert {"errors", "protocol"} <= graph["peer"] and "frontend" in graph["v0"], "the graph is not seen"
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_an_import_back_is_seen():
    graph = {**rooms(), "errors": {"cli"}}
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("name", ["protocol", "rpc", "errors"])
def test_what_lies_lowest_imports_little(name):
    assert rooms()[name] <= {"protocol", "errors"}


def test_every_logger_is_below_vllm_pd_of_vllm():
    """vLLM sets up handlers for `vllm` and what is below; other loggers print warnings without a prefix."""
    loggers = [argument for file in MODULES for argument in re.findall(r"getLogger\((.*?)\)", file.read_text())]
    assert len(loggers) > 10
    assert {name for name in loggers if not re.fullmatch(r'"vllm\.pd(\.[a-z]+)?"', name)} == set()
