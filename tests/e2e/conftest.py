# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests: forks of one process that has imported vLLM, and shared where tests leave them at rest."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _chaos.zygote import Zygote

sys.path.insert(0, str(Path(__file__).parent))

from harness import EngineProcess, Pair, lend, start_pair, start_zygote

from tests import stacks
from tests.stacks import pytest_runtest_makereport  # noqa: F401

stacks.prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def starting() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def zygote(starting) -> Zygote:
    zygote = start_zygote()
    starting.callback(zygote.close)
    return zygote


@pytest.fixture(scope="session")
def mono_process(starting, zygote) -> EngineProcess:
    engine = EngineProcess(zygote, None, 0)
    starting.callback(engine.stop)
    return engine


@pytest.fixture(scope="session")
def pair_processes(starting, zygote) -> Pair:
    return start_pair(zygote, starting)


@pytest.fixture
def mono(mono_process) -> EngineProcess:
    """The same model on one engine of the same wheel, with disaggregation off."""
    return mono_process.ready()


@pytest.fixture
def pair(pair_processes) -> Iterator[Pair]:
    """One P and one D that sends everything away. At rest before and after each test (B20)."""
    yield from lend(pair_processes)
