#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs to write between token-major (NHD) caches whose ranks have other heads, between two processes.

One rank of P writes the heads that it shares with one rank of D, by our transport. In each round these ways take turns:

    whole    as many bytes between two ranks with equal heads: whole blocks. What the others are compared with
    tokens   a descriptor for each token: what our transport does. Nothing is left to do at D
    gather   P copies the heads into a staging cache with D's heads, which is then written in whole blocks. Only where
             D's rank has no heads that P's has not
    scatter  whole blocks of P go into a staging cache at D, and D copies them into its own; until that is done. Only
             where P's rank has no heads that D's has not

Keys and values are apart, as V0 has them, in heads of 64. The time of `scatter` includes the way of the notice to D.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from bench_transfer import DEADLINE_S, other_process, received
from rich.console import Console

from vllm_pd.bench.outputs import argument_file
from vllm_pd.bench.report import MS, table
from vllm_pd.transfer.layout import describe
from vllm_pd.transfer.nixl.transport import NixlTransport

HEAD_SIZE, POLL_S, CHECK_S = 64, 0.0005, 0.0002
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPLITS = {"1 to 2": (1, 2), "2 to 1": (2, 1), "2 to 4": (2, 4)}
WAYS = ("whole", "tokens", "gather", "scatter")


class Case(NamedTuple):
    """One shape. `kv_heads` are the model's; rank 0 of `p_ranks` writes into rank 0 of `d_ranks`."""
    kv_heads: int
    p_ranks: int
    d_ranks: int
    block_size: int
    dtype: str
    layers: int
    blocks: int

    @property
    def p_heads(self) -> int:
        return self.kv_heads // self.p_ranks

    @property
    def d_heads(self) -> int:
        return self.kv_heads // self.d_ranks

    @property
    def shared(self) -> int:
        return min(self.p_heads, self.d_heads)

    @property
    def ways(self) -> list[str]:
        return ["whole", "tokens", "gather" if self.p_heads > self.d_heads else "scatter"]


class Cache:
    """A token-major cache of some heads, and its transport."""

    def __init__(self, name: str, case: Case, heads: int, receives: bool) -> None:
        shape = (2, 2 * case.blocks, case.block_size, heads, HEAD_SIZE)
        self.layers = [torch.ones(shape, dtype=DTYPES[case.dtype]) for _ in range(case.layers)]
        description = describe(self.layers, num_blocks=2 * case.blocks, block_size=case.block_size, kv_heads=heads,
                               head_size=HEAD_SIZE, platform="cpu", backend="FLASH_ATTN")
        self.transport = NixlTransport(name, self.layers, description, progress_thread=receives)

    def copy_heads(self, mine: torch.Tensor, other: Cache, theirs: torch.Tensor, heads: int) -> None:
        """The first heads of blocks `mine`, from blocks `theirs` of another cache."""
        for layer, source in zip(self.layers, other.layers, strict=True):
            for part in range(2):
                layer[part, mine, :, :heads] = source[part, theirs, :, :heads]


def receive(pipe: Connection, case: Case) -> None:
    """D: its cache, and a staging cache of P's heads. For each notice: scatters if it is meant to, and answers."""
    torch.set_num_threads(1)
    cache = Cache("d", case, case.d_heads, True)
    staging = Cache("d-staging", case, case.shared, True)
    pipe.send((cache.transport.metadata(), staging.transport.metadata()))
    while not pipe.poll():
        for each in (cache, staging):
            for notice in each.transport.poll().notices:
                if notice.payload.startswith(b"scatter"):
                    local, remote = (torch.tensor(ids) for ids in json.loads(notice.payload[7:]))
                    cache.copy_heads(local, staging, remote, case.shared)
                pipe.send(time.monotonic())
        time.sleep(POLL_S)
    cache.transport.close()
    staging.transport.close()


