# SPDX-License-Identifier: Apache-2.0
"""B50: the recorded comparison of upstream's own tests was made with today's series, and found no regression."""
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
FOUND = json.loads((ROOT / "docs" / "results" / "upstream_tests.json").read_text())


def test_b50_the_comparison_on_record_is_of_these_patches():
    """B50: after a change of a patch: `python scripts/compare_upstream.py --json docs/results/upstream_tests.json`."""
    assert FOUND["patches"] == (PATCHES / "series").read_text().split()
    assert FOUND["sums_sha256"] == hashlib.sha256((PATCHES / "SHA256SUMS").read_bytes()).hexdigest()


def test_b50_it_found_no_regression():
    """B50: and the page has its figures."""
    assert all(FOUND[name]["good"] and not FOUND[name]["regressed"] for name in ("v0", "v1"))
    passed = sum(FOUND[name]["before"]["passed"] for name in ("v0", "v1"))
    pages = (ROOT / "docs" / "benchmarks.md").read_text()
    assert f"{passed:,} of upstream's own tests pass on the unpatched tree" in pages.replace("\n", " ")
