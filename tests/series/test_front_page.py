# SPDX-License-Identifier: Apache-2.0
"""The first screen of the README says what is true of the series and of the pin."""

import re
from pathlib import Path

from _series import folder, readme

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TABLE = (ROOT / "patches" / "README.md").read_text()


def test_it_is_read_at_once():
    assert len(README.encode()) <= 8_000


def test_the_table_of_patches_is_that_of_the_series():
    series = [line for line in (ROOT / "patches" / "series").read_text().splitlines() if line and line[0] != "#"]
    assert re.findall(r"^\| \[.+?\]\(([\w-]+\.patch)\) \|", TABLE, re.MULTILINE) == series


def test_the_sum_is_that_of_the_series():
    total = re.search(r"^\d+ patches, \+\d+ -\d+ lines in .+", TABLE, re.MULTILINE)
    assert total and total.group() in " ".join(README.split())


def test_each_word_that_stands_for_one_of_dynamos_is_ours():
    """In the second column: names that the patches add, or that vllm_pd has."""
    source = "".join(path.read_text() for folder_, pattern in (("patches", "*.patch"), ("vllm_pd", "*.py"))
                     for path in (ROOT / folder_).rglob(pattern))
    ours = re.findall(r"^\| .+ \| (.+) \|$", readme.words(), re.MULTILINE)[1:]
    assert len(ours) == 10 and readme.words() in TABLE
    for name in re.findall(r"`([\w.]+)`", " ".join(ours)):
        module = ROOT / f"{name.replace('.', '/')}.py"
        assert module.exists() or re.search(rf"\b{name.rpartition('.')[2]}\b", source), name


def test_the_patches_for_data_parallelism_stand_last():
    for_dp = [readme.is_for_dp(patch) for patch in folder.patches(folder.load(ROOT / "patches"))]
    assert any(for_dp) and for_dp == sorted(for_dp)


def test_b50_what_a_fix_changes_with_disaggregation_off_is_named():
    """B50: each patch that mends upstream has its line, or "takes upstream's decisions" is not true."""
    section = (ROOT / "docs" / "v0.md").read_text().partition("## With disaggregation off")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| (\w+: [^|]+?) \|", section, re.MULTILINE))
    fixes = set(re.findall(r"^\| \[(.+?)\]\(\S+\) \| fix \|", TABLE, re.MULTILINE))
    assert fixes and fixes <= named, fixes - named
    assert named <= set(re.findall(r"^\| \[(.+?)\]", TABLE, re.MULTILINE))


def test_the_pin_is_named():
    version = re.search(r"^version\s*=\s*(\S+)", (ROOT / "UPSTREAM_VERSION").read_text(), re.MULTILINE)
    assert version and f"vLLM {version.group(1)}" in README


def test_the_ci_runs_the_test_command_of_the_readme():
    assert "    bash scripts/test.sh" in README
    assert "bash scripts/test.sh\n" in (ROOT / ".ci" / "run").read_text()


def test_every_file_that_the_readme_links_is_there():
    for target in re.findall(r"\]\(([\w/.-]+)\)", README):
        assert (ROOT / target).exists(), target
