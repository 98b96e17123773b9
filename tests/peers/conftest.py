# SPDX-License-Identifier: Apache-2.0
"""Brokers and light engines for tests of peers that come and go."""
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from light_engine import Nursery

from tests.fakes.brokers import serving


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def broker() -> Iterator[str]:
    """Its address."""
    with serving(ttl_s=60.0) as broker:  # an engine that a test has stopped stays a member
        yield broker.address
