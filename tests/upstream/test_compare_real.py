# SPDX-License-Identifier: Apache-2.0
"""B50: a few of upstream's tests, really run on both trees: the patched tree passes, a broken one is caught.

Needs the environment of scripts/env.sh. The whole lists are `python scripts/compare_upstream.py`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _upstream_tests import trees
from _wheel import cache, project

SUBSET = ("tests/core/test_scheduler.py", "tests/core/block/test_naive_block.py")
TESTS = 24 + 19
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def compare(out: Path, *arguments: str | Path) -> tuple[int, str, dict]:
    """Run the script on the subset; its exit status, what it said, and the V0 list's comparison."""
    command = [sys.executable, project.ROOT / "scripts" / "compare_upstream.py", "--list", "v0", "--out", out]
    command += ["--json", out / "found.json", *arguments, *(f"--only={test}" for test in SUBSET)]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=800)
    found = out / "found.json"
    return done.returncode, done.stdout + done.stderr, json.loads(found.read_text())["v0"] if found.exists() else {}


def test_the_patched_tree_passes_upstreams_scheduler_tests(tmp_path):
    """B50: with PD off, each of them passes as it does unpatched."""
    status, said, found = compare(tmp_path)
    assert status == 0, said
    assert found["before"]["passed"] == found["after"]["passed"] == TESTS, said
    assert list((tmp_path).glob("patched-v0.xml"))


def test_a_tree_that_schedules_otherwise_is_caught(tmp_path):
    """B50, the guard: a scheduler that counts one request too many does not get through, and its tests are named."""
    with cache.lock():
        patched = trees.patched(None)
    broken = tmp_path / "broken"
    for part in ("vllm", "csrc", "tests"):
        shutil.copytree(patched / part, broken / part)
    scheduler = broken / "vllm" / "core" / "scheduler.py"
    right = "return (len(self.waiting) +"
    assert right in scheduler.read_text()
    scheduler.write_text(scheduler.read_text().replace(right, "return (1 + len(self.waiting) +"))

    status, said, found = compare(tmp_path, "--tree-b", broken)
    assert status == 1, said
    assert "tests/core/test_scheduler.py::test_scheduler_add_seq_group" in found["regressed"], said
    assert not [test for test in found["regressed"] if "naive_block" in test], said
    assert "REGRESSED" in said and "test_scheduler_add_seq_group" in said
