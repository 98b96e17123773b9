#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of the router's prefix index, and of the index of ai-dynamo-runtime for comparison.

Both get the same blocks, as engines announce them (conversations that share their beginnings, on several workers), and
the same prompts to match. A block has the same hash on every worker, although V0's hashes differ between processes,
because their index needs that to find the parents of blocks that another worker announced first. The two take turns, so
that a busy machine hurts both, and a figure is the median over the rounds. All figures are per block. Ours runs in the
calling thread, theirs in a thread of its own.

    stored    an event with token ids until the index holds it: hashes computed, and for theirs the JSON that its
    binding
              needs
    applied   the same with all of that prepared: theirs only, because ours takes token ids
    wire      the bytes of a batch as engines send it, decoded, checked and stored: ours only
    looked up a prompt's token ids until the overlaps are known
    matched   the same with the hashes prepared
    removed   one block an event, children first
    memory    the growth of a new process, per 1,000 blocks of one worker, and where all workers hold the same blocks
    windows   a look-up by names where all workers hold all of the prompt and have a group with a sliding window: none
              (no such group), where the window's blocks are at the prompt's end, and where they are nowhere; ours only

Without --theirs FOLDER (made by `pip install --no-deps --target FOLDER ai-dynamo-runtime`) only ours is measured.
"""
from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from vllm_pd.bench.outputs import argument_file
from vllm_pd.events.formats import BatchReader
from vllm_pd.events.messages import BlockStored, EventBatch
from vllm_pd.router.index import PrefixIndex

BLOCK_SIZE = 16
WINDOW_BLOCKS = 8  # of gpt-oss: 128 tokens
MASK = (1 << 63) - 1
GOALS = {"looked up": 50_000, "wire": 100_000}  # blocks a second


@dataclass(frozen=True)
class Event:
    """One event of an engine."""
    worker: int
    hashes: list[int]
    parent: int | None
    token_ids: list[int]


def work(blocks: int, event_blocks: int, prompt_blocks: int, workers: int, seed: int) -> tuple[list[Event], list]:
    """Events of about `blocks` blocks, and the prompts. A prompt begins with a random part of an earlier one."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[]]
    events: list[Event] = []
    known: set[tuple[int, int]] = set()  # worker, engine's hash
    made = 0
    while made < blocks:
        base = rng.choice(prompts[-200:])
        kept = rng.randrange(0, len(base) // BLOCK_SIZE + 1) * BLOCK_SIZE
        prompt = base[:kept] + rng.choices(range(128_000), k=prompt_blocks * BLOCK_SIZE - kept)
        prompts.append(prompt)
        worker = rng.randrange(workers)
        chain = [hash(tuple(prompt[:end])) & MASK for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)]
        first = next((n for n, h in enumerate(chain) if (worker, h) not in known), len(chain))
        for start in range(first, len(chain), event_blocks):
            part = chain[start:start + event_blocks]
            known.update((worker, name) for name in part)
            events.append(Event(worker, part, chain[start - 1] if start else None,
                                prompt[start * BLOCK_SIZE:(start + len(part)) * BLOCK_SIZE]))
            made += len(part)
    return events, prompts[1:]


class Ours:
    """The router's index, as the router uses it."""
    name = "vllm-pd"

    def __init__(self) -> None:
        self.index = PrefixIndex(BLOCK_SIZE)
        self.reader = BatchReader(collections.Counter())

    def stored(self, events: list[Event]) -> None:
        for event in events:
            self.index.stored(f"w{event.worker}", event.hashes, event.parent, event.token_ids, BLOCK_SIZE)

    def wire(self, frames: list[tuple[str, list[bytes]]]) -> None:
        for worker, batch in frames:
            for event in self.reader.read(batch)[1].events:
                self.index.stored(worker, event.block_hashes, event.parent_block_hash, event.token_ids,
                                  event.block_size, event.lora_name)

    def removed(self, events: list[Event]) -> None:
        for event in events:
            for block_hash in event.hashes[::-1]:
                self.index.removed(f"w{event.worker}", (block_hash,))

    def names(self, prompts: list[list[int]]) -> list[list[int]]:
        return [self.index.hashes(prompt) for prompt in prompts]

    def matched(self, names: list[list[int]]) -> list[dict]:
        return [self.index.matches(one) for one in names]

    def looked_up(self, prompts: list[list[int]]) -> list[dict]:
        return [self.index.matches(self.index.hashes(prompt)) for prompt in prompts]


