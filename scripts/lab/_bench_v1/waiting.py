# SPDX-License-Identifier: Apache-2.0
"""What an engine uses whose requests all wait for KV (B94)."""

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from _wheel.process import BuildError

from _bench_v1.servers import BenchServer
from vllm_pd.bench.connection import LoadError
from vllm_pd.ops.client import fetch
from vllm_pd.ops.scrape import scrape

# A connector of stock vLLM, in this folder, which does nothing but let long prompts wait.
PARKING = {"kv_connector": "ParkingConnector", "kv_connector_module_path": "parking", "kv_role": "kv_both"}
PARKED = 4
PROMPT_TOKENS = 300
HOPS = 100
PARK_S = 60.0
SETTLE_S = 3.0  # vLLM's workers spin for a second after each step


def cpu_shares(server: BenchServer, window_s: float) -> dict[str, float]:
    """The CPU that each process of the engine uses in that time, in cores."""
    pids = server.engine_processes()
    began, before = time.monotonic(), {name: _cpu_s(pid) for name, pid in pids.items()}
    time.sleep(window_s)
    passed_s = time.monotonic() - began
    return {name: round((_cpu_s(pid) - before[name]) / passed_s, 4) for name, pid in sorted(pids.items())}


def parked_shares(server: BenchServer, count: Callable[[], int], window_s: float) -> dict[str, float]:
    """As `cpu_shares`, while PARKED requests wait and no other is there. `count`: how many wait at present. A prompt
    that does not wait gets its answer, and another one is sent. Raises BuildError if too few wait, before or after."""
    draw = random.Random(server.port)
    deadline = time.monotonic() + PARK_S
    answered = threading.Semaphore(PARKED)
    while count() < PARKED:
        if time.monotonic() > deadline:
            raise BuildError(f"{server.log}: {count()} requests wait for KV, not {PARKED}")
        if answered.acquire(timeout=0.1):
            prompt = [draw.randrange(100, 999) for _ in range(PROMPT_TOKENS)]
            threading.Thread(target=_complete, args=(server, prompt, answered), daemon=True).start()
    time.sleep(SETTLE_S)
    shares = cpu_shares(server, window_s)
    if count() != PARKED:
        raise BuildError(f"{server.log}: after {window_s:g} s {count()} requests wait for KV, not {PARKED}")
    return shares


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


def granted(server: BenchServer) -> int:
    """How many attempts of one of our decode engines a prefill engine works on."""
    return json.loads(fetch(server.url, "/pd/status", 10.0)[1])["gauges"]["decode_granted"]


def waiting_requests(server: BenchServer) -> int:
    """How many requests of any engine wait, by its own figures."""
    return int(scrape(server.url).value("vllm:num_requests_waiting"))


def _complete(server: BenchServer, prompt: list[int], answered: threading.Semaphore) -> None:
    """Of no interest but that it has ended."""
    with contextlib.suppress(OSError, LoadError):
        server.complete(prompt, 4, 600.0)
    answered.release()


def _cpu_s(pid: int) -> float:
    """The CPU time of another process, in nanoseconds' resolution (man clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)
