# SPDX-License-Identifier: Apache-2.0
"""The network between two machines: ranks in two network namespaces, and a wire with delay and loss between them."""

import os
import random
import signal

import pytest
from msgspec.structs import replace

from tests.dp_protocol.rank_process import FAILED, SETTINGS, Group
from tests.dp_protocol.wire import unavailable, wire

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=f"no wire: {unavailable()}")
DELAY_S = 0.005


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.1])
def test_b70_b71_b72_ranks_on_two_machines(tmp_path, loss):
    """B70, B71, B72: the first request ever is at a rank far away from the coordinator; then some at any rank. All are
    served, in equally many forward passes, and a call is made by all ranks."""
    chance = random.Random(72)
    with wire(DELAY_S, loss, seed=72) as between:
        group = Group(4, tmp_path, shared=False, between=between)
        try:
            group.ask(3, "request", 5)
            group.wait(3, "served")
            for _ in range(10):
                ranks = [chance.randrange(4) for _ in range(chance.randint(1, 3))]
                for rank in ranks:
                    group.ask(rank, "request", chance.randint(1, 9))
                for rank in ranks:
                    group.wait(rank, "served")
            for rank in range(4):
                group.ask(rank, "call", 1)
            assert len({group.wait(rank, "made")[2] for rank in range(4)}) == 1
            states = group.states()
            assert len({counters.forwards for counters, _, _ in states}) == 1 and states[0][0].forwards > 20
            for rank in range(4):
                group.ask(rank, "leave")
            assert group.exit_codes(*range(4)) == [0] * 4
        finally:
            group.close()


@pytest.mark.parametrize("busy", [False, True])
def test_b73_the_wire_is_cut(tmp_path, busy):
    """B73: no packet arrives any more and no connection is closed: all ranks end by themselves, at rest or not. One
    that is stuck in a forward pass is ended (1)."""
    with wire(DELAY_S, 0.0) as between:
        group = Group(4, tmp_path, shared=False, between=between, settings=replace(SETTINGS, timeout_s=6.0))
        try:
            group.ask(3, "request", 3)
            group.wait(3, "served")
            if busy:
                group.ask(1, "request", 1_000_000)
            os.kill(between.relay, signal.SIGSTOP)
            assert all(code in (FAILED, 1) for code in group.exit_codes(*range(4)))
        finally:
            group.close()
