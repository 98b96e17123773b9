#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs a prefill engine to know many decode engines, as if each were on a machine of its own.

A prefill engine greets every decode engine that fits as soon as the registry lists it, so that a path that does not
work is known before the first prompt needs it. The prefill engine measured here is this process: a control agent, and
a NIXL transport over UCX's TCP, without a model. The decode engines are threads and transports of another process.

- `greeted`: from their start until each is known here and its memory is added. The adds alone: `add` ms each.
- `idle`: this process' share of a core afterwards, heartbeats of all connections included.
- per decode engine: file descriptors and MiB of this process.
"""
from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
import psutil
import torch
from rich.console import Console

from vllm_pd.bench.outputs import argument_file, write_json
from vllm_pd.bench.report import table
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import AddPeer
from vllm_pd.rpc.ports import take_free
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.layout import describe
from vllm_pd.transfer.nixl.generations import NixlGenerations

HOST = "127.0.0.1"
LAYERS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 16, 2, 64, 16, 8
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "none", "float32", "float32", BLOCK_SIZE, LAYERS, KV_HEADS, HEAD_SIZE, "hnd")
DEADLINE_S = 120.0


class Engine:
    """A control agent, and a transport over a small cache. `number`: one of several in this process."""

    def __init__(self, role: str, broker: str, number: int = 0):
        caches = [torch.zeros((2, BLOCKS, BLOCK_SIZE * KV_HEADS * HEAD_SIZE)) for _ in range(LAYERS)]
        description = describe(caches, num_blocks=BLOCKS, block_size=BLOCK_SIZE, kv_heads=KV_HEADS,
                               head_size=HEAD_SIZE, platform="cpu", backend="IPEX")
        member = local_member(m.Role(role), FINGERPRINT)
        name = f"{member.incarnation}{number}"
        boot = member.host_id.partition("/")[0]
        member = msgspec.structs.replace(member, incarnation=name, host_id=f"{boot}/{name}")  # a machine of its own
        self.transport = NixlGenerations(name, caches, description, progress_thread=False)
        self.bell = threading.Event()
        self.agent = ControlAgent(PDConfig.parse(role, {"broker": broker}), member, self.transport.metadata(),
                                  self.bell.set)
        self.agent.start()


def decode_engines(broker: str, count: int, pipe: Connection) -> None:
    """The other process."""
    torch.set_num_threads(1)
    engines = [Engine("kv_consumer", broker, number) for number in range(count)]
    pipe.send("up")
    pipe.recv()
    for engine in engines:
        engine.agent.close()
        engine.transport.close()


class Size(NamedTuple):
    """What it costs, by the number of decode engines; shares of a core in percent."""
    engines: int
    greeted_s: float
    add_ms: float
    alone_percent: float
    idle_percent: float
    fds_each: float
    mib_each: float


def measure(count: int, seconds: float) -> Size:
    """With so many decode engines. Raises TimeoutError where not all are known in time."""
    url = f"tcp://{HOST}:{take_free(HOST)}"
    broker = subprocess.Popen([sys.executable, "-m", "vllm_pd.cli", "broker", "--bind", url])
    here, there = multiprocessing.get_context("spawn").Pipe()
    others = multiprocessing.get_context("spawn").Process(target=decode_engines, args=(url, count, there), daemon=True)
    try:
        engine, process = Engine("kv_producer", url), psutil.Process()
        alone = share(process, seconds)
        before = process.num_fds(), process.memory_info().rss
        others.start()
        if not here.poll(DEADLINE_S):
            raise TimeoutError(f"{count} decode engines did not start in {DEADLINE_S:g} s")
        began = time.monotonic()
        adds = add_all(engine, count)
        greeted_s = time.monotonic() - began
        idle = share(process, seconds)
        fds, rss = process.num_fds() - before[0], process.memory_info().rss - before[1]
        here.send("end")
        others.join(DEADLINE_S)
        engine.agent.close()
        engine.transport.close()
        return Size(count, greeted_s, 1000 * statistics.median(adds), alone, idle, fds / count, rss / count / 2**20)
    finally:
        if others.is_alive():
            others.kill()
        broker.kill()
        broker.wait()


def add_all(engine: Engine, count: int) -> list[float]:
    """Add every decode engine that greets us back. The time of each, in seconds."""
    took: collections.deque[float] = collections.deque()
    deadline = time.monotonic() + DEADLINE_S
    while len(took) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(took)} of {count} decode engines were met in {DEADLINE_S:g} s")
        engine.bell.wait(0.1)
        engine.bell.clear()
        while (event := engine.agent.protocol.poll_event()) is not None:
            if isinstance(event, AddPeer):
                began = time.monotonic()
                engine.transport.add_peer(event.name, event.metadata)
                took.append(time.monotonic() - began)
    return list(took)


def share(process: psutil.Process, seconds: float) -> float:
    """Of a core, in percent, of this process for so long."""
    times = process.cpu_times()
    began, before = time.monotonic(), times.user + times.system
    time.sleep(seconds)
    times = process.cpu_times()
    return 100 * (times.user + times.system - before) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 50, 100], help="numbers of decode engines")
    parser.add_argument("--seconds", type=float, default=10.0, help="to look at each idle process")
    parser.add_argument("--json", type=argument_file, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    os.environ.setdefault("UCX_TLS", "tcp")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    sizes = []
    for count in arguments.sizes:
        sizes.append(measure(count, arguments.seconds))
        print(sizes[-1], flush=True)
    Console().print(table(["decode engines", "greeted (s)", "add (ms)", "alone (% of a core)", "idle (%)", "fds each",
                           "MiB each"], [[f"{value:.3g}" for value in size] for size in sizes]))
    if arguments.json:
        write_json(arguments.json, {"seconds": arguments.seconds, "sizes": [size._asdict() for size in sizes]})


if __name__ == "__main__":
    main()
