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
