# SPDX-License-Identifier: Apache-2.0
"""Promela models under spin (`. scripts/env.sh` as root on Debian installs it). Where spin is missing their tests are
skipped, but not in CI: there they fail."""
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("gcc") or shutil.which("cc")
SAFETY, CIRCLES = ("-DSAFETY", ), ("-DNP", )  # what the verifier is compiled for


def require_tools() -> None:
    """Skip or fail the test that calls it, where spin or a C compiler is missing."""
    missing = [name for name, found in (("spin", shutil.which("spin")), ("a C compiler", COMPILER)) if not found]
    if missing:
        text = f"{' and '.join(missing)} missing: apt-get install spin gcc"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)


def verify(folder: Path, model: Path, options: str, *arguments: str, kind: tuple[str, ...] = SAFETY,
           optimised: str = "-O1") -> str:
    """What the verifier of this model says, with these `options` of the model and `arguments` of its own. It has looked
    at all states, or has found an error. It takes 2 GiB at most. `folder` is for its files."""
    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("spin", *options.split(), "-a", str(model))
    run(COMPILER, "-w", optimised, *kind, "-DMEMLIM=2048", "-o", "pan", "pan.c")
    report = run("./pan", "-m100000", *arguments)
    assert "max search depth too small" not in report
    assert "Search not completed" not in report or "errors: 1" in report
    return report


def counted(report: str) -> tuple[int, int]:
    """How many states the verifier has seen, and how deep the deepest path was."""
    states, depth = (int(re.search(pattern, report).group(1)) for pattern in (r"(\d+) states, stored",
                                                                              r"depth reached (\d+)"))
    return states, depth


# What the models of the protocol are asked. Their pages have tables of it.


def each_rule_holds(folder: Path, model: Path, options: str, states: int) -> None:
    """In every order of events. `states`: how many there are; a model that has silently become smaller proves less."""
    report = verify(folder, model, options, optimised="-O2")
    found, depth = counted(report)
    print(f"spin {options}: {found} states, {depth} deep")
    assert "errors: 0" in report
    assert found == states


def no_path_is_a_circle(folder: Path, model: Path, options: str, states: int) -> None:
    """So each path comes to rest. `states` as above."""
    report = verify(folder, model, options, "-l", kind=CIRCLES, optimised="-O2")
    found, _ = counted(report)
    print(f"spin {options}: {found} states")
    assert "errors: 0" in report
    assert found == states


def rule_is_broken(folder: Path, model: Path, options: str, rule: str) -> None:
    """That one, by what the options break on purpose."""
    report = verify(folder, model, options, optimised="-O0")  # most of the time goes into compiling
    assert "errors: 1" in report
    assert f"assertion violated {rule} " in report


def a_path_is_a_circle(folder: Path, model: Path, options: str) -> None:
    """By what the options break on purpose."""
    report = verify(folder, model, options, "-l", kind=CIRCLES, optimised="-O0")
    assert "errors: 1" in report and "non-progress cycle (" in report


def page_has_states(page: Path, scene: str, states: int) -> None:
    """In the row of that scene."""
    row = next(line for line in page.read_text().splitlines() if line.startswith(f"| {scene} |"))
    assert int(row.split("|")[2].replace(",", "")) == states


def page_has_variant(page: Path, options: str, rule: str) -> None:
    """The first of these options, in one row with the rule that finds it."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert any(f"`{options.split()[0][2:]}`" in row and f"`{rule}`" in row for row in rows)
