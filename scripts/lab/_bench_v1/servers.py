# SPDX-License-Identifier: Apache-2.0
"""Processes that a measurement starts and ends: a broker, and servers of engine V1."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from _wheel.process import BuildError

from _bench_v1.installations import BenchInstallation
from vllm_pd.bench.load import GenerationRequest, ask
from vllm_pd.bench.servers import HOST
from vllm_pd.ops.client import is_healthy
from vllm_pd.rpc.ports import take_free

START_S = 900.0
STOP_S = 60.0


class BenchProcess:
    """A process with a group of its own, whose output goes to a file."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with open(log, "w") as sink:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sink,
                                            stderr=subprocess.STDOUT, start_new_session=True)

    def check(self) -> None:
        """Raises BuildError where it has ended."""
        if self.process.poll() is not None:
            raise BuildError(f"{' '.join(self.process.args[:6])}... ended with {self.process.returncode}; the end of "
                             f"{self.log}:\n{self.log.read_text(errors='replace')[-3000:]}")

    def close(self) -> None:
        """End it and its children."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        for child in children:  # a stopped one does not end by itself
            if child.is_running():
                child.send_signal(signal.SIGCONT)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(STOP_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        for child in children:
            if child.is_running():
                child.kill()


def start_broker(plugin: BenchInstallation, log: Path) -> tuple[BenchProcess, str]:
    """A broker, and its address."""
    address = f"tcp://{HOST}:{take_free(HOST)}"
    return BenchProcess([plugin.python, "-m", "vllm_pd.cli", "broker", "--bind", address], plugin.environment(),
                        log), address


class BenchServer(BenchProcess):
    """`vllm serve` with the tiny model. `transfer`: its KV transfer configuration. The last one of two equal `options`
    counts."""

    def __init__(self, where: BenchInstallation, model: str, transfer: dict[str, Any], tp: int, log: Path,
                 more: tuple[Path, ...] = (), options: tuple[str, ...] = (), **settings: str) -> None:
        self.port = take_free(HOST)
        self.url, self.model = f"http://{HOST}:{self.port}", model
        command = [where.python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(self.port),
                   "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048",
                   "--max-num-seqs", "8", "--num-gpu-blocks-override", "512", "--tensor-parallel-size", str(tp),
                   "--kv-transfer-config", json.dumps(transfer), *options]
        super().__init__(command, where.environment(*more, **settings), log)

    def wait_ready(self) -> "BenchServer":
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while not is_healthy(self.url):
            self.check()
            if time.monotonic() > deadline:
                raise BuildError(f"{self.log}: the server does not answer within {START_S:g} s")
            time.sleep(0.5)
        return self

    def engine_processes(self) -> dict[str, int]:
        """EngineCore's and its workers' process ids, by the names that vLLM gives them."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            title = " ".join(child.cmdline())
            if title.startswith("VLLM::"):
                found[title.split()[0].removeprefix("VLLM::")] = child.pid
        return found

    def kill(self) -> None:
        """End it and its engine's processes at once (SIGKILL)."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.kill()

    def complete(self, prompt: list[int], tokens: int, timeout_s: float) -> None:
        """Has a prompt answered. Raises LoadError and OSError."""
        ask(self.url, self.model, GenerationRequest(prompt, tokens, ignore_eos=True, token_ids=False), timeout_s)


def install_probe(folder: Path) -> tuple[Path, Path]:
    """Folders for the PYTHONPATH of a server: the metadata by which vLLM finds `wake_probe`, and its code."""
    metadata = folder / "wake_probe-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wake_probe\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nwake_probe = wake_probe:install\n")
    return folder, Path(__file__).resolve().parent
