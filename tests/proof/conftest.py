# SPDX-License-Identifier: Apache-2.0
"""Lets the tests here import the worlds that they explore, and the engine that tests/upstream simulates."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "upstream"):
    sys.path.insert(0, str(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.exact)
