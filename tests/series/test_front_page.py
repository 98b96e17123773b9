# SPDX-License-Identifier: Apache-2.0
"""The first screen of the README says what is true of the series and of the pin."""

import re
from pathlib import Path

from _series import folder, readme

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TABLE = (ROOT / "patches" / "README.md").read_text()


def rows(text: str) -> dict[str, tuple[str, str]]:
    """File name of each patch in a table: (kind, +/-)."""
    found = re.findall(r"^\| \[.+?\]\((?:patches/)?([\w-]+\.patch)\) \| (\w+) \| (\+\d+ -\d+) \|", text, re.MULTILINE)
    return {name: (kind, size) for name, kind, size in found}


def test_the_table_of_patches_is_that_of_the_series():
    series = [line for line in (ROOT / "patches" / "series").read_text().splitlines() if line and line[0] != "#"]
    assert list(rows(README)) == series
    assert rows(README) == rows(TABLE)


def test_the_sum_is_that_of_the_series():
    total = re.search(r"^\d+ patches, \+\d+ -\d+ lines in .+", TABLE, re.MULTILINE)
    assert total and total.group() in " ".join(README.split())


def test_the_patches_for_data_parallelism_stand_last():
    for_dp = [readme.is_for_dp(patch) for patch in folder.patches(folder.load(ROOT / "patches"))]
    assert any(for_dp) and for_dp == sorted(for_dp)


def test_b50_what_a_fix_changes_with_disaggregation_off_is_named():
    """B50: each patch that mends upstream has its line, or "takes upstream's decisions" is not true."""
    section = README.partition("### With disaggregation off")[2].partition("\n## ")[0]
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


def test_every_figure_of_the_first_screen_is_in_the_benchmarks():
    section = README.partition("## What it gains")[2].partition("\n## ")[0]
    figure = r"\d[\d,]*\.\d+|\d[\d,]*\d"
    quoted = set(re.findall(figure, "\n".join(line for line in section.splitlines() if line.startswith("|"))))
    known = set(re.findall(figure, (ROOT / "docs" / "benchmarks.md").read_text()))
    assert len(quoted) > 30 and quoted <= known, quoted - known
