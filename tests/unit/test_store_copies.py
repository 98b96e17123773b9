# SPDX-License-Identifier: Apache-2.0
"""The store's copies from and to a device, whose streams run late and in any order that its events allow."""
from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from vllm_pd.errors import ConfigError
from vllm_pd.store.copies import CacheBlock, DeviceCopies
from vllm_pd.store.loads import BlockLoad, LoadGivenUp
from vllm_pd.store.plan import StorePlan
from vllm_pd.store.worker import byte_rows

BLOCKS, ROWS, SIZE = 12, 5, 4
SEEDS = range(60)


class LateEvent:
    def __init__(self) -> None:
        self.is_done = False


class LateDevice:
    """Three streams. An operation runs when `turn` chooses its stream, or when somebody waits for it."""

    def __init__(self, draw: random.Random) -> None:
        self.rows = ROWS
        self.cache = np.zeros((BLOCKS, SIZE), np.int64)
        self._draw = draw
        self._streams: dict[str, deque] = {name: deque() for name in ("steps", "out", "in")}
        self._gathered, self._pinned = np.zeros((ROWS, SIZE), np.int64), np.zeros((ROWS, SIZE), np.int64)
        self._load = np.zeros(SIZE, np.int64)

    def launch(self, stream: str, operation: Callable[[], object], after: LateEvent | None = None) -> LateEvent:
        event = LateEvent()
        self._streams[stream].append((operation, after, event))
        return event

    def turn(self) -> bool:
        """Run one operation that may run. Returns whether there was one."""
        ready = [ops for ops in self._streams.values() if ops and (ops[0][1] is None or ops[0][1].is_done)]
        if not ready:
            return False
        operation, _, event = self._draw.choice(ready).popleft()
        operation()
        event.is_done = True
        return True

    def use(self) -> None:
        pass

    def gather(self, block_ids: Sequence[int], first_row: int) -> LateEvent:
        def run() -> None:
            self._gathered[first_row:first_row + len(block_ids)] = self.cache[list(block_ids)]
        return self.launch("steps", run)

    def copy_out(self, first_row: int, count: int, after: LateEvent | None) -> LateEvent:
        rows = slice(first_row, first_row + count)

        def run() -> None:
            self._pinned[rows] = self._gathered[rows]
        return self.launch("out", run, after)

    def copy_in(self, block_id: int, after: LateEvent | None) -> LateEvent:
        def run() -> None:
            self.cache[block_id] = self._load
        return self.launch("in", run, after)

    def wait(self, event: LateEvent) -> None:
        while not event.is_done:
            assert self.turn()

    def row(self, row: int) -> Sequence[np.ndarray]:
        return [self._pinned[row]]

    def loaded(self) -> Sequence[np.ndarray]:
        return [self._load]


class Stored:
    """A store without limits."""

    def __init__(self) -> None:
        self.blocks: dict[object, np.ndarray] = {}

    def put(self, key: object, parts: Sequence[np.ndarray]) -> None:
        self.blocks[key] = parts[0].copy()

    def get(self, key: object, parts: Sequence[np.ndarray]) -> bool:
        if key in self.blocks:
            parts[0][:] = self.blocks[key]
        return key in self.blocks


class NoOrder(LateDevice):
    """The copy to the host does not wait for the gather."""

    def copy_out(self, first_row, count, after):
        return super().copy_out(first_row, count, None)


class WrongStep(LateDevice):
    """It waits for the gather of the step before."""

    before: LateEvent | None = None

    def copy_out(self, first_row, count, after):
        self.before, wrong = after, self.before
        return super().copy_out(first_row, count, wrong)


class TooEarly(LateDevice):
    """Nobody waits for the copies, so rows are put and used again before they are there."""

    def wait(self, event):
        pass


class LoadsAtOnce(LateDevice):
    """A load does not wait for the last gather."""

    def copy_in(self, block_id, after):
        return super().copy_in(block_id, None)


