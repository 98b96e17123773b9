# SPDX-License-Identifier: Apache-2.0
"""B100: the writes of one attempt, some blocks after each step, one at a time, the notice with the last."""
import pytest

from vllm_pd.protocol.writes import AttemptWrites, BlockWrite


@pytest.fixture
def writes():
    return AttemptWrites([20, 21, 22, 23, 24])


def test_b100_a_whole_prompt_is_one_write(writes):
    assert not writes.is_due and not writes.is_over
    writes.add([3, 4, 5, 6, 7], is_last=True)
    assert writes.is_due and writes.unsent_blocks == 5
    assert writes.begin() == BlockWrite(1, [3, 4, 5, 6, 7], [20, 21, 22, 23, 24], True)
    assert writes.is_closed and not writes.is_over and not writes.is_due
    writes.end(True, 50)
    assert writes.is_over and (writes.bytes, writes.error, writes.unsent_blocks) == (50, "", 0)


def test_b100_one_write_at_a_time_takes_all_that_is_there(writes):
    writes.add([3], is_last=False)
    assert writes.begin() == BlockWrite(1, [3], [20], False)
    writes.add([4], is_last=False)
    writes.add([5, 6], is_last=False)
    assert not writes.is_due and writes.unsent_blocks == 4 and writes.added == 4
    writes.end(True, 10)
    assert writes.begin() == BlockWrite(2, [4, 5, 6], [21, 22, 23], False)
    writes.end(True, 30)
    assert not writes.is_due and not writes.is_over, "the rest is computed"
    writes.add([7], is_last=True)
    assert writes.begin() == BlockWrite(3, [7], [24], True)
    writes.end(True, 10)
    assert writes.is_over and writes.bytes == 50


@pytest.mark.parametrize("complete", [True, False])
def test_b100_b27_after_a_failure_nothing_begins(writes, complete):
    writes.add([3], is_last=False)
    writes.begin()
    writes.add([4, 5, 6, 7], is_last=complete)
    writes.end(False, error="broken")
    assert writes.is_over and not writes.is_due and writes.error == "broken"
    writes.add([8], is_last=True)
    assert not writes.is_due and writes.added == 5


def test_b100_b25_it_is_over_when_what_was_under_way_has_ended(writes):
    writes.add([3], is_last=False)
    write = writes.begin()
    assert writes.close() is write and not writes.is_over
    writes.end(True, 10)
    assert writes.is_over and writes.error == ""


def test_the_first_reason_stays(writes):
    assert writes.close("a") is None and writes.is_over
    writes.close("b")
    assert writes.error == "a"


@pytest.mark.parametrize("blocks, is_last", [([3, 4, 5, 6], True), ([], True), ([3, 4, 5, 6, 7, 8], False),
                                             ([3, 4, 5, 6, 7, 8], True)])
def test_b100_no_notice_without_a_block_for_each_granted_one(writes, blocks, is_last):
    writes.add(blocks, is_last)
    assert not writes.is_due and writes.is_over and "granted" in writes.error
