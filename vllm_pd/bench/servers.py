# SPDX-License-Identifier: Apache-2.0
"""The processes of `vllm-pd bench router`: dummy workers and the routers in front of them, started, awaited, ended."""

import asyncio
import queue
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vllm_pd.bench.load import LoadConnection, LoadError, RequestShape, make_body
from vllm_pd.children import Child
from vllm_pd.client import is_healthy
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.ports import take_free

HOST = "127.0.0.1"
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 5.0
OURS = f"{shlex.quote(sys.executable)} -m vllm_pd.cli router --host {HOST} --port {{port}} --worker={{worker}}"
Say = Callable[[str], None]


@dataclass(frozen=True)
class RouterCommand:
    """How a router is started: a name for the report, and a command line with places to fill in.

    `{port}`: where it shall listen; `{free}`: a free port, another one each time; `{workers}` as a whole argument: the
    workers' URLs, one argument each; `{worker}` in an argument: that argument once for each worker.
    """
    name: str
    command: str

    @classmethod
    def parse(cls, text: str) -> "RouterCommand":
        """Of `NAME=COMMAND`. Raises ConfigError naming `--router`."""
        name, equals, command = text.partition("=")
        if not equals or not name or "{port}" not in command or "{worker" not in command:
            raise ConfigError("--router", text, "write NAME=COMMAND with {port}, and {workers} or --flag={worker}")
        return cls(name, command)

    @classmethod
    def ours(cls, text: str) -> "RouterCommand":
        """Of `NAME=ARGS`: our own router with these arguments. Raises ConfigError naming `--ours`."""
        name, equals, arguments = text.partition("=")
        if not equals or not name:
            raise ConfigError("--ours", text, "write NAME=ARGS, where ARGS may be empty")
        return cls(name, f"{OURS} {arguments}")

    def shown(self) -> str:
        """The command line without the folders of this machine, for a report."""
        return " ".join(Path(word).name if word.startswith("/") else word for word in shlex.split(self.command))

    def arguments(self, port: int, workers: Sequence[str]) -> list[str]:
        """The command line for a router at `port` before `workers` (base URLs)."""
        found = []
        for word in shlex.split(self.command):
            word = word.replace("{port}", str(port))
            while "{free}" in word:
                word = word.replace("{free}", str(take_free(HOST)), 1)
            if word == "{workers}":
                found += workers
            elif "{worker}" in word:
                found += [word.replace("{worker}", worker) for worker in workers]
            else:
                found.append(word)
        return found


@dataclass(frozen=True)
class Server:
    """A process that listens."""
    name: str
    port: int
    child: Child

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def cpu_s(self) -> float:
        """CPU time that the process and its children have used."""
        own = psutil.Process(self.child.pid)
        used = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return sum(times.user + times.system for times in used)

    def memory_bytes(self) -> int:
        """Resident memory of the process and its children."""
        own = psutil.Process(self.child.pid)
        return sum(process.memory_info().rss for process in (own, *own.children(recursive=True)))


class Servers:
    """Everything that one run starts. Use it as a context: at its end every process has ended."""

    def __init__(self, worker_cores: Sequence[int], router_cores: Sequence[int], log: Any) -> None:
        self._worker_cores, self._router_cores, self._log = worker_cores, router_cores, log
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._children: list[Child] = []

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children:
            if not child.wait(deadline):
                child.kill()

    def workers(self, count: int, block_size: int) -> list[Server]:
        """Starts `count` dummies and waits for them; with a block size they publish events. Raises PDError when one
        does not come."""
        started = []
        for number in range(count):
            port = take_free(HOST)
            command = [sys.executable, "-m", "vllm_pd.bench.dummy", "--host", HOST, "--port", str(port),
                       "--block-size", str(block_size)]
            started.append(self._start(f"worker{number}", port, command, self._worker_cores))
        for server in started:
            self._await(server, lambda server: is_healthy(server.url))
        return started

    def router(self, launch: RouterCommand, workers: Sequence[Server]) -> Server:
        """Starts a router and waits until an answer of a worker has come through it. Raises PDError when none does."""
        port = take_free(HOST)
        server = self._start(launch.name, port, launch.arguments(port, [worker.url for worker in workers]),
                             self._router_cores)
        self._await(server, _routes)
        return server

    def ours(self, name: str, workers: Sequence[str], arguments: Sequence[str]) -> Server:
        """Starts our router before running engines (URLs) and waits until it is healthy. Raises PDError."""
        port = take_free(HOST)
        command = [*RouterCommand.ours(f"{name}=").arguments(port, workers), *arguments]
        server = self._start(name, port, command, self._router_cores)
        self._await(server, lambda server: is_healthy(server.url))
        return server

    def _start(self, name: str, port: int, command: Sequence[str], cores: Sequence[int]) -> Server:
        child = Child(name, command, cores=cores, say=self._say)
        child.start(self._events)
        self._children.append(child)
        return Server(name, port, child)

    def _say(self, name: str, line: str) -> None:
        self._log.write(f"[{name}] {line}\n")

    def _await(self, server: Server, is_there: Callable[[Server], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_there(server):
            if not server.child.alive or time.monotonic() > deadline:
                what = "did not answer in time" if server.child.alive else "has ended"
                raise PDError("\n  ".join([f"{server.name} {what}; its last lines:", *server.child.last_lines()]))
            time.sleep(0.1)


def _routes(server: Server) -> bool:
    shape = RequestShape(tokens=2, prompt_tokens=8)
    try:
        asyncio.run(_ask_once(server.port, shape, make_body(shape, "dummy", random.Random(0))))
    except (OSError, LoadError):
        return False
    return True


async def _ask_once(port: int, shape: RequestShape, body: bytes) -> None:
    line = await LoadConnection.open(HOST, port)
    try:
        await line.ask(shape, body)
    finally:
        line.close()
