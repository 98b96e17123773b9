# SPDX-License-Identifier: Apache-2.0
"""What an engine's loop is told: whether steps follow. The real binding and scheduler, as in `test_mutual_waits`."""
import pytest

from tests.fakes.simulated_engine import BLOCK_SIZE
from tests.upstream.test_mutual_waits import Node, Ring, arrived, job, parked, tokens


@pytest.fixture
def node(monkeypatch) -> Node:
    """An engine of both roles. Its writes never end."""
    ring = Ring(monkeypatch)
    node, peer = ring.add_engine(0.9, blocks=20), ring.add_engine(0.9)
    monkeypatch.setattr(ring, "find", lambda name: peer)
    monkeypatch.setattr(ring, "write", lambda source, write: None)
    return node


def test_b32_no_step_follows_while_all_that_is_left_waits_for_a_peer(node):
    """B32: other ranks would wait for it, a core each, and answer no call."""
    [attempt] = parked(node, "remote")
    assert not node.disagg.expects_steps()
    node.ask("short", tokens(0, 2), max_tokens=2)
    assert node.step() == ["short"] and node.disagg.expects_steps()
    assert node.step() == ["short"] and not node.disagg.expects_steps()
    arrived(node, attempt)
    assert node.step() == ["remote"] and node.disagg.expects_steps()


def test_b32_no_step_follows_while_those_that_wait_find_no_room_beside_it(node):
    parked(node, *(f"remote{number}" for number in range(3)))
    node.ask("large", tokens(0, 15 * BLOCK_SIZE))
    assert node.step() == [] and node.scheduler[0].waiting
    assert not node.disagg.expects_steps() and not node.disagg.has_work()


def test_b32_a_step_follows_for_a_write_and_none_while_it_lasts(node):
    node.events.append(job(1, 2))
    assert node.step() and node.disagg.expects_steps(), "the write goes with the next step"
    assert node.step() == [] and node.scheduler[0].prefill_sending
    assert not node.disagg.expects_steps() and not node.disagg.has_work()
