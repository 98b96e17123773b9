# SPDX-License-Identifier: Apache-2.0
"""Lets the tests here import the worlds that they explore."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.exact)
