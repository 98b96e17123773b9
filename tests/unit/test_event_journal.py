# SPDX-License-Identifier: Apache-2.0
"""B60: how changes are said, and what becomes of them where nobody takes them in time. Pure."""

from tests.fakes.event_engine import BLOCK_SIZE, FakeBlock
from vllm_pd.events.journal import EventJournal, runs
from vllm_pd.events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from vllm_pd.events.sink import BlockSink, Salt


class Pool:
    """Blocks of one prompt, 1, 2, 3 ..., with their number as hash and id, and a sink to tell of them."""

    def __init__(self, **options) -> None:
        self.sink = BlockSink(**options)
        self.journal = EventJournal(BLOCK_SIZE)

    def compute(self, first: int, last: int, parent: int | None = None, extra: int | None = None) -> None:
        previous = FakeBlock(parent, parent, None, []) if parent else None
        for number in range(first, last + 1):
            previous = FakeBlock(number, number, previous, [number] * BLOCK_SIZE, extra)
            self.sink.registered(previous)
        self.sink.computed(set(range(first, last + 1)))
        self.sink.begin_step()

    def take(self) -> list:
        ops, everything = self.sink.take(lambda: False)
        if everything is not None:
            self.journal.replace(everything)
        self.journal.apply(ops)
        return self.journal.take()

    def announced(self) -> list[int]:
        return sorted(block.block_hash for block in self.journal.blocks())


def stored(first: int, last: int, parent: int | None = None, **more) -> BlockStored:
    return BlockStored(list(range(first, last + 1)), parent,
                       [number for number in range(first, last + 1) for _ in range(BLOCK_SIZE)], BLOCK_SIZE, **more)


def test_neighbours_are_one_event():
    pool = Pool()
    pool.compute(1, 3)
    pool.compute(4, 5, parent=3)
    pool.sink.removed(5, 5)
    pool.sink.removed(4, 4)
    pool.compute(6, 6, parent=3)
    assert pool.take() == [stored(1, 5), BlockRemoved([5, 4]), stored(6, 6, parent=3)]


def test_b60_a_child_waits_for_its_parent():
    """B60: whatever order blocks are computed in, a parent is told of first; one that never comes is not waited for."""
    pool = Pool()
    pool.compute(2, 3, parent=1)
    assert pool.take() == []
    pool.compute(1, 1)
    assert pool.take() == [stored(1, 3)]
    pool.compute(12, 12, parent=11)
    pool.sink.removed(12, 12)
    assert pool.take() == []
    pool.compute(11, 11)
    assert pool.take() == [stored(11, 11)]


def test_b60_a_cleared_cache_is_one_event():
    pool = Pool()
    pool.compute(1, 3)
    assert pool.take()
    for number in (3, 2, 1):
        pool.sink.removed(number, number)
    pool.sink.cleared()
    assert pool.take() == [AllBlocksCleared()]


def test_what_was_registered_and_forgotten_is_never_told_of():
    pool = Pool()
    pool.sink.registered(FakeBlock(1, 1, None, [1] * BLOCK_SIZE))
    pool.sink.registered(FakeBlock(1, 2, None, [2] * BLOCK_SIZE))  # the memory has another content by now
    pool.sink.computed({1})
    pool.sink.begin_step()
    assert pool.take() == [stored(2, 2)]


def test_a_block_whose_beginning_has_no_hash_is_not_told_of():
    pool = Pool()
    pool.sink.registered(FakeBlock(2, 2, FakeBlock(1, None, None, []), [2] * BLOCK_SIZE))
    pool.sink.computed({2})
    pool.sink.begin_step()
    assert pool.take() == []


def test_a_queue_that_overflows_is_counted_and_heals():
    """Dropped changes are made up for from the ledger, with events for the difference only."""
    pool = Pool(max_queued=4)
    pool.compute(1, 3)
    assert pool.take() == [stored(1, 3)]
    pool.sink.removed(3, 3)
    pool.compute(4, 9, parent=2)
    pool.compute(10, 12)
    assert pool.sink.dropped
    assert pool.take() == [BlockRemoved([3]), stored(4, 9, parent=2), stored(10, 12, parent=None)]
    assert pool.announced() == [1, 2, *range(4, 13)]
    assert pool.take() == []


def test_an_overflow_amid_a_step_tells_the_rest_when_it_is_over():
    pool = Pool(max_queued=2)
    pool.compute(1, 2)
    pool.sink.registered(FakeBlock(7, 7, None, [7] * BLOCK_SIZE))
    pool.sink.computed({7})
    assert pool.sink.dropped == 2
    assert pool.take() == [stored(1, 2)]
    pool.sink.begin_step()
    assert pool.take() == [stored(7, 7)]


def test_b60_after_an_overflow_all_blocks_are_read_once_however_busy_the_engine_is():
    """Blocks of the running step are left out then, and told of when it is over, in their order."""
    pool = Pool()
    pool.compute(1, 3)
    pool.sink.resync()
    copies = 0
    for number in range(11, 16):
        pool.sink.registered(FakeBlock(number, number, None, [number] * BLOCK_SIZE))
        pool.sink.computed({number})
        for _ in range(2):
            changes, everything = pool.sink.take(lambda: False)
            copies += everything is not None
            pool.journal.replace(everything) if everything is not None else None
            pool.journal.apply(changes)
        assert pool.announced() == [1, 2, 3, *range(11, number)]
        pool.sink.begin_step()
    pool.sink.removed(15, 15)
    pool.take()
    assert copies == 1 and pool.announced() == [1, 2, 3, *range(11, 15)]


def test_adapters_and_extras_travel_along_and_private_blocks_do_not():
    known = {5: Salt(3, "ada"), 6: Salt(private=True)}
    pool = Pool(explain=known.get)
    pool.compute(1, 2, extra=5)
    pool.compute(11, 11, extra=6)
    pool.compute(21, 21, extra=7)
    assert pool.take() == [stored(1, 2, lora_id=3, lora_name="ada"), stored(21, 21, extra_keys=[7])]


def test_what_nobody_could_explain_is_asked_for_again():
    """Who has it may be between two queues just then."""
    known = {}
    pool = Pool(explain=known.get)
    pool.compute(1, 1, extra=5)
    known[5] = Salt(3, "ada")
    pool.compute(2, 2, parent=1, extra=5)
    known.clear()
    pool.compute(3, 3, parent=2, extra=5)
    assert pool.take() == [stored(1, 1, extra_keys=[5]), stored(2, 3, parent=1, lora_id=3, lora_name="ada")]


def test_a_snapshot_comes_in_parts_of_whole_blocks():
    pool = Pool()
    pool.compute(1, 5)
    pool.compute(11, 12)
    pool.take()
    assert list(runs(pool.journal.blocks(), BLOCK_SIZE, 3)) == [
        [stored(1, 3)], [stored(4, 5, parent=3), stored(11, 11)], [stored(12, 12, parent=11)]]