class Sender:
    """P: its cache, and a staging cache of D's heads."""

    def __init__(self, case: Case, pipe: Connection) -> None:
        self.case, self.pipe = case, pipe
        self.cache, self.staging = (Cache(name, case, heads, False)
                                    for name, heads in (("p", case.p_heads), ("p-staging", case.shared)))
        d, d_staging = received(self.pipe)
        self.cache.transport.add_peer("d", d)
        self.staging.transport.add_peer("d-staging", d_staging)
        if case.d_heads == case.shared:
            self.staging.transport.add_peer("d", d)
        if case.p_heads == case.shared:
            self.cache.transport.add_peer("d-staging", d_staging)

    def run(self, way: str, local: list[int], remote: list[int]) -> float:
        """Seconds until the write has ended, or until D has scattered."""
        packed = list(range(len(local)))
        started_s = time.monotonic()
        if way == "gather":
            self.staging.copy_heads(torch.tensor(packed), self.cache, torch.tensor(local), self.case.shared)
            self._write(self.staging, "d", packed, remote, b"gather")
        elif way == "scatter":
            self._write(self.cache, "d-staging", local, packed, b"scatter" + json.dumps([remote, packed]).encode())
        elif way == "tokens":
            self._write(self.cache, "d", local, remote, b"tokens")
        else:
            self._write(self.staging, "d-staging", local, remote, b"whole")
        ended_s = time.monotonic()
        scattered_s = received(self.pipe)
        return (scattered_s if way == "scatter" else ended_s) - started_s

    def _write(self, cache: Cache, peer: str, local: list[int], remote: list[int], notice: bytes) -> None:
        cache.transport.write("bench", peer, local, remote, notice)
        deadline = time.monotonic() + DEADLINE_S
        while not (ended := cache.transport.poll().finished):
            if time.monotonic() > deadline:
                raise SystemExit(f"a write has not ended after {DEADLINE_S:g} s")
            time.sleep(CHECK_S)
        if not ended[0].ok:
            raise SystemExit(f"a write failed: {ended[0].error}")

    def close(self) -> None:
        self.cache.transport.close()
        self.staging.transport.close()


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Medians and best rounds of the ways of one case, in ms."""
    samples: dict[str, list[float]] = {way: [] for way in case.ways}
    with other_process(receive, case) as pipe, contextlib.closing(Sender(case, pipe)) as sender:
        for number in range(rounds + 1):
            ids = random.Random(number)
            local, remote = (ids.sample(range(2 * case.blocks), case.blocks) for _ in range(2))
            for way in case.ways if number % 2 else reversed(case.ways):
                took_s = sender.run(way, local, remote)
                if number:  # the first round connects
                    samples[way].append(took_s)
    element = DTYPES[case.dtype].itemsize
    nbytes = 2 * case.layers * case.blocks * case.block_size * case.shared * HEAD_SIZE * element
    return {**case._asdict(), "bytes": nbytes, "run_bytes": case.shared * HEAD_SIZE * element,
            **{f"{way}_ms": round(MS * statistics.median(taken), 2) for way, taken in samples.items()},
            **{f"{way}_best_ms": round(MS * min(taken), 2) for way, taken in samples.items()}}


def report(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each case."""
    columns = ["heads", "TP", "block", "dtype", "MB", "run\nbytes", *(f"{way}\nms" for way in WAYS),
               *(f"{way}\nbest" for way in WAYS), "tokens\n/ whole"]
    Console(width=150).print(table(columns, (
        [str(row["kv_heads"]), f"{row['p_ranks']} to {row['d_ranks']}", str(row["block_size"]), row["dtype"],
         f"{row['bytes'] / 1e6:.1f}", str(row["run_bytes"]),
         *(f"{row[f'{way}{best}_ms']:.1f}" if f"{way}_ms" in row else "" for best in ("", "_best") for way in WAYS),
         f"{row['tokens_ms'] / row['whole_ms']:.1f}"] for row in rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=1024, help="length of a prompt")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2, 4, 8], help="of the model")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--split", nargs="+", choices=SPLITS, default=list(SPLITS), help="TP of P to TP of D")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=argument_file, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [Case(heads, *SPLITS[split], block_size, dtype, options.layers, -(-options.tokens // block_size))
             for split in options.split for heads in options.kv_heads for block_size in options.block_size
             for dtype in options.dtype if heads >= max(SPLITS[split])]
    rows = [measure(case, options.rounds) for case in cases]
    report(rows)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
