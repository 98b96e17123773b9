#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What our transport costs over raw NIXL, and NIXL over a memcpy, on the same bytes between two processes.

The caches have SmolLM2-135M's shape in float32 by default: 45 KiB a token. A case is a block size, a prompt length and
an order of block ids; in each round the three ways take turns, so that a busy machine hurts all of them:

    ours     NixlTransport.write until its Finished: pairs checked and put in order, indices made, posted, released
    raw      NIXL's make, post, check until done, release, with lists and indices made before the clock starts
    memcpy   one contiguous copy of as many bytes inside this process

The notice column is the time from our Finished to the moment the other process, polling each half millisecond, has it.

With `--wire-ms`, after that, what an engine that computes makes of a slow wire: passes of `--pass-ms` of products,
each with a write before it that an emulated wire carries in so long. `late` is from the moment at which the wire has
carried it to that at which the other process has its notice, `post` what the step loop waits before its pass. The rows:
a step loop that polls between its passes; the transfer thread that engines have; and that thread beside an engine that
sleeps, which shows what the emulated wire, the write and the notice take themselves.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from vllm_pd.transfer.agent import Agent, State
from vllm_pd.transfer.engine import EngineTransfer
from vllm_pd.transfer.layout import CacheDescription, describe
from vllm_pd.transfer.nixl import NixlTransport
from vllm_pd.transfer.plan import descriptor_indices, descriptor_rows, plan
from vllm_pd.transfer.requests import Write
from vllm_pd.transfer.slow import SlowTransport, Wire
from vllm_pd.transfer.transport import PeerMetadata
from vllm_pd.transfer.worker import TransferWorker

HEAD_SIZE, ELEMENT_BYTES, POLL_S = 64, 4, 0.0005
IDLE_S = 5.0
CHECK_S = 0.0002  # between two looks at an open transfer: looking all the time takes the core that moves the bytes
ORDERS = ("rising", "falling", "scattered")


@dataclass(frozen=True)
class Shape:
    """A cache: as much of a model as a transfer can see."""
    layers: int
    kv_heads: int
    block_size: int
    num_blocks: int

    def caches(self) -> list[torch.Tensor]:
        """One tensor per layer, as the CPU workers have them, with every page touched."""
        numel = self.block_size * self.kv_heads * HEAD_SIZE
        return [torch.ones((2, self.num_blocks, numel)) for _ in range(self.layers)]

    def describe(self, caches: list[torch.Tensor]) -> CacheDescription:
        return describe(caches, num_blocks=self.num_blocks, block_size=self.block_size, kv_heads=self.kv_heads,
                        head_size=HEAD_SIZE, platform="cpu", backend="IPEX")


class Meeting(NamedTuple):
    """Our end of two processes that have met."""
    transport: NixlTransport
    pipe: Connection
    caches: list[torch.Tensor]
    metadata: bytes
    first_ms: float


@dataclass(frozen=True)
class Ends:
    """How late writes end beside passes, and what that costs; medians and the worst, in milliseconds."""
    way: str
    late_ms: float
    late_most_ms: float
    post_ms: float
    post_most_ms: float
    thread_cpu: float  # of a core while writes are open
    idle_cpu: float  # of a core while none is


@dataclass(frozen=True)
class Row:
    """One case: medians over the rounds, and the best round, which a busy machine spoils least."""
    block_size: int
    tokens: int
    order: str
    bytes: int
    ours_ms: float
    raw_ms: float
    memcpy_ms: float
    ours_best_ms: float
    raw_best_ms: float
    memcpy_best_ms: float
    ours_over_raw: float  # median of the rounds' own ratios
    notice_ms: float

    def rate(self, milliseconds: float) -> float:
        """GB/s."""
        return self.bytes / milliseconds / 1e6


def receive(pipe: Connection, shape: Shape) -> None:
    """The other process: sends its metadata, then the moment of each notice until the pipe closes."""
    torch.set_num_threads(1)
    caches = shape.caches()
    transport = NixlTransport("receiver", caches, shape.describe(caches))
    pipe.send(transport.metadata())
    while not pipe.poll():
        for _ in transport.poll().notices:
            pipe.send(time.monotonic())
        time.sleep(POLL_S)
    transport.close()


