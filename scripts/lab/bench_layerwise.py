#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""When should the KV of a prompt leave: after the prompt, after each chunk, or after each layer of each chunk?

    VLLM_PD_ENGINE=v1 . scripts/env.sh
    python scripts/lab/bench_layerwise.py $VLLM_PD_MODEL --json layers.json

Two processes, a core each, over NIXL, with a real model's forward passes (by transformers, float32) in place of
vLLM's, so that nothing differs between the ways but the writes. One prefills a prompt in chunks. The other one decodes
some chats all the time. In each round the ways take turns:

    none     the prompt is computed, and nothing is sent: what the others are compared with
    whole    one write when the prompt is computed
    chunks   a write after each chunk, as `push_chunks` does
    layers   a write after each layer's attention in each chunk, where vLLM V1 calls `save_kv_layer`

A thread makes and posts the writes, one after the other; the last one carries the notice. With `--wire-gb-per-s` an
emulated wire carries each of them first. `left` is the time from the end of the last forward pass until the decoding
process has the notice; `prefill` is the time of all forward passes. The inter-token latency is that of the decoding
process from the first forward pass to the notice. The received bytes are compared after each prompt.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from bench_transfer import complete, other_process
from rich.console import Console
from transformers import AutoModel, DynamicCache

from vllm_pd.bench.outputs import argument_file
from vllm_pd.bench.report import MS, summary, table
from vllm_pd.transfer.layout import CacheDescription, describe_views, regions
from vllm_pd.transfer.nixl.agent import NixlAgent
from vllm_pd.transfer.plan import descriptor_rows, plan
from vllm_pd.transfer.transport import PeerMetadata

WAYS = ("none", "whole", "chunks", "layers")
SENDER, RECEIVER = "sender", "receiver"
POLL_S, DEADLINE_S = 0.0005, 600.0


class PushLoad(NamedTuple):
    """One prompt of `tokens`, in chunks, beside `chats` answers behind `context` tokens each."""
    model: str
    tokens: int
    chunk: int
    block_size: int
    chats: int
    context: int
    wire_bytes_per_s: float

    @property
    def blocks(self) -> int:
        return self.tokens // self.block_size


