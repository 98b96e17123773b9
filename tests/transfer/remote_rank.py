# SPDX-License-Identifier: Apache-2.0
"""Ranks of V1 engines in processes of their own, with a patterned cache and a real transport, and the engines' ends.

A rank's process is forked from one that has imported torch, and nothing of NIXL. Its main thread does what a pipe says.
"""
from __future__ import annotations

import multiprocessing
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec
import torch

from vllm_pd.transfer.device import HostDevice
from vllm_pd.transfer.engine import RemoteEngineTransfer
from vllm_pd.transfer.layout import describe_views
from vllm_pd.transfer.nixl.generations import NixlGenerations
from vllm_pd.transfer.plan import head_range
from vllm_pd.transfer.ranks.gather import RankTransfers
from vllm_pd.transfer.ranks.process import AttachRank, RankServer, connect_ranks
from vllm_pd.transfer.ranks.split import layer_range
from vllm_pd.transfer.ranks.transport import RankedTransport
from vllm_pd.transfer.requests import AddTransferPeer, TransferProgress
from vllm_pd.transfer.steps import ComputedSteps, StepOrderedTransfer
from vllm_pd.transfer.transport import RanksMetadata, rank_name
from vllm_pd.transfer.whole import regions_beside
from vllm_pd.transfer.worker import TransferWorker

WAIT_S = 200.0
LAYERS, BLOCKS, TOKENS = 3, 12, 8
NO_INDEX, GAP = 1, 24  # a layer; bytes after each block of an index
AXES = "LBHNC"
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch"])
torch.set_num_threads(1)


@dataclass(frozen=True)
class Heads:
    """Of a model: how many KV heads it has, and what is stored of one for a token. `index`: how many bytes layers have
    beside their KV for each token, all but the layer NO_INDEX."""
    count: int = 4
    content: int = 16
    dtype: torch.dtype = torch.float32
    index: int = 0

    @property
    def untouched(self) -> int:
        """What an element has that nobody wrote."""
        return 255 if self.dtype is torch.uint8 else -1


def expected(heads: range, blocks: int = BLOCKS, of: Heads = Heads(), layers: range = range(LAYERS)) -> torch.Tensor:
    """What a filled cache holds of these heads and layers: [layers, blocks, heads, tokens, content]. Small numbers that
    repeat, but at no distance at which heads, tokens or blocks lie, where an element is too small for others."""
    shape = (LAYERS, blocks, of.count, TOKENS, of.content)
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)[layers.start:layers.stop, :, heads.start:heads.stop]
    return (numbers if of.dtype is torch.float32 else numbers % 251).to(of.dtype)


def expected_index(of: Heads, layers: range = range(LAYERS), blocks: int = BLOCKS) -> torch.Tensor:
    """What a filled cache holds beside the KV of these layers: [layers with an index, blocks, bytes]."""
    numbers = torch.arange(LAYERS * blocks * TOKENS * of.index).view(LAYERS, blocks, -1) % 241 + 3
    return numbers[[layer for layer in layers if layer != NO_INDEX]].to(torch.uint8)


