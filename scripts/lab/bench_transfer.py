#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What our transport costs over raw NIXL, and NIXL over a memcpy, on the same bytes between two processes.

The caches have SmolLM2-135M's shape in float32 by default: 45 KiB a token. A case is a block size, a prompt length and
an order of block ids. In each round the ways take turns, so that a busy machine hurts all of them:

    ours     NixlTransport.write until its Finished: pairs checked and put in order, indices made, posted, released
    raw      NIXL's make, post, check until done, release, with lists and indices made before the clock starts
    torch    TorchTransport.write until its Finished, over gloo: the receiver has all bytes in its blocks
    memcpy   one contiguous copy of as many bytes inside this process

The notice column is the time from the Finished of `ours` until the other process, which polls every half millisecond,
has it.

With `--wire-ms` it then measures a computing engine with a slow wire: passes of matrix products of `--pass-ms`, each
with a write before it that an emulated wire carries in so long. `late` is the time from the moment at which the wire
has carried a write until the other process has its notice; `post` is what the step loop waits before its pass. The
rows: a step loop that polls between its passes; the transfer thread that engines have; and that thread beside an engine
that sleeps, which shows what the emulated wire, the write and the notice take themselves.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from rich.console import Console

from vllm_pd.bench.outputs import argument_file
from vllm_pd.bench.report import MS, summary, table
from vllm_pd.transfer.engine import EngineTransfer
from vllm_pd.transfer.layout import CacheDescription, describe
from vllm_pd.transfer.nixl.agent import NixlAgent, TransferState
from vllm_pd.transfer.nixl.transport import NixlTransport
from vllm_pd.transfer.plan import descriptor_indices, descriptor_rows, plan
from vllm_pd.transfer.requests import Write
from vllm_pd.transfer.slow import EmulatedWire, SlowTransport
from vllm_pd.transfer.torch.transport import TorchTransport
from vllm_pd.transfer.transport import PeerMetadata
from vllm_pd.transfer.worker import TransferWorker

HEAD_SIZE, ELEMENT_BYTES, POLL_S = 64, 4, 0.0005
IDLE_S = 5.0
CHECK_S = 0.0002  # between two looks at an open transfer: looking all the time takes the core that moves the bytes
ORDERS = ("rising", "falling", "scattered")
WAYS = ("ours", "raw", "torch", "memcpy")
HOST, GRANT = "127.0.0.1", "bench"
DEADLINE_S = 120.0  # of a transfer, and of the other process, which starts first


@dataclass(frozen=True)
class CacheShape:
    """The shape of a KV cache."""
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
    """Our end of two processes that are connected."""
    transport: NixlTransport
    torch: TorchTransport
    pipe: Connection
    caches: list[torch.Tensor]
    metadata: bytes
    first_ms: dict[str, float]


def receive(pipe: Connection, shape: CacheShape) -> None:
    """The other process: sends its metadata, then the time of each notice, until the pipe closes."""
    torch.set_num_threads(1)
    caches = shape.caches()
    transports = (NixlTransport("receiver", caches, shape.describe(caches)),
                  TorchTransport("receiver", caches, shape.describe(caches), HOST))
    transports[1].open_grant(GRANT, list(range(shape.num_blocks)))
    pipe.send([transport.metadata() for transport in transports])
    while not pipe.poll():
        for transport in transports:
            for _ in transport.poll().notices:
                pipe.send(time.monotonic())
        time.sleep(POLL_S)
    for transport in transports:
        transport.close()


class Raw:
    """The fewest calls that NIXL needs for a write, with an agent of its own over the same caches."""

    def __init__(self, caches: list[torch.Tensor], ours: CacheDescription, metadata: bytes) -> None:
        peer = PeerMetadata.decode("receiver", metadata)
        self._agent = NixlAgent("raw", progress_thread=False)
        self._registered = self._agent.register(
            [(cache.data_ptr(), cache.numel() * ELEMENT_BYTES, 0) for cache in caches], ours.memory)
        self._agent.add_peer(peer.agent)
        self._ours, self._theirs = ours, peer.cache
        self._lanes = plan(ours, peer.cache)
        self._local = self._agent.prepare(
            descriptor_rows([lane.ours for lane in self._lanes], ours), ours.memory)
        self._remote = self._agent.prepare(
            descriptor_rows([lane.theirs for lane in self._lanes], peer.cache), ours.memory, "receiver")

    def write_s(self, local: list[int], remote: list[int]) -> float:
        """Writes these local blocks into these remote ones. Seconds until it is done."""
        pairs = sorted(zip(local, remote, strict=True))
        mine = descriptor_indices([a for a, _ in pairs], self._lanes, self._ours)
        other = descriptor_indices([b for _, b in pairs], self._lanes, self._theirs)
        started_s = time.perf_counter()
        complete(self._agent, self._agent.make_write(self._local, mine, self._remote, other, b"raw"))
        return time.perf_counter() - started_s

    def close(self) -> None:
        self._agent.release_prepared(self._local)
        self._agent.release_prepared(self._remote)
        self._agent.deregister(self._registered)