def play(kind: type[LateDevice], seed: int) -> str:
    """Steps that write blocks, put some and give others to loads, which begin at once. Returns what was wrong."""
    draw = random.Random(seed)
    device, store = kind(draw), Stored()
    copies = DeviceCopies(store, device, has_thread=False)
    content: dict[str, int] = {}  # by key
    jobs = 0

    def write(block_ids: Sequence[int], values: Sequence[int]) -> None:
        def run() -> None:
            device.cache[list(block_ids)] = np.asarray(values)[:, None]
        device.launch("steps", run)

    for step in range(1, 40):
        block_ids = draw.sample(range(BLOCKS), draw.randint(1, 4))
        values = [step * 100 + block for block in block_ids]
        write(block_ids, values)
        room = ROWS - (len(content) - copies.ended)
        put = list(zip(block_ids, values, strict=True))[:room]
        before = copies._gathered
        copies.put([CacheBlock(f"{value}", block) for block, value in put])
        jobs += len(put) > 0 and 1 + (before % ROWS + len(put) > ROWS)
        content |= {f"{value}": value for _, value in put}
        for _ in range(draw.randint(0, 6)):
            device.turn()
        while jobs and draw.random() < 0.6:
            copies.work()
            jobs -= 1
        if store.blocks and draw.random() < 0.5:
            # Of those that this step has filled, too: a request ends with its step, and its blocks are given away.
            block, key = draw.choice(block_ids), draw.choice(list(store.blocks))
            was_there = copies.load(CacheBlock(key, block), BlockLoad((), 0.0))
            if not was_there or (device.cache[block] != content[key]).any():
                return "a load has brought something else"
    for _ in range(jobs):
        copies.work()
    while device.turn():
        pass
    if copies.ended != len(content):
        return "blocks are on their way for ever"
    wrong = [key for key, value in content.items() if (store.blocks[key] != value).any()]
    return f"{len(wrong)} blocks are stored wrong" if wrong else ""


@pytest.mark.parametrize("seed", SEEDS)
def test_b104_blocks_are_stored_and_loaded_as_they_were(seed: int):
    """B104: whatever the streams do first."""
    assert play(LateDevice, seed) == ""


@pytest.mark.parametrize("kind", [NoOrder, WrongStep, TooEarly, LoadsAtOnce])
def test_b104_a_missing_order_is_found(kind: type[LateDevice]):
    """B104: the histories above show each defect."""
    assert any(play(kind, seed) for seed in SEEDS)


def test_of_more_blocks_than_rows_the_first_are_left_out():
    """They are of the end of a prompt, and the scheduler believed that there was room."""
    store = Stored()
    copies = DeviceCopies(store, LateDevice(random.Random(0)), has_thread=False)
    copies.put([CacheBlock(f"{block}", block) for block in range(7)])
    assert copies.ended == 2
    copies.put([CacheBlock("none", 9)])
    assert copies.ended == 3
    copies.work()
    assert copies.ended == 8 and list(store.blocks) == ["2", "3", "4", "5", "6"]
    copies.put([CacheBlock("next", 9)])
    copies.work()
    assert copies.ended == 9 and "next" in store.blocks


def test_a_load_that_was_given_up_is_not_copied():
    """B104: V1 may have given its blocks to another request."""
    device, store = LateDevice(random.Random(0)), Stored()
    store.blocks["k"] = np.full(SIZE, 7)
    load = BlockLoad((), 0.0)
    load.fail()
    with pytest.raises(LoadGivenUp):
        DeviceCopies(store, device, has_thread=False).load(CacheBlock("k", 3), load)
    assert not device.turn()


def test_blocks_that_the_store_cannot_take_are_on_their_way_no_more(caplog: pytest.LogCaptureFixture):
    class Broken(Stored):
        def put(self, key, parts):
            raise OSError("gone")

    copies = DeviceCopies(Broken(), LateDevice(random.Random(0)), has_thread=False)
    for block in range(3):
        copies.put([CacheBlock(f"{block}", block)])
        copies.work()
    assert copies.ended == 3 and caplog.text.count("were not put") == 1


def test_no_more_blocks_are_put_than_there_are_rows():
    """The others come with later steps, in order, each once."""
    plan, names = StorePlan(1, lambda name: False, 100), [bytes([number]) for number in range(8)]
    plan.add("r")
    found = []
    for most, computed in ((3, 5), (0, 6), (2, 7), (None, 8)):
        plan.begin_step(most)
        put = plan.puts("r", names, lambda: range(8), computed - 1, computed)
        assert most is None or len(put) <= most
        found += [block.block_id for block in put]
    assert found == list(range(8))


def test_neighbouring_layers_are_one_part():
    """Blocks outermost: a block is in one piece."""
    cache = torch.arange(6 * 3 * 2 * 4, dtype=torch.int16).view(6, 3, 2, 2, 2)  # blocks, layers, heads, tokens, content
    merged, = byte_rows([cache[:, layer] for layer in range(3)])
    assert torch.equal(merged, cache.view(6, -1).view(torch.uint8))
    apart = byte_rows(list(cache.transpose(0, 1).contiguous()))
    assert [part.shape for part in apart] == [(6, 16)] * 3


def test_a_device_that_is_neither_host_nor_cuda_is_refused():
    with pytest.raises(ConfigError, match="device='meta' can't be used: serve on the CPU or on CUDA"):
        byte_rows([torch.empty(2, 1, 1, 1, device="meta")])