class Model:
    """The model on one core, and a KV cache of blocks as V1 has them on the CPU: [blocks, heads, tokens, K and V]."""

    def __init__(self, load: PushLoad, core: int) -> None:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        self.load = load
        self.body = AutoModel.from_pretrained(load.model, dtype=torch.float32).eval()
        config = self.body.config
        self.layers, heads = config.num_hidden_layers, config.num_key_value_heads
        size = config.hidden_size // config.num_attention_heads
        self.views = [torch.zeros((load.blocks, heads, load.block_size, 2 * size)) for _ in range(self.layers)]
        self.description = describe_views(self.views, num_blocks=load.blocks, block_size=load.block_size)

    def store(self, layer: int, cache: DynamicCache, start: int, end: int) -> None:
        """Copies the keys and values of these tokens into the blocks of the layer."""
        part, size = cache.layers[layer], self.load.block_size
        both = torch.cat((part.keys[0, :, start:end], part.values[0, :, start:end]), dim=-1)
        blocks = both.view(both.shape[0], -1, size, both.shape[-1])
        self.views[layer][start // size:end // size] = blocks.transpose(0, 1)

    def checksum(self) -> int:
        """Of all blocks."""
        value = 0
        for view in self.views:
            value = zlib.crc32(view.numpy(), value)
        return value


def decode(pipe: Connection, load: PushLoad, core: int) -> None:
    """The decoding process. Sends its metadata; then, for each `("end", monotonic time of the start)`, the durations of
    the steps since then, the time of the notice and the checksum; ends when the pipe closes."""
    model = Model(load, core)
    agent = NixlAgent(RECEIVER, progress_thread=True)
    agent.register([(address, size, 0) for address, size in regions(model.views)], model.description.memory)
    notices: queue.Queue[float] = queue.Queue()
    threading.Thread(target=watch, args=(agent, notices), daemon=True).start()
    with torch.inference_mode():
        prompt = torch.randint(0, model.body.config.vocab_size, (load.chats, load.context))
        cache = DynamicCache()
        model.body(prompt, past_key_values=cache)
        pipe.send(PeerMetadata(RECEIVER, agent.metadata(), model.description).encode())
        steps: list[tuple[float, float]] = []
        while True:
            started_s = time.monotonic()
            model.body(prompt[:, :1], past_key_values=cache)
            cache.crop(-1)
            steps.append((started_s, time.monotonic()))
            if not pipe.poll():
                continue
            order = pipe.recv()
            if order is None:
                return
            since_s, until_s = order
            notice_s = notices.get(timeout=DEADLINE_S) if until_s is None else None
            last_s = until_s or notice_s
            checksum = model.checksum()
            for view in model.views:
                view.zero_()
            pipe.send(([end - start for start, end in steps if start >= since_s and end <= last_s], notice_s, checksum))
            steps.clear()


def watch(agent: NixlAgent, notices: queue.Queue[float]) -> None:
    """Puts the time of each notice into the queue."""
    while True:
        for _ in agent.take_notices().get(SENDER, []):
            notices.put(time.monotonic())
        time.sleep(POLL_S)


class LayerSender:
    """Writes blocks of some layers to the decoding process, in a thread, one write after the other."""

    def __init__(self, model: Model, metadata: bytes) -> None:
        peer = PeerMetadata.decode(RECEIVER, metadata)
        ours, theirs = model.description, peer.cache
        self._agent = NixlAgent(SENDER, progress_thread=False)
        self._agent.register([(address, size, 0) for address, size in regions(model.views)], ours.memory)
        self._agent.add_peer(peer.agent)
        lanes = plan(ours, theirs)
        if len(lanes) != model.layers:
            raise SystemExit(f"{len(lanes)} lanes for {model.layers} layers: their memory is adjacent by chance")
        self._ours: CacheDescription = ours
        mine = descriptor_rows([lane.ours for lane in lanes], ours)
        other = descriptor_rows([lane.theirs for lane in lanes], theirs)
        self._lists = (self._agent.prepare(mine, ours.memory), self._agent.prepare(other, theirs.memory, RECEIVER))
        self._wire = model.load.wire_bytes_per_s
        self._queue: queue.Queue[tuple[range, range, bytes]] = queue.Queue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, layers: range, blocks: range, last: bool = False) -> None:
        """Queues a write. The last one of a prompt carries the notice."""
        if self._error is not None:
            raise SystemExit(f"the sender has failed: {self._error}")
        self._queue.put((layers, blocks, b"last" if last else b""))

    def _run(self) -> None:
        try:
            while True:
                self._write(*self._queue.get())
        except BaseException as error:  # the main thread raises it
            self._error = error

    def _write(self, layers: range, blocks: range, notice: bytes) -> None:
        first = torch.tensor(layers)[:, None] * self._ours.num_blocks
        indices = (first + torch.tensor(blocks)).ravel().to(torch.int32).numpy()
        if self._wire:
            time.sleep(len(indices) * self._ours.block_bytes / self._wire)
        complete(self._agent, self._agent.make_write(self._lists[0], indices, self._lists[1], indices, notice))


