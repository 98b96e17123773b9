# SPDX-License-Identifier: Apache-2.0
"""scripts/test.sh runs every folder of tests/ once."""
from pathlib import Path

import run_tests

TESTS = Path(__file__).resolve().parents[1]


def test_every_folder_is_in_one_lane():
    folders = {file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")}
    assert sorted(folder for part in (run_tests.LANES, run_tests.REST) for lane in part.values()
                  for folder in lane) == sorted(folders)
    assert run_tests.WORKERS.keys() <= folders


def test_what_the_fast_run_wants_is_there():
    for wanted in (wanted for lane in run_tests.FAST.values() for wanted in lane):
        path, _, test = wanted.partition("::")
        assert (TESTS / path).exists() and (not test or f"def {test}(" in (TESTS / path).read_text())
