# SPDX-License-Identifier: Apache-2.0
"""Real V0 engines with the torch transport: B1, B2, B22."""

import contextlib
from collections.abc import Iterator

import pytest
from harness import PATIENT, Pair, lend, start_pair
from test_states import answered_past_the_lease
from test_tokens import test_b1_greedy_tokens_equal_those_of_one_engine as greedy


@pytest.fixture(scope="module")
def processes(zygote) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield start_pair(zygote, stack, {**PATIENT, "transport": "torch"})


@pytest.fixture
def pair(processes) -> Iterator[Pair]:
    """A pair with this transport. At rest before and after each test (B20)."""
    yield from lend(processes)


def test_b1_with_torch(pair, mono):
    greedy(pair, mono)


def test_b22_a_stopped_p_keeps_no_block_of_d(pair, mono):
    """D's own rank brings the fence down while P is stopped."""
    answered_past_the_lease(pair, mono)
    pair.d.wait_until("not scheduler.quarantined")
    pair.p.thaw()
    pair.p.do("hold", held=False)
    pair.at_rest()
    pair.d.wait_for_peers()