class Theirs:
    """Their index, as a user of its binding has to use it."""
    name = "ai-dynamo-runtime"

    def __init__(self) -> None:
        from dynamo._core import RadixTree, compute_block_hash_for_seq
        self._name = compute_block_hash_for_seq
        self.index = RadixTree()

    def _bytes(self, event: Event) -> bytes:
        names = self._name(event.token_ids, BLOCK_SIZE)
        return msgspec.json.encode({"event_id": 0, "dp_rank": 0, "data": {"stored": {
            "parent_hash": event.parent, "blocks": [{"block_hash": block_hash, "tokens_hash": name}
                                                    for block_hash, name in zip(event.hashes, names, strict=True)]}}})

    def stored(self, events: list[Event]) -> None:
        for event in events:
            self.index.apply_event(event.worker, self._bytes(event))

    def prepared(self, events: list[Event]) -> list[tuple[int, bytes]]:
        return [(event.worker, self._bytes(event)) for event in events]

    def applied(self, prepared: list[tuple[int, bytes]]) -> None:
        for worker, data in prepared:
            self.index.apply_event(worker, data)

    def removed(self, events: list[Event]) -> None:
        for event in events:
            for block_hash in event.hashes[::-1]:
                self.index.apply_event(event.worker, msgspec.json.encode(
                    {"event_id": 0, "dp_rank": 0, "data": {"removed": {"block_hashes": [block_hash]}}}))

    def names(self, prompts: list[list[int]]) -> list[list[int]]:
        return [self._name(prompt, BLOCK_SIZE) for prompt in prompts]

    def matched(self, names: list[list[int]]) -> list[dict]:
        return [self.index.find_matches(one).scores for one in names]

    def looked_up(self, prompts: list[list[int]]) -> list[dict]:
        return [self.index.find_matches(self._name(prompt, BLOCK_SIZE)).scores for prompt in prompts]


def timed(call: Any, *what: Any) -> tuple[float, float, Any]:
    """Calls it. (seconds, CPU seconds of all threads, result)."""
    gc.collect()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = call(*what)
    return time.perf_counter() - begin, time.process_time() - begin_cpu, result


def same(ours: list[dict], theirs: list[dict]) -> int:
    """The number of prompts with the same result from both."""
    return sum({int(worker[1:]): depth for worker, depth in a.items()} == {worker[0]: depth for worker, depth in
               b.items()} for a, b in zip(ours, theirs, strict=True))


