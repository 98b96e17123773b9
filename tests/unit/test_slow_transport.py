# SPDX-License-Identifier: Apache-2.0
"""The emulated wire: nothing lands before its time, one transfer after the other, and each ends once."""

import pytest

from tests.fakes.transport import FakeFabric
from tests.unit.test_transfer_worker import BLOCKS, Clock, member
from vllm_pd.transfer.slow import EmulatedWire, SlowTransport

BLOCK_BYTES = 128  # both planes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ends(clock):
    """(the slow transport of P, D's transport, both caches)"""
    fabric = FakeFabric()
    p, sender = member(fabric, "p")
    d, receiver = member(fabric, "d")
    sender._caches[0][:] = bytes([7]) * (2 * BLOCKS * 64)
    slow = SlowTransport(sender, EmulatedWire(delay_s=1.0, bytes_per_s=BLOCK_BYTES), BLOCK_BYTES, clock)
    slow.add_peer("d", receiver.metadata())
    return slow, receiver


def landed(receiver) -> bool:
    return any(receiver._caches[0])


def test_b3_nothing_lands_and_no_notice_comes_before_its_time(ends, clock):
    slow, receiver = ends
    slow.write("k", "d", [1, 2], [1, 2], b"n")
    clock.now_s = 2.9
    assert slow.poll().finished == [] and not landed(receiver) and slow.live_handles() == 1
    clock.now_s = 3.5
    [end] = slow.poll().finished
    assert (end.key, end.ok, end.seconds) == ("k", True, 3.5) and landed(receiver)
    assert [notice.payload for notice in receiver.poll().notices] == [b"n"]
    assert slow.live_handles() == 0


def test_the_wire_carries_one_transfer_after_the_other(ends, clock):
    slow, _ = ends
    slow.write("a", "d", [1, 2], [1, 2], b"n")
    slow.read("b", "d", [3], [3])
    clock.now_s = 3.0
    assert [end.key for end in slow.poll().finished] == ["a"]
    clock.now_s = 4.0
    assert [end.key for end in slow.poll().finished] == ["b"]


@pytest.mark.parametrize("give_up, error", [(lambda slow: slow.cancel("k"), "cancelled"),
                                            (lambda slow: slow.drop_peer("d"), "peer dropped")])
def test_b25_what_is_given_up_never_lands(ends, clock, give_up, error):
    slow, receiver = ends
    slow.write("k", "d", [1], [1], b"n")
    give_up(slow)
    assert slow.poll().finished == []
    clock.now_s = 10.0
    [end] = slow.poll().finished
    assert (end.ok, end.error) == (False, error) and not landed(receiver)


def test_b27_what_cannot_be_made_ends_as_not_ok(ends, clock):
    slow, _ = ends
    slow.write("k", "stranger", [1], [1], b"n")
    clock.now_s = 10.0
    [end] = slow.poll().finished
    assert not end.ok and "stranger" in end.error


def test_b20_closing_leaves_nothing(ends):
    slow, receiver = ends
    slow.write("k", "d", [1], [1], b"n")
    assert slow.close() and not landed(receiver) and slow.live_handles() == 0
