# SPDX-License-Identifier: Apache-2.0
"""Lets the tests here import the modules that are also their other processes, and gives them ranks and engines."""
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from nixl_receiver import Rank
from remote_rank import RemoteEngine


@pytest.fixture(scope="session", autouse=True)
def forks():
    """The process from which receivers are forked has the variables of the session, and not those that the first test
    with a receiver sets for itself."""
    forkserver.ensure_running()


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


@pytest.fixture
def engine():
    made = []

    def make(*arguments, **options) -> RemoteEngine:
        made.append(RemoteEngine(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