def rounds(args: argparse.Namespace, kinds: list[type], event_blocks: int) -> dict[str, Any]:
    """Blocks per second of everything, for each index."""
    rates: dict[str, dict[str, list[tuple[float, float]]]] = {kind.name: {} for kind in kinds}
    agree: list[str] = []
    for number in range(args.rounds):
        events, prompts = work(args.blocks, event_blocks, args.prompt_blocks, args.workers, number)
        blocks = sum(len(event.hashes) for event in events)
        asked = prompts[-args.lookups:]
        asked_blocks = len(asked) * args.prompt_blocks
        evicted = events[-len(events) // 4:][::-1]
        found = {}
        order = kinds if number % 2 == 0 else kinds[::-1]
        for kind in order:
            into = rates[kind.name]
            index = kind()

            def note(what: str, count: int, call: Any, *arguments: Any, into: dict = into) -> Any:
                seconds, cpu_s, result = timed(call, *arguments)
                into.setdefault(what, []).append((count / seconds, count / cpu_s))
                return result

            note("stored", blocks, index.stored, events)
            found[kind.name] = note("looked up", asked_blocks, index.looked_up, asked)
            note("matched", asked_blocks, index.matched, index.names(asked))
            note("removed", sum(len(event.hashes) for event in evicted), index.removed, evicted)
            other = kind()
            if kind is Ours:
                frames = [(f"w{event.worker}", [b"", bytes(8), msgspec.msgpack.encode(EventBatch(0.0, [BlockStored(
                    event.hashes, event.parent, event.token_ids, BLOCK_SIZE)]))]) for event in events]
                note("wire", blocks, other.wire, frames)
            else:
                note("applied", blocks, other.applied, other.prepared(events))
        if len(found) == 2:
            agree.append(f"{same(found[Ours.name], found[Theirs.name])}/{len(asked)}")
    return {"blocks": blocks, "event_blocks": event_blocks, "agree": agree, "blocks_per_s": {
        name: {what: {"median": statistics.median(wall for wall, _ in values), "low": min(values)[0],
                      "high": max(values)[0], "per_cpu_s": statistics.median(cpu for _, cpu in values)}
               for what, values in each.items()} for name, each in rates.items()}}


def windows(args: argparse.Namespace) -> dict[str, float]:
    """Microseconds of CPU for a look-up: the best of the rounds."""
    found = {}
    blocks = args.prompt_blocks
    tokens = list(range(blocks * BLOCK_SIZE))
    names = PrefixIndex(BLOCK_SIZE).hashes(tokens)
    for case in ("none", "at the end", "nowhere"):
        index = PrefixIndex(BLOCK_SIZE)
        for worker in range(args.workers):
            index.stored(f"w{worker}", list(range(1, blocks + 1)), None, tokens, BLOCK_SIZE)
            if case != "none":
                end = range(blocks - WINDOW_BLOCKS, blocks) if case == "at the end" else ()
                index.mark(f"w{worker}", WINDOW_BLOCKS, [block + 1 for block in end])
        assert set(index.matches(names).values()) == (set() if case == "nowhere" else {blocks})
        found[case] = min(timed(lambda index: [index.matches(names) for _ in range(args.lookups)], index)[1]
                          for _ in range(args.rounds)) / args.lookups * 1e6
    return found


def grown(kind: type, blocks: int, workers: int, prompt_blocks: int, shared: bool) -> float:
    """The growth of this process in bytes per 1,000 blocks. To be called in a new process."""
    rng = random.Random(0)
    process = psutil.Process()
    index = kind()
    index.stored([Event(worker, [1], None, list(range(BLOCK_SIZE))) for worker in range(workers)])
    gc.collect()
    before = process.memory_info().rss
    for _ in range(blocks // prompt_blocks):
        token_ids = rng.choices(range(128_000), k=prompt_blocks * BLOCK_SIZE)
        hashes = [rng.getrandbits(63) for _ in range(prompt_blocks)]
        for worker in range(workers) if shared else (0,):
            index.stored([Event(worker, [block_hash + 0 for block_hash in hashes], None, token_ids)])
    index.looked_up([[1] * BLOCK_SIZE])  # after that all events are stored
    gc.collect()
    return (process.memory_info().rss - before) / (blocks / 1000)


def memory(args: argparse.Namespace, kind: type, shared: bool) -> float:
    """What `grown` gives in a new process."""
    command = [sys.executable, __file__, "--grown", kind.name, "--blocks", str(args.memory_blocks), "--workers",
               str(args.workers), "--prompt-blocks", str(args.prompt_blocks), *(["--shared"] if shared else [])]
    if args.theirs:
        command += ["--theirs", str(args.theirs)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--event-blocks", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-blocks", type=int, default=128)
    parser.add_argument("--lookups", type=int, default=500, help="prompts")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-blocks", type=int, default=200_000)
    parser.add_argument("--theirs", type=Path)
    parser.add_argument("--out", type=argument_file)
    parser.add_argument("--grown", help=argparse.SUPPRESS)
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    kinds: list[type] = [Ours]
    if args.theirs:
        sys.path.insert(0, str(args.theirs))
        kinds.append(Theirs)
    if args.grown:
        kind = next(kind for kind in kinds if kind.name == args.grown)
        print(grown(kind, args.blocks, args.workers, args.prompt_blocks, args.shared))
        return
    report: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}", "block_size": BLOCK_SIZE,
        "workers": args.workers, "prompt_blocks": args.prompt_blocks, "rounds": args.rounds, "goals": GOALS,
        "versions": {kind.name: version(kind, args.theirs) for kind in kinds},
        "windows_us": windows(args),
        "speed": [rounds(args, kinds, event_blocks) for event_blocks in args.event_blocks],
        "bytes_per_1000_blocks": {kind.name: {"one worker": memory(args, kind, False),
                                              f"each on all {args.workers}": memory(args, kind, True)}
                                  for kind in kinds}}
    for part in report["speed"]:
        rates = part["blocks_per_s"][Ours.name]
        part["goal_core_share"] = sum(goal / rates[what]["per_cpu_s"] for what, goal in GOALS.items())
        print(f"events of {part['event_blocks']} blocks; thousand blocks a second, median (low-high), and a second of "
              f"CPU on all threads; agree {part['agree']}")
        for name, each in part["blocks_per_s"].items():
            print(f"  {name:18}", "; ".join(
                f"{what} {v['median'] / 1e3:.0f} ({v['low'] / 1e3:.0f}-{v['high'] / 1e3:.0f}) "
                f"{v['per_cpu_s'] / 1e3:.0f}"
                for what, v in each.items()))
        print(f"  {GOALS['wire']:,} event blocks and {GOALS['looked up']:,} look-ups a second take "
              f"{part['goal_core_share']:.0%} of a core")
    print("  look-up with windows:", *(f"{case}: {us:.0f} us  " for case, us in report["windows_us"].items()))
    for name, each in report["bytes_per_1000_blocks"].items():
        print(f"  {name:18}", *(f"{what}: {size / 1000:.0f} kB per 1,000 blocks  " for what, size in each.items()))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def version(kind: type, folder: Path | None) -> str:
    """Of theirs, by its metadata."""
    from importlib.metadata import distributions
    if kind is Ours or folder is None:
        return "this"
    return next((d.version for d in distributions(path=[str(folder)]) if d.name == kind.name), "unknown")


if __name__ == "__main__":
    main()
