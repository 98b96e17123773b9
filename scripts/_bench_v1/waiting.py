# SPDX-License-Identifier: Apache-2.0
"""What an engine uses whose requests all wait for KV (B94)."""

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time

from _bench_v1.servers import BenchServer
from vllm_pd.bench.connection import LoadError

# A connector of stock vLLM, in this folder, which does nothing but let long prompts wait.
PARKING = {"kv_connector": "ParkingConnector", "kv_connector_module_path": "parking", "kv_role": "kv_both"}
PARKED = 4
PROMPT_TOKENS = 300
HOPS = 100
SETTLE_S = 3.0  # vLLM's workers spin for a second after each step


def cpu_shares(server: BenchServer, window_s: float) -> dict[str, float]:
    """The CPU that each process of the engine uses in that time, in cores."""
    pids = server.engine_processes()
    began, before = time.monotonic(), {name: _cpu_s(pid) for name, pid in pids.items()}
    time.sleep(window_s)
    passed_s = time.monotonic() - began
    return {name: round((_cpu_s(pid) - before[name]) / passed_s, 4) for name, pid in sorted(pids.items())}


def park(server: BenchServer) -> None:
    """Send prompts that will wait; their answers are of no interest."""
    draw = random.Random(server.port)
    for _ in range(PARKED):
        prompt = [draw.randrange(100, 999) for _ in range(PROMPT_TOKENS)]
        threading.Thread(target=_forget, args=(server, prompt), daemon=True).start()
    time.sleep(SETTLE_S)


def hop_times_ms() -> list[float]:
    """How long this machine takes from one sleeping process to another at present, in milliseconds: half of a round
    trip. A hand-over has about a dozen of such hops."""
    ours, theirs = socket.socketpair()
    echo = [sys.executable, "-c", "import os, sys\nwhile word := os.read(0, 1): os.write(1, word)"]
    times = []
    with subprocess.Popen(echo, stdin=theirs, stdout=theirs), ours:
        theirs.close()
        for number in range(HOPS + 1):
            began = time.perf_counter()
            ours.send(b".")
            ours.recv(1)
            if number:  # the first one waits for its start
                times.append(500 * (time.perf_counter() - began))
            time.sleep(0.02)
    return times


def _forget(server: BenchServer, prompt: list[int]) -> None:
    with contextlib.suppress(OSError, LoadError):
        server.complete(prompt, 4, 600.0)


def _cpu_s(pid: int) -> float:
    """The CPU time of another process, in nanoseconds' resolution (man clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)
