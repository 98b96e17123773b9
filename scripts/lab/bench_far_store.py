#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The store beyond one host: how long a prompt waits for nothing, and at which rate blocks come.

Two processes of this machine, each with an arena and a `FarStore`. The reader asks first for blocks that nobody has,
then for prompts of `--blocks` blocks of each size. A rate is of bytes that are checked and in the arena, over the time
from the question to the end of the fetch. `tcp` lets UCX use nothing but the loopback.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vllm_pd.bench.outputs import argument_file
from vllm_pd.rpc.ports import take_free
from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.arena import PAGE, BlockArena
from vllm_pd.store.beyond.far import FarStore
from vllm_pd.store.beyond.waits import WaitAnswer
from vllm_pd.store.blocks import HEADER_BYTES, BlockKey

MODEL = b"m" * 16
ROUNDS, MISSES = 5, 100


def name_of(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(32, "little")


def open_store(folder: Path, block_bytes: int, slots: int, **far: object) -> tuple[BlockArena, FarStore]:
    gib = (slots * (HEADER_BYTES + block_bytes + PAGE) + 2 * PAGE) / 2**30
    settings = StoreSettings.parse({"folder": str(folder), "memory_gib": gib, **far})
    arena = BlockArena(folder, block_bytes, settings.memory_bytes)
    return arena, FarStore(settings, arena, [MODEL])


def serve(folder: str, url: str, block_bytes: int, blocks: int) -> None:
    """The other host: it ends with its input."""
    arena, far = open_store(Path(folder), block_bytes, 3 * blocks, listen=url)
    block = np.random.default_rng(1).integers(0, 256, block_bytes, np.uint8)
    for number in range(blocks):
        arena.put(BlockKey(MODEL, name_of(number)), [block])
    print("ready", flush=True)
    sys.stdin.read()
    far.close()


def wait_for(far: FarStore, request: str, names: list[bytes]) -> float:
    """The seconds of a fetch."""
    begin = time.perf_counter()
    while far.ask(request, lambda: names) is WaitAnswer.WAIT:
        time.sleep(0.0002)
    far.end_request(request)
    return time.perf_counter() - begin


def measure(block_bytes: int, blocks: int, transports: str) -> dict[str, object]:
    """One size, one way."""
    root = Path(tempfile.mkdtemp(prefix="vllm-pd-bench-", dir="/dev/shm"))
    url = f"tcp://127.0.0.1:{take_free('127.0.0.1')}"
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(root / "server"), url, str(block_bytes),
                               str(blocks)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "ready\n"
        rates, misses = [], []
        for number in range(ROUNDS):
            arena, far = open_store(root / f"reader{number}", block_bytes, 3 * blocks, hosts=url, wait_s=30)
            time.sleep(0.5)  # until it is connected
            misses += [wait_for(far, f"miss{one}", [name_of(10**6 + one)]) for one in range(MISSES)]
            wait_for(far, "first", [name_of(0)])  # the two agents meet
            took_s = wait_for(far, "prompt", [name_of(one) for one in range(1, blocks)])
            assert arena.blocks() == blocks
            rates.append((blocks - 1) * block_bytes / took_s / 1e9)
            far.close()
            arena.close()
            shutil.rmtree(root / f"reader{number}")
    finally:
        server.stdin.close()
        server.wait(60)
        shutil.rmtree(root)
    return {"block_bytes": block_bytes, "way": transports or "any", "gb_per_s": round(statistics.median(rates), 2),
            "miss_ms": round(1e3 * statistics.median(misses), 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=48, help="of a prompt (48)")
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[1 << 18, 1 << 21, 6 << 20])
    parser.add_argument("--output", type=argument_file, metavar="FILE", help="write JSON there")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        folder, url, block_bytes, blocks = options.serve
        serve(folder, url, int(block_bytes), int(blocks))
        return
    found = []
    for transports in ("", "tcp"):
        os.environ.update({"UCX_TLS": transports} if transports else {})
        for block_bytes in options.block_bytes:
            found.append(measure(block_bytes, options.blocks, transports))
            print(found[-1], flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
