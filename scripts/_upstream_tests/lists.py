# SPDX-License-Identifier: Apache-2.0
"""The lists of tests in the files of this folder. Lists that contradict themselves are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from _series.errors import Refusal

FOLDER = Path(__file__).resolve().parent
USE_V1: Mapping[str, str] = {"v0": "0", "v1": "1", "dp": "1"}
USUAL = ("v0", "v1")  # what "all" means; dp takes minutes for two tests


@dataclass(frozen=True)
class TestList:
    """The tests of one pytest run. All are pytest arguments: paths or node ids."""

    __test__ = False  # pytest: not a test class

    name: str
    arguments: tuple[str, ...]
    deselected: tuple[str, ...] = ()
    mended: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind in ("deselected", "mended"):
            if stray := [entry for entry in getattr(self, kind) if not self.covers(entry)]:
                raise Refusal(f"list {self.name}: {kind}, but in no listed file: {', '.join(stray)}")
        if both := set(self.deselected) & set(self.mended):
            raise Refusal(f"list {self.name}: deselected and mended: {', '.join(sorted(both))}")

    @property
    def use_v1(self) -> str:
        """Value of VLLM_USE_V1."""
        return USE_V1.get(self.name, "0")

    def covers(self, test: str) -> bool:
        """Whether the list holds this node id."""
        return any(within(test, argument) for argument in self.arguments)

    def narrowed(self, wanted: list[str]) -> "TestList":
        """The part below one of `wanted` (folders, files or node ids); its `arguments` may be empty."""
        arguments = [a for a in self.arguments if any(within(a, w) for w in wanted)]
        arguments += [w for w in wanted if self.covers(w) and w not in arguments]
        kept = {kind: tuple(e for e in getattr(self, kind) if any(within(e, a) for a in arguments))
                for kind in ("deselected", "mended")}
        return TestList(self.name, tuple(arguments), **kept)


def within(test: str, scope: str) -> bool:
    """Whether a node id or path is `scope` or below it: a folder, a file, a class or a test with parameters."""
    return test == scope or any(test.startswith(scope.rstrip("/") + mark) for mark in ("/", "::", "["))


def entries(text: str) -> list[str]:
    """The lines that are neither empty nor comments."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def reasons(text: str, origin: str) -> dict[str, str]:
    """The reason of each node id. Raises Refusal for a line without one; `origin` names its file."""
    found = {}
    for line in entries(text):
        test, _, reason = line.partition("  # ")
        if not reason.strip():
            raise Refusal(f"{origin}: {test}: expected two spaces, # and the reason")
        found[test.strip()] = reason.strip()
    return found


def load(name: str, folder: Path = FOLDER) -> TestList:
    """The list called `name`, with its deselected and mended tests."""
    arguments = entries((folder / f"{name}.txt").read_text())
    deselected, mended = (
        tuple(test for test in reasons((folder / file).read_text(), file) if any(within(test, a) for a in arguments))
        for file in ("deselect.txt", "mended.txt"))
    return TestList(name, tuple(arguments), deselected, mended)