def complete(agent: NixlAgent, handle: int) -> None:
    """Posts a write that was made, waits for its end and releases it. Ends this process where that does not come."""
    state, deadline = agent.post(handle), time.monotonic() + DEADLINE_S
    while state is TransferState.OPEN:
        if time.monotonic() > deadline:
            raise SystemExit(f"the raw NIXL transfer has not ended after {DEADLINE_S:g} s")
        time.sleep(CHECK_S)
        state = agent.check(handle)
    agent.release(handle)
    if state is not TransferState.DONE:
        raise SystemExit("the raw NIXL transfer failed")


def ours_s(transport: NixlTransport | TorchTransport, local: list[int], remote: list[int]) -> float:
    """The same by one of our transports. Seconds until its Finished."""
    started_s, deadline = time.perf_counter(), time.monotonic() + DEADLINE_S
    transport.write("bench", "receiver", local, remote, b"ours", GRANT)
    ended = transport.poll().finished
    while not ended:
        if time.monotonic() > deadline:
            raise SystemExit(f"our transfer has not ended after {DEADLINE_S:g} s")
        time.sleep(CHECK_S)
        ended = transport.poll().finished
    if not ended[0].ok:
        raise SystemExit(f"our transfer failed: {ended[0].error}")
    return time.perf_counter() - started_s


def received(pipe: Connection) -> Any:
    """What the other process sends next. Ends this process where nothing comes."""
    if not pipe.poll(DEADLINE_S):
        raise SystemExit(f"the other process has sent nothing for {DEADLINE_S:g} s")
    return pipe.recv()


def memcpy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of a copy within this process."""
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
def other_process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Inside the `with` block, `target` runs in a process of its own, with its end of a pipe and the arguments. The
    block gets our end. At the end of the block the process gets None, on which it should end."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    yield pipe
    pipe.send(None)
    process.join(30)


@contextlib.contextmanager
def sender(shape: CacheShape) -> Iterator[Meeting]:
    """Our end, after a first write."""
    with other_process(receive, shape) as pipe:
        caches = shape.caches()
        transport = NixlTransport("sender", caches, shape.describe(caches), progress_thread=False)
        by_torch = TorchTransport("sender", caches, shape.describe(caches), HOST, receives=False)
        metadata = received(pipe)
        first_ms = {}
        for name, each, theirs in (("nixl", transport, metadata[0]), ("torch", by_torch, metadata[1])):
            started_s = time.perf_counter()
            each.add_peer("receiver", theirs)
            ours_s(each, [0], [0])
            first_ms[name] = round(MS * (time.perf_counter() - started_s), 1)
            received(pipe)
        yield Meeting(transport, by_torch, pipe, caches, metadata[0], first_ms)
        by_torch.close()
        transport.close()


def bench(shape: CacheShape, token_counts: list[int], rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All cases of one block size, and the milliseconds that the first write of all took, by transport."""
    with sender(shape) as meeting:
        pipe = meeting.pipe
        raw = Raw(meeting.caches, shape.describe(meeting.caches), meeting.metadata)
        raw.write_s([0], [0])
        received(pipe)
        rows = [_case(shape, tokens, order, rounds, meeting, raw)
                for tokens in token_counts for order in ORDERS]
        raw.close()
    return rows, meeting.first_ms


