# SPDX-License-Identifier: Apache-2.0
"""A program for tests/sockets: processes that put and read blocks in one store while they are killed and stopped.

    python store_storm.py FOLDER KILLS

Prints what happened as JSON. The bytes of a block follow from its key, so each reader can tell a wrong one.
"""
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.blocks import BlockKey
from vllm_pd.store.slots import LockSlot, ReadRecord, Steps, UnlockSlot
from vllm_pd.store.store import BlockStore

BLOCK_BYTES = 1 << 20
SLOTS = 32
BLOCKS = 96
CHILDREN = 4
WRONG = 3  # exit status of a child that was given a wrong block


def key_of(number: int) -> BlockKey:
    """The key of a block."""
    return BlockKey(b"m" * 16, number.to_bytes(32, "little"))


def content_of(number: int) -> np.ndarray:
    """Its bytes: no piece of a block looks like that of another."""
    return (np.arange(BLOCK_BYTES // 8, dtype=np.uint64) * 1_000_003 + number).view(np.uint8)


def open_store(folder: Path) -> BlockStore:
    """The store of all processes."""
    gib = (SLOTS * (BLOCK_BYTES + 128) + 8192) / 2**30
    return BlockStore(StoreSettings(str(folder / "memory"), gib, str(folder / "files"), 48 * BLOCK_BYTES / 2**30),
                      BLOCK_BYTES)


def live(folder: Path, seed: int) -> None:
    """A child's life: puts and reads, for ever."""
    rng = random.Random(seed)
    store = open_store(folder)
    out = np.empty(BLOCK_BYTES, np.uint8)
    while True:
        number = rng.randrange(BLOCKS)
        if not store.get(key_of(number), [out]):
            store.put(key_of(number), [content_of(number)])
        elif not np.array_equal(out, content_of(number)):
            os._exit(WRONG)


def start(folder: Path, seed: int) -> int:
    """Fork a child. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        live(folder, seed)
    finally:
        os._exit(1)


def half_written(store: BlockStore) -> int:
    """How many slots a killed process has left half written: nobody writes them, and they hold no block."""
    found = 0
    for slot in range(store.arena.shape.slots):
        record = store.arena.record(slot)
        if record.header is None and record.used_ns:
            found += store.arena.run(_try(slot), None)
    return found


def _try(slot: int) -> Steps:
    if not (yield LockSlot(slot, True)):
        return False
    record = yield ReadRecord(slot)
    yield UnlockSlot(slot)
    return record.header is None and record.used_ns > 0


def storm(folder: Path, kills: int) -> dict[str, int]:
    """Kill so many children; each in ten is stopped for a while before. Returns what happened."""
    rng = random.Random(1)
    children = [start(folder, seed) for seed in range(CHILDREN)]
    time.sleep(1)
    store = open_store(folder)
    counts = {"kills": 0, "half_written": 0, "wrong": 0, "died": 0}
    for seed in range(kills):
        time.sleep(rng.uniform(0.005, 0.05))
        child = children.pop(rng.randrange(CHILDREN))
        if seed % 10 == 0:
            os.kill(child, signal.SIGSTOP)
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        counts["kills"] += os.WIFSIGNALED(status)
        counts["wrong"] += os.WIFEXITED(status) and os.WEXITSTATUS(status) == WRONG
        counts["died"] += os.WIFEXITED(status) and os.WEXITSTATUS(status) != WRONG
        counts["half_written"] += half_written(store)
        store.close()
        children.append(start(folder, kills + seed))  # forked while nothing is open here
        store = open_store(folder)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return counts | look_after(store)


def look_after(store: BlockStore) -> dict[str, int]:
    """What is left: blocks that can be read and are right or wrong, and slots that can't be locked."""
    out = np.empty(BLOCK_BYTES, np.uint8)
    read = [number for number in range(BLOCKS) if store.arena.get(key_of(number), [out])
            and np.array_equal(out, content_of(number))]
    held = [number for number in range(BLOCKS) if store.arena.contains(key_of(number))]
    locked = sum(not store.arena.run(_lock_and_unlock(slot), None) for slot in range(store.arena.shape.slots))
    files = list(store.files.files())
    from_files = sum(store.get(key_of(number), [out]) and not np.array_equal(out, content_of(number))
                     for number in range(BLOCKS))
    return {"left": len(read), "left_wrong": len(held) - len(read), "locked": locked, "files": len(files),
            "file_bytes": sum(file.size for file in files), "wrong_files": from_files,
            "partial_files": sum("part" in os.path.basename(file.path) for file in files)}


def _lock_and_unlock(slot: int) -> Steps:
    locked = yield LockSlot(slot, True)
    if locked:
        yield UnlockSlot(slot)
    return locked


if __name__ == "__main__":
    print(json.dumps(storm(Path(sys.argv[1]), int(sys.argv[2]))))
