#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What new transfer agents cost a rank (`vllm_pd.protocol.generations`): the time to make one over a cache that is
registered already, and to destroy the one before, by the size of the cache; what memory it takes; and for how long the
writes of a peer that goes on writing here stand still meanwhile.

The peer is another process with a cache of its own. It writes a block of 2 MiB again and again, into the generation in
which it was added, and notes when each write ended. `gap` is the longest time between two ends around a renewal,
`usual` the longest one without. The rank's own transfers wait for as long as `renew` and `retire` take: they are run by
the same thread.
"""
from __future__ import annotations

import argparse
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
    """The other process: writes until it is told to end, and answers with the moments at which its writes ended."""
    torch.set_num_threads(1)
    cache = Cache.of(4)
    transport = NixlGenerations("writer", cache.tensors, cache.description, progress_thread=False)
    transport.add_peer(name, metadata)
    ends: list[float] = []
    while not pipe.poll():
        transport.write("k", name, [0] * WRITE_BLOCKS, list(range(WRITE_BLOCKS)), b"")
        while not (finished := transport.poll().finished):
            time.sleep(0.0001)
        if not finished[0].ok:
            break
        ends.append(time.monotonic())
        if len(ends) == 1:
            pipe.send("begun")
    pipe.recv()
    pipe.send(ends)
    transport.close()


class Renewal(NamedTuple):
    """One renewal, in milliseconds and MiB."""
    renew_ms: float
    retire_ms: float
    memory_mib: float
    gap_ms: float
    usual_ms: float


def measure(blocks: int) -> Renewal:
    """One renewal of a rank with a cache of so many blocks, while a peer writes."""
    cache, process = Cache.of(blocks), psutil.Process()
    transport = NixlGenerations("rank", cache.tensors, cache.description)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=write_on, args=(theirs, "rank", transport.metadata()))
    peer.start()
    try:
        if not ours.poll(DEADLINE_S):
            raise TimeoutError(f"the writer has not begun within {DEADLINE_S:g} s")
        ours.recv()
        time.sleep(SETTLE_S)
        before, began = process.memory_info().rss, time.monotonic()
        transport.renew("rank~1")
        made, memory = time.monotonic(), process.memory_info().rss - before
        time.sleep(SETTLE_S)
        ours.send("end")
        if not ours.poll(DEADLINE_S):
            raise TimeoutError(f"the writer has not ended within {DEADLINE_S:g} s")
        ends = ours.recv()
        retired = time.monotonic()
        transport.retire("retire")
        over = time.monotonic()
    finally:
        peer.kill()
        peer.join()
        transport.close()
    gaps = [(one, later - one) for one, later in zip(ends, ends[1:], strict=False)]
    around = [gap for one, gap in gaps if began - 0.05 <= one <= made]
    usual = [gap for one, gap in gaps if one < began - 0.05]
    return Renewal(1e3 * (made - began), 1e3 * (over - retired), memory / 2**20, 1e3 * max(around, default=0.0),
                   1e3 * max(usual, default=0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0, 10.0], help="sizes of the cache")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=argument_file, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or min(arguments.gib) <= 0:
        parser.error("--rounds and --gib must be more than 0")
    torch.set_num_threads(1)
    console, found, rows = Console(width=100), {}, []
    for gib in arguments.gib:
        renewals = []
        for number in range(arguments.rounds):
            renewals.append(measure(max(4, int(gib * 2**30 / BLOCK_BYTES))))
            console.print(f"{gib:g} GiB, {number + 1} of {arguments.rounds}: {renewals[-1].renew_ms:.0f} ms",
                          style="dim")
        figures = {name: [round(getattr(one, name), 2) for one in renewals] for name in Renewal._fields}
        found[f"{gib:g}"] = figures
        rows.append([f"{gib:g}", *(f"{statistics.median(figures[name]):.1f}, {max(figures[name]):.1f}"
                                   for name in Renewal._fields)])
    console.print(table(["cache, GiB", "renew, ms", "retire, ms", "memory, MiB", "gap, ms", "usual, ms"], rows))
    console.print("each: median, maximum")
    if arguments.json:
        write_json(Path(arguments.json), {"rounds": arguments.rounds, "by_gib": found})


if __name__ == "__main__":
    main()
