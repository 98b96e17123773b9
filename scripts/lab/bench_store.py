#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The KV store: GB/s in and out beside memcpy and LMCache's CPU backend, the hits of its eviction beside the most, and
what a look-up costs EngineCore.

Bandwidth: one thread copies blocks of `--block-bytes` from a cache into the store and from there to another cache, each
larger than the processor's caches. A block lies in `--parts` buffers, as an engine's lies in one or two for each layer.
The ways take turns in each round. `memcpy` is numpy's copy, part by part, to a buffer and back. `shared` is the same to
and from a file on a tmpfs, which the arena is, too: where the kernel gives such files pages of 4 KiB
(/sys/kernel/mm/transparent_hugepage/shmem_enabled), that alone may be slower. `store` checks each block that it reads.
LMCache is measured where it can be imported; its backend is a dictionary of one process over one buffer: allocate, copy
in, put, get, copy out, remove.

Hits: conversations (`vllm_pd.bench.simulation`) on an arena with a share of the blocks of the whole trace. A hit is a
prompt's block that is there and all before it. The most that any cache of that size can have is `most_hits`.

Look-ups: CPU time for each block that is there, in a full arena, for an engine of so many ranks.
"""
import argparse
import contextlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from vllm_pd.bench.outputs import argument_file
from vllm_pd.bench.share.caches import LruCache
from vllm_pd.bench.simulation.oracle import block_uses, most_hits
from vllm_pd.bench.simulation.trace import TraceConfig, make
from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.arena import PAGE, BlockArena
from vllm_pd.store.blocks import HEADER_BYTES, BlockKey
from vllm_pd.store.slots import WAYS
from vllm_pd.store.store import BlockStore
from vllm_pd.store.view import StoreView

BLOCK_TOKENS = 16  # of the conversations


def key_of(number: int) -> BlockKey:
    """The key of a block: consecutive ones are in consecutive sets."""
    return BlockKey(b"m" * 16, number.to_bytes(32, "little"))


def scattered_key_of(number: int) -> BlockKey:
    """The key of a block, in any set, as the names of real blocks are."""
    return key_of(number * 0x9E3779B97F4A7C15 % (1 << 64))


Parts = list[np.ndarray]  # of a block: one for each layer, or more


class Memcpy:
    """Copies to a buffer, and back."""

    def __init__(self, blocks: int, size: int) -> None:
        self._memory = np.zeros((blocks, size), np.uint8) + 1

    def put(self, number: int, parts: Parts) -> None:
        """Copy a block in."""
        copy_in(self._memory[number], parts)

    def get(self, number: int, parts: Parts) -> None:
        """Copy a block out."""
        copy_out(self._memory[number], parts)

    def clear(self) -> None:
        """Nothing: it is overwritten."""

    def close(self) -> None:
        """Nothing."""


class SharedMemcpy(Memcpy):
    """The same, over a file in shared memory."""

    def __init__(self, blocks: int, size: int) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, blocks * size)
            self._map = mmap.mmap(file.fileno(), blocks * size)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = np.frombuffer(self._map, np.uint8).reshape(blocks, size)
        self._memory[:] = 1

    def close(self) -> None:
        """Give the memory back."""
        del self._memory
        self._map.close()


class OurStore:
    """The arena, full of other blocks before a round: each put replaces one."""

    def __init__(self, blocks: int, size: int, folder: Path) -> None:
        memory = (HEADER_BYTES + -(-size // PAGE) * PAGE) * (blocks + WAYS) + 4 * PAGE
        self._store = BlockStore(StoreSettings(str(folder), memory / 2**30), size)
        self._round = 0

    def put(self, number: int, parts: Parts) -> None:
        """Store a block."""
        self._store.put(key_of(self._round << 32 | number), parts)

    def get(self, number: int, parts: Parts) -> None:
        """Read a block, and check it."""
        if not self._store.get(key_of(self._round << 32 | number), parts):
            raise RuntimeError(f"block {number} is not there")

    def clear(self) -> None:
        """The blocks to come are other ones."""
        self._round += 1

    def close(self) -> None:
        """Give the arena back."""
        self._store.close()


class LMCacheBackend:
    """LMCache's LocalCPUBackend."""

    def __init__(self, blocks: int, size: int) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        self._torch, self._key, self._format = torch, CacheEngineKey, MemoryFormat.KV_2LTD
        config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=blocks * size * 1.25 / 2**30)
        allocator = MixedMemoryAllocator(int(blocks * size * 1.25))
        self._backend = LocalCPUBackend(config, memory_allocator=allocator)
        self._size = size
        self._keys: list[object] = []

    def _name(self, number: int) -> object:
        return self._key("model", 1, 0, number, self._torch.uint8)

    def put(self, number: int, parts: Parts) -> None:
        """Allocate, copy, put."""
        block = self._backend.allocate(self._torch.Size([self._size]), self._torch.uint8, self._format)
        copy_in(np.frombuffer(block.byte_array, np.uint8), parts)
        self._keys.append(self._name(number))
        self._backend.submit_put_task(self._keys[-1], block)
        block.ref_count_down()

    def get(self, number: int, parts: Parts) -> None:
        """Get, copy."""
        block = self._backend.get_blocking(self._name(number))
        copy_out(np.frombuffer(block.byte_array, np.uint8), parts)
        block.ref_count_down()

    def clear(self) -> None:
        """Remove all."""
        for key in self._keys:
            self._backend.remove(key)
        self._keys = []

    def close(self) -> None:
        """Nothing: it ends with the process."""


