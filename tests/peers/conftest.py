# SPDX-License-Identifier: Apache-2.0
"""Brokers and light engines for tests of peers that come and go."""
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from light_engine import Nursery

from vllm_pd.broker.server import Broker


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def broker() -> Iterator[str]:
    """Its address."""
    broker = Broker("tcp://127.0.0.1:0", ttl_s=60.0)  # who stands still has not left
    thread = threading.Thread(target=broker.run)
    thread.start()
    yield broker.address
    broker.stop()
    thread.join(60)
    assert not thread.is_alive()