def serve(pipe: Connection, rank: int, tp: int, filled: bool, order: str, blocks: int, stages: int = 1,
          of: Heads = Heads()) -> None:
    """The process of a rank whose cache has its axes in that order. Answers commands until it is killed."""
    heads, layers = head_range(rank % tp, tp, of.count), layer_range(rank // tp, stages, LAYERS)
    sizes = dict(zip(AXES, (len(layers), blocks, len(heads), TOKENS, of.content), strict=True))
    buffer = torch.full([sizes[axis] for axis in order], of.untouched, dtype=of.dtype)
    memory = buffer.permute([order.index(axis) for axis in AXES])
    if filled:
        memory.copy_(expected(heads, blocks, of, layers))
    views = list(memory)
    description = describe_views(views, num_blocks=blocks, block_size=TOKENS, first_head=heads.start,
                                 first_layer=layers.start)
    index = torch.zeros(len(expected_index(of, layers, blocks)), blocks, TOKENS * of.index + GAP, dtype=torch.uint8)
    if of.index:
        if filled:
            index.copy_(torch.nn.functional.pad(expected_index(of, layers, blocks), (0, GAP), value=2))
        beside = {f"layers.{layer}.index": each[:, :-GAP].unflatten(1, (1, TOKENS, of.index)) for layer, each in zip(
            [layer for layer in layers if layer != NO_INDEX], index, strict=True)}
        names = {f"layers.{layer}": view for layer, view in zip(layers, views, strict=True)}
        description = msgspec.structs.replace(description, whole=regions_beside(beside, names, layers.start))
        views += beside.values()
    steps = ComputedSteps(HostDevice())

    def make(attach: AttachRank) -> tuple[StepOrderedTransfer, bytes]:
        transport = NixlGenerations(rank_name(attach.incarnation, rank), views, description, attach.receives)
        ranked = RankedTransport(transport, rank, tp, of.count)
        return StepOrderedTransfer(TransferWorker(ranked, rank=rank), steps), transport.metadata()

    server = RankServer(make, {multiprocessing.parent_process().pid, os.getppid()})
    pipe.send((os.getpid(), server.address))
    while True:
        command, *arguments = pipe.recv()
        if command == "memory":
            pipe.send(memory.numpy())
        elif command == "index":
            pipe.send(index.numpy())
        elif command == "step":
            steps.launched(*arguments)
            pipe.send(None)
        elif command == "dropped":
            pipe.send(server.rank.dropped)
        elif command == "close":
            pipe.send(server.close())


class RemoteRank:
    """Handle on a process that runs `serve`."""

    def __init__(self, *arguments) -> None:
        self.pipe, theirs = _FORKS.Pipe()
        self.process = _FORKS.Process(target=serve, args=(theirs, *arguments))
        self.process.start()
        theirs.close()
        self.pid, self.address = self.answer()

    def ask(self, *command):
        self.pipe.send(command)
        return self.answer()

    def answer(self):
        assert self.pipe.poll(WAIT_S), "the other process does not answer"
        return self.pipe.recv()

    def memory(self) -> torch.Tensor:
        """Its cache, [layers, blocks, heads, tokens, content]."""
        return torch.from_numpy(self.ask("memory"))

    def index(self) -> torch.Tensor:
        """What it has beside the KV, and between that: [layers with an index, blocks, bytes and GAP more]."""
        return torch.from_numpy(self.ask("index"))

    def kill(self) -> None:
        self.process.kill()
        self.process.join(60)


class RemoteEngine:
    """An engine's end: this process is EngineCore of `stages` stages of `tp` ranks each. A filled one sends, unless it
    `receives`."""

    def __init__(self, tp: int, filled: bool, order: str = "LBHNC", blocks: int = BLOCKS, receives: bool = False,
                 stages: int = 1, of: Heads = Heads()) -> None:
        self.name = ("p" if filled else "d") + uuid.uuid4().hex
        self.processes = [RemoteRank(rank, tp, filled, order, blocks, stages, of) for rank in range(tp * stages)]
        self.connections, metadata = connect_ranks(
            {number: (rank.pid, rank.address) for number, rank in enumerate(self.processes)},
            AttachRank(self.name, receives=receives or not filled))
        self.metadata = RanksMetadata(metadata).encode()
        self.ends: list[str] = []
        self.progress = TransferProgress([], [], [], [])
        self.transfer = RemoteEngineTransfer(RankTransfers(self.connections))
        self.transfer.start(lambda: None, lambda end: self.ends.append(end.key))

    def meet(self, other: RemoteEngine) -> None:
        self.transfer.execute([AddTransferPeer(other.name, other.metadata)])

    def until(self, done: Callable[[TransferProgress], bool], look: bool = False) -> TransferProgress:
        """Take progress until `done` of all that has come."""
        deadline_s = time.monotonic() + WAIT_S
        while not done(self.progress):
            assert time.monotonic() < deadline_s, self.progress
            if look:
                self.transfer.poll()
            part = self.transfer.take_progress()
            self.progress.finished += part.finished
            self.progress.notices += part.notices
            self.progress.refused += part.refused
            self.progress.made += part.made
            time.sleep(0.002)
        return self.progress

    def close(self) -> None:
        self.transfer.close()
        for rank in self.processes:
            rank.kill()
