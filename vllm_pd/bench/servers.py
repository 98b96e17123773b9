# SPDX-License-Identifier: Apache-2.0
"""The launcher of every benchmark: engines, dummy engines and routers as processes that are started, awaited and ended.

A whole fleet of disaggregated engines is `vllm_pd.ops.launch.up.Fleet`; this is for servers beside or instead of it.
"""

import asyncio
import queue
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from vllm_pd.bench.connection import LoadConnection, LoadError, call
from vllm_pd.bench.dummy_client import RequestShape
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.ops.client import is_healthy
from vllm_pd.ops.launch.child import Child
from vllm_pd.ops.launch.printer import LinePrinter, Say
from vllm_pd.ops.launch.progress import StartProgress
from vllm_pd.router.policy import Policy
from vllm_pd.rpc.ports import take_free

HOST = "127.0.0.1"
UP, LIVE = "up", "live"  # as a router's /workers says
INFORMED = (Policy.KV, Policy.LEAST_LOAD)
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 5.0
OURS = f"{shlex.quote(sys.executable)} -m vllm_pd.cli router --host {HOST} --port {{port}} --worker={{worker}}"


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
        """The command line for a router at `port` in front of `workers` (base URLs)."""
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
    """A process that listens at `url`."""
    name: str
    port: int
    child: Child

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def is_healthy(self) -> bool:
        """Whether it answers /health with success."""
        return is_healthy(self.url)

    def routes(self) -> bool:
        """Whether the answer of a dummy engine comes through this router."""
        shape = RequestShape(tokens=2, prompt_tokens=8)

        async def send() -> None:
            with await LoadConnection.open(self.url) as connection:
                await shape.send(connection, next(shape.bodies(random.Random(0))))

        try:
            asyncio.run(send())
        except (OSError, LoadError):
            return False
        return True

    def knows(self, count: int, policy: Policy) -> bool:
        """Whether this router of ours knows `count` engines, and of each what its policy needs to know."""
        try:
            known = call(self.url, "GET", "/workers")
        except (OSError, LoadError):
            return False
        able = [worker for worker in known["workers"] if worker["state"] == UP and (
            policy not in INFORMED or (worker["events"] or {}).get("state") == LIVE)]
        return len(able) == count and (policy is not Policy.KV or known["tokenizer"] == "ok")

    def cpu_s(self) -> float:
        """CPU seconds that the process and its children have used."""
        return cpu_s(self.child.pid)

    def memory_bytes(self) -> int:
        """Resident memory of the process and its children."""
        return sum(process.memory_info().rss for process in process_tree(self.child.pid))


def cpu_s(pid: int) -> float:
    """CPU seconds that a process and its children have used. Raises psutil.NoSuchProcess."""
    used = [process.cpu_times() for process in process_tree(pid)]
    return sum(times.user + times.system for times in used)


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all below it. Raises psutil.NoSuchProcess."""
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


class Servers:
    """All servers that one run starts. Use it as a context: at its end every process has ended. `say` gets the lines
    that they print."""

    def __init__(self, say: Say, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        self._printer, self._stop_timeout_s = LinePrinter(say), stop_timeout_s
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._children: list[Child] = []

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.stop()
        deadline = time.monotonic() + self._stop_timeout_s
        for child in self._children:
            if not child.wait(deadline):
                child.kill()
        self._printer.close()

    def start(self, name: str, port: int, command: Sequence[str], *, env: Mapping[str, str] | None = None,
              cores: Sequence[int] = ()) -> Server:
        """Starts a server that will listen at `port`. `await_ready` waits for it."""
        child = Child(name, command, env=env, cores=cores, say=self._printer.put)
        self._children.append(child)
        child.start(self._events)
        return Server(name, port, child)

    def await_ready(self, server: Server, is_ready: Callable[[Server], bool] = Server.is_healthy,
                    timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits for a server, longer than `timeout_s` while it prints lines. Raises PDError with its last lines when it
        ends, or is not ready in time."""
        progress = StartProgress(time.monotonic(), timeout_s)
        while not is_ready(server):
            progress.see(server.child.printed, time.monotonic())
            if not server.child.alive or progress.has_stopped:
                what = "did not answer in time" if server.child.alive else "has ended"
                raise PDError("\n  ".join([f"{server.name} {what}; its last lines:", *server.child.last_lines()]))
            time.sleep(0.1)

    def dummies(self, count: int, block_size: int = 0, cores: Sequence[int] = ()) -> list[Server]:
        """Starts dummy engines and waits for them; with a block size they publish KV events. Raises PDError."""
        started = []
        for number in range(count):
            port = take_free(HOST)
            command = [sys.executable, "-m", "vllm_pd.bench.dummy", "--host", HOST, "--port", str(port),
                       "--block-size", str(block_size)]
            started.append(self.start(f"worker{number}", port, command, cores=cores))
        for server in started:
            self.await_ready(server)
        return started

    def router(self, command: RouterCommand, workers: Sequence[str], is_ready: Callable[[Server], bool],
               cores: Sequence[int] = (), port: int = 0) -> Server:
        """Starts a router in front of engines (base URLs) and waits until it is ready; `port` 0: a free one. Raises
        PDError."""
        port = port or take_free(HOST)
        server = self.start(command.name, port, command.arguments(port, workers), cores=cores)
        self.await_ready(server, is_ready)
        return server


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP end this process as an exception does, so that it ends what it has started. Further ones have
    no effect. A SIGHUP that is ignored, as with nohup, stays ignored."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]

    def leave(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, leave)


def log_to(file: TextIO) -> Say:
    """What writes the servers' lines into a file."""
    return lambda name, line: file.write(f"[{name}] {line}\n")