class Raw:
    """The least that NIXL asks for, with an agent of its own over the same caches."""

    def __init__(self, caches: list[torch.Tensor], ours: CacheDescription, metadata: bytes) -> None:
        peer = PeerMetadata.decode("receiver", metadata)
        self._agent = Agent("raw", progress_thread=False)
        self._registered = self._agent.register(
            [(cache.data_ptr(), cache.numel() * ELEMENT_BYTES, 0) for cache in caches], ours.memory)
        self._agent.add_peer(peer.agent)
        self._ours, self._theirs = ours, peer.cache
        self._lanes = plan(ours, peer.cache)
        self._local = self._agent.prepare(
            descriptor_rows([(lane.local, lane.bytes) for lane in self._lanes], ours), ours.memory)
        self._remote = self._agent.prepare(
            descriptor_rows([(lane.remote, lane.bytes) for lane in self._lanes], peer.cache), ours.memory, "receiver")

    def write_s(self, local: list[int], remote: list[int]) -> float:
        pairs = sorted(zip(local, remote, strict=True))
        mine = descriptor_indices([a for a, _ in pairs], self._lanes, self._ours)
        other = descriptor_indices([b for _, b in pairs], self._lanes, self._theirs)
        started_s = time.perf_counter()
        handle = self._agent.make_write(self._local, mine, self._remote, other, b"raw")
        state = self._agent.post(handle)
        while state is State.OPEN:
            time.sleep(CHECK_S)
            state = self._agent.check(handle)
        self._agent.release(handle)
        if state is not State.DONE:
            raise SystemExit("the raw NIXL transfer failed")
        return time.perf_counter() - started_s

    def close(self) -> None:
        self._agent.release_prepared(self._local)
        self._agent.release_prepared(self._remote)
        self._agent.deregister(self._registered)


def ours_s(transport: NixlTransport, local: list[int], remote: list[int]) -> float:
    started_s = time.perf_counter()
    transport.write("bench", "receiver", local, remote, b"ours")
    ended = transport.poll().finished
    while not ended:
        time.sleep(CHECK_S)
        ended = transport.poll().finished
    if not ended[0].ok:
        raise SystemExit(f"our transfer failed: {ended[0].error}")
    return time.perf_counter() - started_s


def memcpy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    started_s = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started_s


def block_ids(order: str, count: int, num_blocks: int, seed: int) -> list[int]:
    """Block ids as an allocator hands them out: fresh, reused, or after long service."""
    if order == "scattered":
        return random.Random(seed).sample(range(num_blocks), count)
    first = random.Random(seed).randrange(num_blocks - count + 1)
    return list(range(first, first + count))[::1 if order == "rising" else -1]


@contextlib.contextmanager
def sender(shape: Shape) -> Iterator[Meeting]:
    """Our end, when a first write has gone through."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, shape), daemon=True)
    process.start()
    theirs.close()
    caches = shape.caches()
    transport = NixlTransport("sender", caches, shape.describe(caches), progress_thread=False)
    metadata = pipe.recv()
    transport.add_peer("receiver", metadata)
    first_ms = 1e3 * ours_s(transport, [0], [0])
    pipe.recv()
    yield Meeting(transport, pipe, caches, metadata, first_ms)
    transport.close()
    pipe.send("done")
    process.join(10)


def bench(shape: Shape, token_counts: list[int], rounds: int) -> tuple[list[Row], float]:
    """All cases of one block size, and the milliseconds that the first write of all took."""
    with sender(shape) as meeting:
        transport, pipe = meeting.transport, meeting.pipe
        raw = Raw(meeting.caches, shape.describe(meeting.caches), meeting.metadata)
        raw.write_s([0], [0])
        pipe.recv()
        rows = [_case(shape, tokens, order, rounds, transport, raw, pipe)
                for tokens in token_counts for order in ORDERS]
        raw.close()
    return rows, meeting.first_ms


def _case(shape: Shape, tokens: int, order: str, rounds: int, transport: NixlTransport, raw: Raw,
          pipe: Connection) -> Row:
    count = -(-tokens // shape.block_size)
    numel = 2 * shape.layers * count * shape.block_size * shape.kv_heads * HEAD_SIZE
    source, target = torch.ones(numel), torch.zeros(numel)
    samples: dict[str, list[float]] = {"ours": [], "raw": [], "memcpy": [], "notice": []}
    for number in range(rounds):
        local = block_ids(order, count, shape.num_blocks, 2 * number)
        remote = block_ids(order, count, shape.num_blocks, 2 * number + 1)
        for way in ("ours", "raw") if number % 2 else ("raw", "ours"):
            if way == "ours":
                samples[way].append(ours_s(transport, local, remote))
                ended_s = time.monotonic()
                samples["notice"].append(max(0.0, pipe.recv() - ended_s))
            else:
                samples[way].append(raw.write_s(local, remote))
                pipe.recv()
        samples["memcpy"].append(memcpy_s(source, target))
    ratios = [ours / least for ours, least in zip(samples["ours"], samples["raw"], strict=True)]
    best = {f"{way}_best_ms": round(1e3 * min(samples[way]), 3) for way in ("ours", "raw", "memcpy")}
    medians = {f"{way}_ms": round(1e3 * statistics.median(values), 3) for way, values in samples.items()}
    return Row(shape.block_size, tokens, order, numel * ELEMENT_BYTES, **medians, **best,
               ours_over_raw=round(statistics.median(ratios), 3))


def ends(shape: Shape, wire_s: float, pass_s: float, passes: int, threaded: bool, idle: bool) -> Ends:
    """What becomes of one write per pass, and what its transfers cost beside it. `idle`: passes are slept through."""
    with sender(shape) as meeting:
        pipe = meeting.pipe
        worker = TransferWorker(SlowTransport(meeting.transport, Wire(delay_s=wire_s), 1))
        transfer = EngineTransfer(worker)
        if threaded:
            transfer.start(lambda: None, lambda end: None)
        due, arrived, posts = [], [], []
        began_s, used_s = time.monotonic(), thread_cpu_s()
        while len(arrived) < passes:
            posted_s = time.monotonic()
            if len(due) < passes:
                request = Write(str(len(due)), "receiver", [0], [0], [b"ends"])
                (transfer if threaded else worker).execute([request])
                due.append(time.monotonic() + wire_s)
            if not threaded:
                worker.take_progress()
            posts.append(time.monotonic() - posted_s)
            (time.sleep if idle else compute)(pass_s)
            while pipe.poll():
                arrived.append(pipe.recv())
        open_cpu = (thread_cpu_s() - used_s) / (time.monotonic() - began_s)
        used_s = thread_cpu_s()
        time.sleep(IDLE_S)
        idle_cpu = (thread_cpu_s() - used_s) / IDLE_S
        transfer.close()
    late = [1e3 * (there_s - due_s) for there_s, due_s in zip(arrived, due, strict=True)]
    posts = [1e3 * post_s for post_s in posts]
    way = "step loop" if not threaded else "thread, engine idle" if idle else "thread"
    return Ends(way, round(statistics.median(late), 2), round(max(late), 2),
                round(statistics.median(posts), 2), round(max(posts), 2), round(open_cpu, 4), round(idle_cpu, 4))


def compute(pass_s: float) -> None:
    """Matrix products for so long."""
    matrix, until_s = torch.ones((256, 256)), time.monotonic() + pass_s
    while time.monotonic() < until_s:
        matrix = (matrix @ matrix).clamp(0, 1)


def thread_cpu_s() -> float:
    """What the transfer thread of this process has used, if there is one."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threading.enumerate()
               if thread.name == "vllm-pd-transfer")