class ComputedPrompts:
    """The prefilling process: computes prompts and has their KV sent."""

    def __init__(self, model: Model, sender: LayerSender) -> None:
        self._model, self._sender = model, sender
        self._after_layer: Callable[[int], None] = lambda layer: None
        for number, layer in enumerate(model.body.layers):
            layer.self_attn.register_forward_hook(lambda *_, number=number: self._after_layer(number))

    def run(self, way: str, seed: int) -> tuple[float, float]:
        """Computes a prompt. Returns the time of its start and of the end of the last forward pass (monotonic)."""
        load, body = self._model.load, self._model.body
        torch.manual_seed(seed)
        prompt, cache = torch.randint(0, body.config.vocab_size, (1, load.tokens)), DynamicCache()
        every = range(self._model.layers)
        started_s = time.monotonic()
        for start in range(0, load.tokens, load.chunk):
            end = min(start + load.chunk, load.tokens)
            blocks = range(start // load.block_size, end // load.block_size)
            final = end == load.tokens

            def after_layer(layer: int, start: int = start, end: int = end, blocks: range = blocks,
                            final: bool = final) -> None:
                self._model.store(layer, cache, start, end)
                if way == "layers":
                    self._sender.send(range(layer, layer + 1), blocks, final and layer == every[-1])

            self._after_layer = after_layer
            body(prompt[:, start:end], past_key_values=cache)
            if way == "chunks":
                self._sender.send(every, blocks, final)
        ended_s = time.monotonic()
        if way == "whole":
            self._sender.send(every, range(load.blocks), True)
        return started_s, ended_s


@contextlib.contextmanager
def fleet(load: PushLoad, cores: list[int]) -> Iterator[tuple[ComputedPrompts, Model, Connection]]:
    """Both processes; this one prefills."""
    with other_process(decode, load, cores[1]) as pipe:
        model = Model(load, cores[0])
        if not pipe.poll(DEADLINE_S):
            raise SystemExit("the decoding process has not started")
        yield ComputedPrompts(model, LayerSender(model, pipe.recv())), model, pipe


def measure(load: PushLoad, cores: list[int], rounds: int) -> dict[str, Any]:
    """All ways in turns; medians over the rounds."""
    found: dict[str, dict[str, list[float]]] = {way: {"prefill": [], "left": [], "itl": []} for way in WAYS}
    with torch.inference_mode(), fleet(load, cores) as (prefill, model, pipe):
        for number in range(-1, rounds):  # the first round warms up
            for way in WAYS if number % 2 else WAYS[::-1]:
                started_s, ended_s = prefill.run(way, number)
                pipe.send((started_s, ended_s if way == "none" else None))
                if not pipe.poll(DEADLINE_S):
                    raise SystemExit(f"{way}: no answer of the decoding process")
                steps, notice_s, checksum = pipe.recv()
                if way != "none" and checksum != model.checksum():
                    raise SystemExit(f"{way}: the received KV differs from what was computed")
                if number < 0:
                    continue
                found[way]["prefill"].append(ended_s - started_s)
                found[way]["itl"] += steps
                if notice_s is not None:
                    found[way]["left"].append(notice_s - ended_s)
        kv_bytes = load.tokens * model.layers * model.description.block_bytes // load.block_size
    rows = {way: {"left_ms": summary(values["left"], "p50 max", MS),
                  "prefill_ms": summary(values["prefill"], "p50 min max", MS),
                  "prefill_over_none": round(statistics.median(
                      ours / none for ours, none in zip(values["prefill"], found["none"]["prefill"], strict=True)), 4),
                  "itl_ms": summary(values["itl"], "p50 p90 p99 max", MS)} for way, values in found.items()}
    return {**load._asdict(), "model": os.path.basename(load.model.rstrip("/")), "rounds": rounds,
            "kv_bytes": kv_bytes, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", help="folder or name of a model with Llama's module names")
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt; a multiple of --chunk-tokens")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="a multiple of --block-size")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--context", type=int, default=300, help="tokens before each chat's answer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--wire-gb-per-s", type=float, nargs="+", default=[0.0], help="0: no emulated wire")
    parser.add_argument("--json", type=argument_file, metavar="FILE")
    args = parser.parse_args()
    if args.tokens % args.chunk_tokens or args.chunk_tokens % args.block_size:
        parser.error(f"--tokens {args.tokens} must be a multiple of --chunk-tokens {args.chunk_tokens}, and that of "
                     f"--block-size {args.block_size}")
    results = []
    for wire in args.wire_gb_per_s:
        load = PushLoad(args.model, args.tokens, args.chunk_tokens, args.block_size, args.chats, args.context,
                        wire * 1e9)
        results.append(measure(load, args.cores, args.rounds))
        Console(width=110).print(table(
            ["way", "left ms", "most", "prefill ms", "/ none", "ITL p50", "p90", "p99"],
            ([way, *(f"{row['left_ms'].get(figure, 0):.1f}" for figure in ("p50", "max")),
              f"{row['prefill_ms']['p50']:.0f}", f"{row['prefill_over_none']:.3f}",
              *(f"{row['itl_ms'][figure]:.1f}" for figure in ("p50", "p90", "p99"))]
             for way, row in results[-1]["ways"].items()),
            title=f"{args.tokens} tokens, {results[-1]['kv_bytes'] / 1e6:.0f} MB of KV, "
                  + (f"a wire of {wire:g} GB/s" if wire else "shared memory")))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