def copy_in(block: np.ndarray, parts: Parts) -> None:
    """Copy the parts into a block."""
    at = 0
    for part in parts:
        np.copyto(block[at:at + len(part)], part)
        at += len(part)


def copy_out(block: np.ndarray, parts: Parts) -> None:
    """Copy a block into the parts."""
    at = 0
    for part in parts:
        np.copyto(part, block[at:at + len(part)])
        at += len(part)


def gb_per_s(act: Callable[[int, Parts], None], blocks: list[Parts]) -> float:
    """The rate at which `act` moves these blocks."""
    began_s = time.perf_counter()
    for number, parts in enumerate(blocks):
        act(number, parts)
    return sum(part.nbytes for parts in blocks for part in parts) / (time.perf_counter() - began_s) / 1e9


def ways(blocks: int, size: int, folder: Path) -> Iterator[tuple[str, Memcpy | OurStore | LMCacheBackend]]:
    """What is compared."""
    yield "memcpy", Memcpy(blocks, size)
    yield "shared", SharedMemcpy(blocks, size)
    yield "store", OurStore(blocks, size, folder)
    try:
        yield "lmcache", LMCacheBackend(blocks, size)
    except ImportError as error:
        print(f"LMCache is not measured: {error}", file=sys.stderr)


def memory_folder() -> tempfile.TemporaryDirectory:
    """A folder in shared memory, removed at the end of a `with` block."""
    return tempfile.TemporaryDirectory(prefix="vllm-pd-bench-", dir="/dev/shm")


def cache_of(blocks: int, parts: int, size: int, fill: Callable[[np.ndarray], None]) -> list[Parts]:
    """The blocks of a cache that has a buffer for each part, as engines have for each layer."""
    buffers = [np.empty((blocks, len(part)), np.uint8) for part in np.array_split(np.empty(size, np.uint8), parts)]
    for buffer in buffers:
        fill(buffer)
    return [[buffer[number] for buffer in buffers] for number in range(blocks)]


