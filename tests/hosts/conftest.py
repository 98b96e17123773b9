# SPDX-License-Identifier: Apache-2.0
"""A rack of hosts for each test; where there can be none the test is skipped, and in CI it fails."""
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.rack import Rack, unavailable


@pytest.fixture(autouse=True)
def tools() -> None:
    if reason := unavailable():
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def rack(tools: None, tmp_path: Path) -> Iterator[Rack]:
    with Rack(tmp_path) as rack:
        yield rack