def _case(shape: CacheShape, tokens: int, order: str, rounds: int, meeting: Meeting, raw: Raw) -> dict[str, Any]:
    """One case: medians over the rounds, the best round, which a busy machine spoils least, and the median of the
    rounds' own ratios."""
    count = -(-tokens // shape.block_size)
    numel = 2 * shape.layers * count * shape.block_size * shape.kv_heads * HEAD_SIZE
    source, target = torch.ones(numel), torch.zeros(numel)
    samples: dict[str, list[float]] = {way: [] for way in (*WAYS, "notice", "torch_notice")}
    transports = {"ours": (meeting.transport, "notice"), "torch": (meeting.torch, "torch_notice")}
    for number in range(rounds):
        local = block_ids(order, count, shape.num_blocks, 2 * number)
        remote = block_ids(order, count, shape.num_blocks, 2 * number + 1)
        for way in ("ours", "raw", "torch") if number % 2 else ("torch", "raw", "ours"):
            if way in transports:
                transport, notice = transports[way]
                samples[way].append(ours_s(transport, local, remote))
                ended_s = time.monotonic()
                samples[notice].append(max(0.0, received(meeting.pipe) - ended_s))
            else:
                samples[way].append(raw.write_s(local, remote))
                received(meeting.pipe)
        samples["memcpy"].append(memcpy_s(source, target))
    ratios = {way: round(statistics.median(ours / other for ours, other in zip(samples[way], samples[beside],
                                                                                strict=True)), 3)
              for way, beside in (("ours", "raw"), ("torch", "ours"))}
    best = {f"{way}_best_ms": round(MS * min(samples[way]), 3) for way in WAYS}
    medians = {f"{way}_ms": round(MS * statistics.median(values), 3) for way, values in samples.items()}
    return {"block_size": shape.block_size, "tokens": tokens, "order": order, "bytes": numel * ELEMENT_BYTES, **medians,
            **best, "ours_over_raw": ratios["ours"], "torch_over_ours": ratios["torch"]}


def ends(shape: CacheShape, wire_s: float, pass_s: float, passes: int, threaded: bool, idle: bool) -> dict[str, Any]:
    """One write per pass: how late each ends and what the step loop waits (medians and largest values, in ms), and the
    share of a core that the transfer thread uses while writes are open and while none is. With `idle` the engine sleeps
    in place of a pass."""
    with sender(shape) as meeting:
        pipe = meeting.pipe
        worker = TransferWorker(SlowTransport(meeting.transport, EmulatedWire(delay_s=wire_s), 1))
        transfer = EngineTransfer(worker)
        if threaded:
            transfer.start(lambda: None, lambda end: None)
        due, arrived, posts = [], [], []
        deadline = time.monotonic() + passes * (pass_s + wire_s) + DEADLINE_S
        began_s, used_s = time.monotonic(), thread_cpu_s()
        while len(arrived) < passes:
            posted_s = time.monotonic()
            if posted_s > deadline:
                raise SystemExit(f"only {len(arrived)} of {passes} notices have come")
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
    late = summary((there_s - due_s for there_s, due_s in zip(arrived, due, strict=True)), "p50 max", MS)
    post = summary(posts, "p50 max", MS)
    way = "step loop" if not threaded else "thread, engine idle" if idle else "thread"
    return {"way": way, "late_ms": late["p50"], "late_most_ms": late["max"],
            "post_ms": post["p50"], "post_most_ms": post["max"], "thread_cpu": round(open_cpu, 4),
            "idle_cpu": round(idle_cpu, 4)}


def compute(pass_s: float) -> None:
    """Matrix products for so long."""
    matrix, until_s = torch.ones((256, 256)), time.monotonic() + pass_s
    while time.monotonic() < until_s:
        matrix = (matrix @ matrix).clamp(0, 1)


def thread_cpu_s() -> float:
    """CPU seconds of the transfer thread of this process, 0 if there is none."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threading.enumerate()
               if thread.name == "vllm-pd-transfer")


def report(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each case."""
    keys = [f"{way}{best}_ms" for best in ("", "_best") for way in WAYS]
    columns = ["block x tokens, order", "MB", "ours/raw", "torch\n/ours", "notice\nms",
               *(f"{way}\n{figure}" for figure in ("ms", "GB/s", "best GB/s") for way in WAYS)]
    Console(width=172).print(table(columns, (
        [f"{row['block_size']} x {row['tokens']} {row['order']}", f"{row['bytes'] / 1e6:.0f}",
         f"{row['ours_over_raw']:.3f}", f"{row['torch_over_ours']:.2f}", f"{row['notice_ms']:.2f}",
         *(f"{row[key]:.2f}" for key in keys[:len(WAYS)]),
         *(f"{row['bytes'] / row[key] / 1e6:.2f}" for key in keys)] for row in rows)))


def report_ends(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each way to poll."""
    Console(width=140).print(table(
        ["polls", "late ms", "most", "post ms", "most", "core, open", "core, idle"],
        ([row["way"], *(f"{row[key]:.2f}" for key in ("late_ms", "late_most_ms", "post_ms", "post_most_ms")),
          f"{row['thread_cpu']:.2%}", f"{row['idle_cpu']:.2%}"] for row in rows)))


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
    parser.add_argument("--json", type=argument_file, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    first_ms: dict[int, dict[str, float]] = {}
    for block_size in options.block_size:
        blocks = 2 * -(-max(options.tokens) // block_size)
        shape = CacheShape(options.layers, options.kv_heads, block_size, blocks)
        found, first_ms[block_size] = bench(shape, options.tokens, options.rounds)
        rows += found
    report(rows)
    found_first = [f"{ms} ms ({way})" for found in first_ms.values() for way, ms in found.items()]
    print("first write to a peer, connection included: " + ", ".join(found_first))
    found_ends: list[dict[str, Any]] = []
    if options.wire_ms is not None:
        shape = CacheShape(options.layers, options.kv_heads, options.block_size[0], 8)
        found_ends = [ends(shape, options.wire_ms / 1e3, options.pass_ms / 1e3, options.passes, threaded, idle)
                      for threaded, idle in ((False, False), (True, False), (True, True))]
        report_ends(found_ends)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"first_write_ms": first_ms, "rows": rows, "ends": found_ends}, file, indent=1)


if __name__ == "__main__":
    main()
