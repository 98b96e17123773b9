#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What new transfer agents cost a rank (`vllm_pd.protocol.generations`): the time to make one over a cache that is
registered already, and to destroy the one before, by the size of the cache and the number of peers; what memory it
takes; and for how long the writes of peers that go on writing here stand still meanwhile.

Each peer is another process with a cache of its own. It writes a block of 2 MiB again and again, and notes when each
write ended. When there is a newer generation it is told so, adds it, and goes on in that one; then the older one is
destroyed. `renew gap`, `move gap` and `retire gap` are the longest times between two ends of one peer around these
moments, `usual gap` the longest one before; of all peers. The rank's own transfers wait for as long as `renew` and
`retire` take: they are run by the same thread.
"""
from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from rich.console import Console

from vllm_pd.bench.outputs import argument_file, write_json
from vllm_pd.bench.report import table
from vllm_pd.transfer.layout import CacheDescription, describe
from vllm_pd.transfer.nixl.generations import NixlGenerations

LAYERS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 16, 8, 128, 16
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * BLOCK_SIZE * 4  # 2 MiB
WRITE_BLOCKS = 1
SETTLE_S, DEADLINE_S = 0.5, 60.0


class Cache(NamedTuple):
    """A KV cache on the CPU, with every page touched."""
    tensors: list[torch.Tensor]
    description: CacheDescription

    @classmethod
    def of(cls, blocks: int) -> Cache:
        """One of so many blocks."""
        tensors = [torch.ones((2, blocks, BLOCK_SIZE * KV_HEADS * HEAD_SIZE)) for _ in range(LAYERS)]
        return cls(tensors, describe(tensors, num_blocks=blocks, block_size=BLOCK_SIZE, kv_heads=KV_HEADS,
                                     head_size=HEAD_SIZE, platform="cpu", backend="IPEX"))


def write_on(pipe: Connection, name: str, metadata: bytes) -> None:
    """The other process: writes, from the name and metadata of a newer generation on into that, until it gets None, and
    answers with the moments at which its writes ended."""
    torch.set_num_threads(1)
    cache = Cache.of(4)
    transport = NixlGenerations("writer", cache.tensors, cache.description, progress_thread=False)
    transport.add_peer(name, metadata)
    ends: list[float] = []
    while True:
        if pipe.poll():
            newer = pipe.recv()
            if newer is None:
                break
            name, metadata = newer
            transport.add_peer(name, metadata)
        transport.write("k", name, [0] * WRITE_BLOCKS, list(range(WRITE_BLOCKS)), b"")
        while not (finished := transport.poll().finished):
            time.sleep(0.0001)
        if not finished[0].ok:
            raise RuntimeError(f"a write failed: {finished[0]}")
        ends.append(time.monotonic())
        if len(ends) == 1:
            pipe.send("begun")
    pipe.send(ends)
    transport.close()


class Renewal(NamedTuple):
    """One renewal, in milliseconds and MiB."""
    renew_ms: float
    retire_ms: float
    memory_mib: float
    renew_gap_ms: float
    move_gap_ms: float
    retire_gap_ms: float
    usual_gap_ms: float


class Writer:
    """A peer."""

    def __init__(self, name: str, metadata: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=write_on, args=(theirs, name, metadata))
        self._process.start()

    def answer(self) -> object:
        """What it says next."""
        if not self.pipe.poll(DEADLINE_S):
            raise TimeoutError(f"a writer says nothing for {DEADLINE_S:g} s")
        return self.pipe.recv()

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


def measure(blocks: int, peers: int) -> Renewal:
    """One renewal of a rank with a cache of so many blocks, while so many peers write."""
    cache, process = Cache.of(blocks), psutil.Process()
    transport = NixlGenerations("rank", cache.tensors, cache.description)
    writers: list[Writer] = []
    try:
        writers += (Writer("rank", transport.metadata()) for _ in range(peers))
        for one in writers:
            one.answer()
        time.sleep(SETTLE_S)
        before, began = process.memory_info().rss, time.monotonic()
        transport.renew("rank~1")
        made, memory = time.monotonic(), process.memory_info().rss - before
        time.sleep(SETTLE_S)
        moves = time.monotonic()
        for one in writers:
            one.pipe.send(("rank~1", transport.metadata()))
        time.sleep(SETTLE_S)
        retires = time.monotonic()
        transport.retire("retire")
        retired = time.monotonic()
        time.sleep(SETTLE_S)
        for one in writers:
            one.pipe.send(None)
        ends = [one.answer() for one in writers]
    finally:
        for one in writers:
            one.kill()
        transport.close()

    def longest(after: float, until: float) -> float:
        """Between two ends of one peer, the later of them after the one moment, the earlier before the other; in ms."""
        return 1e3 * max(later - one for moments in ends for one, later in zip(moments, moments[1:], strict=False)
                         if later >= after and one <= until)

    return Renewal(1e3 * (made - began), 1e3 * (retired - retires), memory / 2**20, longest(began, made),
                   longest(moves, retires), longest(retires, retired), longest(0.0, began - SETTLE_S / 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0, 10.0], help="sizes of the cache")
    parser.add_argument("--peers", type=int, nargs="+", default=[1], help="numbers of peers that write")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=argument_file, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    if min(arguments.rounds, *arguments.gib, *arguments.peers) <= 0:
        parser.error("--rounds, --gib and --peers must be more than 0")
    torch.set_num_threads(1)
    console, found, rows = Console(width=120), [], []
    for gib, peers in itertools.product(arguments.gib, arguments.peers):
        renewals = []
        for number in range(arguments.rounds):
            renewals.append(measure(max(4, int(gib * 2**30 / BLOCK_BYTES)), peers))
            console.print(f"{gib:g} GiB, {peers} peers, {number + 1} of {arguments.rounds}: "
                          f"{renewals[-1].renew_ms:.0f} ms", style="dim")
        figures = {name: [round(getattr(one, name), 2) for one in renewals] for name in Renewal._fields}
        found.append({"gib": gib, "peers": peers, **figures})
        rows.append([f"{gib:g}", str(peers), *(f"{statistics.median(figures[name]):.1f}, {max(figures[name]):.1f}"
                                               for name in Renewal._fields)])
    console.print(table(["GiB", "peers", "renew, ms", "retire, ms", "memory, MiB", "renew gap, ms", "move gap, ms",
                         "retire gap, ms", "usual gap, ms"], rows))
    console.print("each: median, maximum")
    if arguments.json:
        write_json(Path(arguments.json), {"rounds": arguments.rounds, "runs": found})


if __name__ == "__main__":
    main()
