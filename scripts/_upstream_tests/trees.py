# SPDX-License-Identifier: Apache-2.0
"""Trees that Python can import vLLM from: folders with ``vllm`` and its compiled extension, and nothing else.

Upstream's checkout is no such folder: its ``tests`` would shadow others, and it lacks the CPU extension. Trees are
copied, so that no work tree is written to and an edit during a run changes nothing.
"""

import argparse
import os
import shutil
import sys
import tomllib
from pathlib import Path

from _series.errors import Refusal
from _wheel import cache, extension, project, source

EDITS = Path(__file__).with_name("edits.toml")
LEFT_OUT = shutil.ignore_patterns("__pycache__")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a comparison of two trees: --tree-a, --tree-b, --model."""
    parser.add_argument("--tree-a", type=Path, metavar="DIR", help="unpatched source tree (default: the pinned one)")
    parser.add_argument("--tree-b", type=Path, metavar="DIR", help="patched source tree (default: made from patches/)")
    parser.add_argument("--model", type=Path, metavar="DIR", default=os.environ.get("VLLM_PD_TINY_MODEL"),
                        help="the tiny model (default: $VLLM_PD_TINY_MODEL)")


def plain(given: Path | None) -> Path:
    """The unpatched source tree: `given`, else the pinned one out of the cache."""
    return checked(given) if given else source.upstream(sys.executable)


def patched(given: Path | None) -> Path:
    """The patched source tree: `given`, else the pinned one with the series applied, out of the cache."""
    return checked(given) if given else source.patched(sys.executable)


def checked(tree: Path) -> Path:
    """The folder. Raises Refusal unless it is a source tree of vLLM."""
    for name in ("vllm/engine/llm_engine.py", "tests/conftest.py"):
        if not (tree / name).is_file():
            raise Refusal(f"{tree}: expected a source tree of vLLM; it has no {name}")
    return tree.resolve()


def tree_key(tree: Path) -> str:
    """Hash of all that an import of this tree can see, except the extension."""
    package = tree / "vllm"
    return cache.tree_key(tree, (f for f in package.rglob("*") if f.suffix in (".py", ".json", ".cu") and f.is_file()))


def stage(tree: Path, folder: Path, *, ours: bool) -> Path:
    """Copies the package into `folder` (made anew) with the extension for this Python, and with `ours` also
    ``vllm_pd``. The folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tree / "vllm", folder / "vllm", ignore=LEFT_OUT)
    if not (folder / "vllm" / extension.FILE).is_file():
        shutil.copy(extension.extension(tree, sys.executable), folder / "vllm" / extension.FILE)
    if ours:
        shutil.copytree(project.ROOT / "vllm_pd", folder / "vllm_pd", ignore=LEFT_OUT)
    return folder


def stage_tests(tree: Path, folder: Path, edits: Path = EDITS) -> Path:
    """Copies upstream's tests and their settings into `folder` (made anew), where no ``vllm`` is beside them, and makes
    the changes in the file `edits`. Raises Refusal where their place is not there. The folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tree / "tests", folder / "tests", ignore=LEFT_OUT)
    shutil.copy(tree / "pyproject.toml", folder)
    for edit in tomllib.loads(edits.read_text())["edit"]:
        file = folder / edit["file"]
        text = file.read_text() if file.is_file() else ""
        if text.count(edit["old"]) != 1 or not edit["why"]:
            raise Refusal(f"{edits.name}: {edit['file']}: expected {edit['old']!r} there, once, and a reason")
        file.write_text(text.replace(edit["old"], edit["new"]))
    return folder


def environment(folders: list[Path], settings: dict[str, str]) -> dict[str, str]:
    """This process's environment without settings of vLLM and pytest, with `folders` as the whole PYTHONPATH."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTEST_", "PYTHONPATH"))}
    base = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **base, **settings, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders)}
