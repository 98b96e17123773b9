# SPDX-License-Identifier: Apache-2.0
"""B50: what is proposed to upstream applies to the newest release as it is, is signed off, and has tests that pass with
it and fail without."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROPOSED = ROOT / "patches" / "for_upstream"
NAMES = sorted(path.stem for path in PROPOSED.glob("*.patch"))
SIGNED = "Signed-off-by: A. Sender <a@sender.example>"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """What `series.py for-upstream` writes."""
    folder = tmp_path_factory.mktemp("for_upstream")
    config = folder / "gitconfig"
    config.write_text("[user]\n\tname = A. Sender\n\temail = a@sender.example\n")
    made = subprocess.run([sys.executable, str(ROOT / "scripts" / "series.py"), "for-upstream", str(folder / "out")],
                          capture_output=True, text=True, cwd=folder, check=False,
                          env={**os.environ, "GIT_CONFIG_GLOBAL": str(config), "GIT_CONFIG_NOSYSTEM": "1"})
    assert made.returncode == 0, made.stderr
    return folder / "out"


def git(written: Path, *arguments: str) -> str:
    tree = written / "tree"
    return subprocess.run(["git", "-c", f"safe.directory={tree}", "-C", str(tree), *arguments], check=True,
                          capture_output=True, text=True).stdout


def run_tests(written: Path, tests: list[str]) -> subprocess.CompletedProcess:
    """Run tests of the tree as it is, with its package in place of the installed one."""
    version = re.search(r"^version = (.*)$", (PROPOSED / "RELEASE").read_text(), re.MULTILINE).group(1)
    info = written / "tree" / f"vllm-{version}+cpu.dist-info"  # makes vLLM choose its CPU platform
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *tests],
                          cwd=written / "tree", capture_output=True, text=True, timeout=600, check=False,
                          env={**os.environ, "PYTHONPATH": str(written / "tree")})


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_b50_a_proposal_is_signed_off_and_its_tests_see_what_it_mends(written, name):
    assert SIGNED in (written / f"{name}.patch").read_text()
    git(written, "checkout", "-q", name)
    assert git(written, "log", "-1", "--format=%an <%ae>%n%B").count("A. Sender <a@sender.example>") == 2
    changed = git(written, "diff", "--name-only", "main", name).split()
    tests = [path for path in changed if path.startswith("tests/")]
    mended = run_tests(written, tests)
    assert mended.returncode == 0 and " passed" in mended.stdout, mended.stdout
    # Files that a proposal adds stay: what it changes of upstream's own code is to make the difference.
    own = git(written, "ls-tree", "-r", "--name-only", "main", "--", *changed).split()
    git(written, "checkout", "-q", "main", "--", *(path for path in own if path not in tests))
    before = run_tests(written, tests)
    assert before.returncode == 1 and re.search(r"^\d+ failed(?!.* error)", before.stdout, re.MULTILINE), before.stdout
    git(written, "checkout", "-q", "-f", "main")


def test_b50_each_is_one_commit_by_itself_and_is_in_the_docs(written):
    docs = (ROOT / "docs" / "upstreaming.md").read_text()
    assert len(NAMES) >= 3 and all(f"for_upstream/{name}.patch" in docs for name in NAMES)
    for name in NAMES:
        assert git(written, "rev-list", "--count", f"main..{name}").strip() == "1"


def test_b50_the_docs_say_which_patches_the_release_makes_superfluous():
    said = subprocess.run([sys.executable, str(ROOT / "scripts" / "series.py"), "dropped"], capture_output=True,
                          text=True, check=True).stdout
    true = {line.rpartition(": ")[2] for line in said.splitlines() if ": true, drop " in line}
    assert true == {"the V0 engine is dropped", "upstream checks the future first",
                    "upstream's CPU backend runs MoE with data parallelism"}, "correct docs/upstreaming.md"
    assert len(said.splitlines()) > len(true)