def measure_rates(args: argparse.Namespace, size: int, parts: int) -> dict[str, dict[str, object]]:
    """GB/s of each way: medians, and all rounds. The first round, in which memory is touched first, is left out."""
    blocks = max(8, int(args.gib * 2**30) // size)
    rng = np.random.default_rng(0)

    def randomize(buffer: np.ndarray) -> None:
        buffer[:] = rng.integers(0, 256, buffer.shape, np.uint8)

    source = cache_of(blocks, parts, size, randomize)
    target = cache_of(blocks, parts, size, lambda buffer: buffer.fill(1))
    found: dict[str, dict[str, list[float]]] = {}
    with memory_folder() as folder:
        compared = dict(ways(blocks, size, Path(folder)))
        for number in range(args.rounds + 1):
            for name, way in compared.items():
                way.clear()
                rates = {"in": gb_per_s(way.put, source), "out": gb_per_s(way.get, target)}
                for direction, rate in rates.items() if number else ():
                    found.setdefault(name, {"in": [], "out": []})[direction].append(round(rate, 3))
        for way in compared.values():
            way.close()
    return {name: {f"{direction}_{what}": value for direction, rounds in each.items()
                   for what, value in (("gb_per_s", round(statistics.median(rounds), 2)), ("rounds", rounds))}
            for name, each in found.items()}


def measure_hits(args: argparse.Namespace, share: float) -> dict[str, float]:
    """The share of the prompts' blocks that are hits: in the store, in one LRU list of its size, and at most."""
    trace = make(TraceConfig(conversations=args.conversations, seed=args.seed))
    uses = block_uses(trace, BLOCK_TOKENS)
    room = max(1, int(uses.distinct * share))
    with memory_folder() as folder:
        arena = BlockArena(Path(folder), 8, room * (HEADER_BYTES + PAGE) + 3 * PAGE)
        plain = LruCache(arena.shape.slots, uses.distinct)
        hits = plain_hits = asked = 0
        for blocks, prompt_blocks in uses:
            prompt = [scattered_key_of(block) for block in blocks[:prompt_blocks]]
            hits += next((number for number, key in enumerate(prompt) if not arena.contains(key)), prompt_blocks)
            plain_hits += plain.hits(blocks[:prompt_blocks])
            asked += prompt_blocks
            for block in reversed(blocks):  # the end of a prompt is to go first
                arena.put(scattered_key_of(block), [bytes(8)])
            plain.use(blocks)
        slots = arena.shape.slots
        arena.close()
    return {"share": share, "slots": slots, "distinct_blocks": uses.distinct, "hits": round(hits / asked, 4),
            "plain_lru": round(plain_hits / asked, 4),
            "most_hits": round(most_hits(uses, slots) / asked, 4),
            "endless_cache": round(most_hits(uses, None) / asked, 4)}


def measure_look_ups(ranks: int, blocks: int = 2000, rounds: int = 7) -> float:
    """CPU microseconds to find that each rank has its part of a block: the best round."""
    models = [bytes([rank]) * 16 for rank in range(ranks)]
    with memory_folder() as folder:
        slots = int(blocks * ranks * 1.5) // WAYS * WAYS
        settings = StoreSettings(folder, (slots * (HEADER_BYTES + PAGE) + 2 * PAGE) / 2**30)
        arena, view = BlockArena(folder, 8, settings.memory_bytes), StoreView(settings, 8, models)
        for number in range(3 * blocks):
            for model in models:
                arena.put(scattered_key_of(number)._replace(model=model), [bytes(8)])
        names = [key.name for key in map(scattered_key_of, range(3 * blocks)) if view.contains(key.name)]
        taken_s = []
        for _ in range(rounds):
            began_s = time.process_time()
            for name in names:
                view.contains(name)
            taken_s.append(time.process_time() - began_s)
        view.close()
        arena.close()
    return round(min(taken_s) / len(names) * 1e6, 1)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--block-bytes", type=int, nargs="+", default=[256 << 10, 2 << 20, 6 << 20])
    made.add_argument("--parts", type=int, nargs="+", default=[1, 32],
                      help="in how many buffers a block lies: a cache has one for each layer, or two")
    made.add_argument("--gib", type=float, default=1.0, help="what is copied in each round")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--conversations", type=int, default=300)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--remark", default="", help="goes into the JSON: what else ran on the machine")
    made.add_argument("--output", type=argument_file, help="write the figures here, too, as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Prints three tables."""
    args = parser().parse_args(argv)
    rates = [{"block_bytes": size, "parts": parts, "ways": measure_rates(args, size, parts)}
             for size in args.block_bytes for parts in args.parts]
    print("| block, KiB | parts | way | in, GB/s | out, GB/s | in / memcpy | out / memcpy | in / shared "
          "| out / shared |\n|---|---|---|---|---|---|---|---|---|")
    for each in rates:
        for name, found in each["ways"].items():
            ratios = [found[f"{way}_gb_per_s"] / each["ways"][base][f"{way}_gb_per_s"]
                      for base in ("memcpy", "shared") for way in ("in", "out")]
            print(f"| {each['block_bytes'] >> 10} | {each['parts']} | {name} | {found['in_gb_per_s']} | "
                  f"{found['out_gb_per_s']} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    hits = [measure_hits(args, share) for share in (0.1, 0.25, 0.5, 1.0)]
    print("\n| slots / distinct blocks | hits | of one LRU list | most hits |\n|---|---|---|---|")
    for one in hits:
        print(f"| {one['share']} | {one['hits']:.3f} | {one['plain_lru']:.3f} | {one['most_hits']:.3f} |")
    look_ups = {ranks: measure_look_ups(ranks) for ranks in (1, 2, 4)}
    print("\n| ranks | look-up of a block, us |\n|---|---|")
    for ranks, found_us in look_ups.items():
        print(f"| {ranks} | {found_us} |")
    if args.output is not None:
        args.output.write_text(json.dumps({"remark": args.remark, "gib": args.gib, "rates": rates, "hits": hits,
                                           "look_ups_us": look_ups}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