def report(rows: list[Row]) -> None:
    print(f"{'':29}| {'median ms':^26} | {'median GB/s':^20} | {'best GB/s':^20} |")
    print(f"{'block':>5} {'tokens':>6} {'order':<9} {'MB':>5} | {'ours':>8} {'raw':>8} {'memcpy':>8}"
          f" | {'ours':>6} {'raw':>6} {'memcpy':>6} | {'ours':>6} {'raw':>6} {'memcpy':>6} | ours/raw  notice ms")
    for row in rows:
        print(f"{row.block_size:>5} {row.tokens:>6} {row.order:<9} {row.bytes / 1e6:>5.0f} |"
              f" {row.ours_ms:>8.2f} {row.raw_ms:>8.2f} {row.memcpy_ms:>8.2f} |"
              f" {row.rate(row.ours_ms):>6.2f} {row.rate(row.raw_ms):>6.2f} {row.rate(row.memcpy_ms):>6.2f} |"
              f" {row.rate(row.ours_best_ms):>6.2f} {row.rate(row.raw_best_ms):>6.2f}"
              f" {row.rate(row.memcpy_best_ms):>6.2f} | {row.ours_over_raw:>8.3f}  {row.notice_ms:>8.2f}")


def report_ends(rows: list[Ends]) -> None:
    print(f"{'polls':<19} {'late ms':>9} {'most':>9} {'post ms':>9} {'most':>9} {'core, open':>11} {'core, idle':>11}")
    for row in rows:
        print(f"{row.way:<19} {row.late_ms:>9.2f} {row.late_most_ms:>9.2f} {row.post_ms:>9.2f} {row.post_most_ms:>9.2f}"
              f" {row.thread_cpu:>11.2%} {row.idle_cpu:>11.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000], help="prompt lengths")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 128], help="tokens per block")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--wire-ms", type=float, help="also: ends of writes beside passes, over a wire as slow as this")
    parser.add_argument("--pass-ms", type=float, default=200.0)
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    first_ms: dict[int, float] = {}
    for block_size in options.block_size:
        blocks = 2 * -(-max(options.tokens) // block_size)
        shape = Shape(options.layers, options.kv_heads, block_size, blocks)
        found, first_ms[block_size] = bench(shape, options.tokens, options.rounds)
        rows += found
    report(rows)
    print("first write to a peer, connection included: " + ", ".join(f"{ms:.1f} ms" for ms in first_ms.values()))
    found_ends: list[Ends] = []
    if options.wire_ms is not None:
        shape = Shape(options.layers, options.kv_heads, options.block_size[0], 8)
        found_ends = [ends(shape, options.wire_ms / 1e3, options.pass_ms / 1e3, options.passes, threaded, idle)
                      for threaded, idle in ((False, False), (True, False), (True, True))]
        report_ends(found_ends)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"first_write_ms": first_ms, "rows": [asdict(row) for row in rows],
                       "ends": [asdict(found) for found in found_ends]}, file, indent=1)


if __name__ == "__main__":
    main()
