# SPDX-License-Identifier: Apache-2.0
"""Lets the tests here import the module that is also their other process, and gives them ranks of their own."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from nixl_receiver import Rank


@pytest.fixture
def rank():
    made = []

    def make(name, **options):
        made.append(Rank(name, **options))
        return made[-1]

    yield make
    for each in made:
        each.worker.close()
        assert each.worker.live_handles() == 0
