# SPDX-License-Identifier: Apache-2.0
"""The other process of the transports' tests: a rank with a patterned cache that does what its pipe says.

It is forked from a process that has imported torch, which takes longer than most tests, and nothing of NIXL.
"""
from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import torch

from vllm_pd.transfer.layout import WholeRegion, describe
from vllm_pd.transfer.nixl.generations import NixlGenerations
from vllm_pd.transfer.torch.link import LinkLimits
from vllm_pd.transfer.torch.transport import TorchTransport
from vllm_pd.transfer.worker import TransferWorker

BLOCK_SIZE, KV_HEADS, HEAD_SIZE = 16, 3, 64
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch"])
torch.set_num_threads(1)  # two processes that both spin on every core take turns instead of working


class Rank:
    """A worker's cache, with a number of its own in every element, and its transport."""

    def __init__(self, name: str, *, blocks: int = 40, layers: int = 4, dtype=torch.int32, layout="IPEX", start=0,
                 progress_thread: bool = True, heads: range = range(KV_HEADS), transport="nixl", stall_s: float = 10.0,
                 granted: bool = True, host: str = "127.0.0.1", index: int = 0):
        shape, backend = (2, blocks, BLOCK_SIZE * len(heads) * HEAD_SIZE), "IPEX"
        if layout in ("NHD", "HND"):
            shape = (2, blocks, BLOCK_SIZE, len(heads), HEAD_SIZE)
            backend = "FLASH_ATTN"
        if layout == "HND":
            shape = (2, blocks, len(heads), BLOCK_SIZE, HEAD_SIZE)
        count = torch.Size(shape).numel()
        repeat = 251 if dtype is torch.uint8 else 1 << 62  # at no distance at which tokens, heads or blocks lie
        self.memory = [((torch.arange(count) + start + i * count) % repeat).to(dtype).reshape(shape)
                       for i in range(layers)]
        caches = [layer.permute(0, 1, 3, 2, 4) for layer in self.memory] if layout == "HND" else self.memory
        self.name = name
        self.cache = describe(caches, num_blocks=blocks, block_size=BLOCK_SIZE, kv_heads=len(heads),
                              head_size=HEAD_SIZE, platform="cpu", backend=backend, first_head=heads.start)
        self.index = torch.zeros(0)  # [layers, blocks, bytes]; the last 8 bytes are no block's
        if index:
            self.index = ((torch.arange(2 * blocks * (index + 8)) + start) % 253).to(torch.uint8).view(2, blocks, -1)
            self.cache = msgspec.structs.replace(self.cache, whole=tuple(
                WholeRegion(layer, each.data_ptr(), index, index + 8)
                for layer, each in zip((0, 2), self.index, strict=True)))
            caches = [*caches, self.index]
        if transport == "nixl":
            self.transport = NixlGenerations(name, caches, self.cache, progress_thread, host)
        else:
            self.transport = TorchTransport(name, caches, self.cache, host,
                                            limits=LinkLimits(stall_s=stall_s, grant_s=0.2))
            if granted:  # to a write that names no grant
                self.transport.open_grant("", list(range(blocks)))
        self.worker = TransferWorker(self.transport)

    def blocks(self, ids: list[int]) -> torch.Tensor:
        return torch.stack([layer[:, ids] for layer in self.memory])


def serve(pipe: Connection, name: str, options: dict) -> None:
    """Answer commands until the pipe closes or says so. `environ` of the options are variables for UCX."""
    os.environ.update(options.pop("environ", {}))
    rank = Rank(name, **options)
    pipe.send(rank.transport.metadata())
    while True:
        command, *arguments = pipe.recv()
        if command == "poll":
            pipe.send(_poll(rank, *arguments))
        elif command == "memory":
            pipe.send(torch.stack(rank.memory).numpy())
        elif command == "index":
            pipe.send(rank.index.numpy())
        elif command == "open":
            rank.transport.open_grant(*arguments)
            pipe.send(None)
        elif command == "close":
            pipe.send(rank.transport.close_grant(*arguments))
        elif command == "write":
            _write(rank, pipe, *arguments)
        elif command == "renew":
            pipe.send(rank.transport.renew(*arguments))
        elif command == "retire":
            rank.transport.retire(*arguments)
            pipe.send(rank.transport.poll().finished)
        elif command == "fill":
            for layer in rank.memory:
                layer.fill_(*arguments)
            pipe.send(None)
        elif command == "verify":
            pipe.send(_verify(rank, *arguments))
        elif command == "quit":
            rank.worker.close()
            pipe.send(rank.worker.live_handles())
            return


def _poll(rank: Rank, count: int, timeout_s: float) -> list:
    """Poll until `count` notices have come or the time is over."""
    notices = []
    deadline_s = time.monotonic() + timeout_s
    while len(notices) < count and time.monotonic() < deadline_s:
        notices += [(notice.peer, notice.payload) for notice in rank.worker.take_progress().notices]
        time.sleep(0.0005)
    return notices


def _write(rank: Rank, pipe: Connection, peer: str, metadata: bytes, ids: list[int], grant: str) -> None:
    """Write these blocks again and again until a write fails or a command comes. Then answer how many there were."""
    rank.transport.add_peer(peer, metadata)
    pipe.send(None)
    ok, number = True, 0
    while ok and not pipe.poll():
        number += 1
        rank.transport.write("k", peer, ids, ids, b"%d" % number, grant)
        while not (ended := rank.transport.poll().finished):
            time.sleep(0.0002)
        ok = ended[0].ok
    pipe.send((number, ended[0].error))


def _verify(rank: Rank, ids: list[int], value: int) -> bool:
    """Whether the blocks all hold `value` the moment the next notice is seen."""
    while not rank.transport.poll().notices:
        time.sleep(0)
    return bool((rank.blocks(ids) == value).all())


class Receiver:
    """Handle on a process that runs `serve`."""

    def __init__(self, name: str, **options):
        self.name = name
        self.pipe, theirs = _FORKS.Pipe()
        self.process = _FORKS.Process(target=serve, args=(theirs, name, options))
        self.process.start()
        theirs.close()
        self.metadata = self.answer()

    def ask(self, *command):
        self.tell(*command)
        return self.answer()

    def tell(self, *command) -> None:
        self.pipe.send(command)

    def answer(self):
        assert self.pipe.poll(200), "the other process does not answer"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(60)


@contextmanager
def receiver(name: str, **options):
    """A receiver that is gone afterwards, whatever happens."""
    peer = Receiver(name, **options)
    try:
        yield peer
    finally:
        peer.kill()

