# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`, forked from a zygote, and its engine and worker forked from it.

Imports take most of an engine's start, and are made once in this way. Nothing else differs from `vllm serve`.
"""
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from _chaos.forks import fork_engines
from _chaos.zygote import Zygote

from vllm_pd.bench.servers import HOST
from vllm_pd.errors import PDError
from vllm_pd.ops.client import is_healthy

SERVE = "_connectors.serve:serve"
START_S = 300.0


def serve(pipe: Connection, arguments: list[str], env: dict[str, str], log: str) -> None:
    """The child: `vllm serve` with these arguments, in a process group of its own."""
    os.setpgid(0, 0)
    os.environ.update(env)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    fork_engines()
    from vllm.entrypoints.cli.main import main
    sys.argv[:] = ["vllm", "serve", *arguments]
    main()


@dataclass
class ForkedServer:
    """A `vllm serve` at `url`, in the process group `pid`."""
    name: str
    port: int
    pid: int
    pipe: Connection

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def is_live(self) -> bool:
        """Whether the server answers, and says that its engine lives."""
        return is_healthy(self.url)

    def signal(self, number: int) -> None:
        """Sends a signal to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to all of its processes. Returns when nothing listens at its port any more."""
        self.signal(signal.SIGKILL)
        self._has_ended(time.monotonic() + 30)

    def stop(self, timeout_s: float) -> None:
        """SIGTERM to the server alone, as an operator sends it. Returns when all of its processes have ended. Raises
        PDError where they do not in time."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        if not self._has_ended(time.monotonic() + timeout_s):
            raise PDError(f"{self.name} has not ended {timeout_s:g} s after SIGTERM")

    def _has_ended(self, deadline: float) -> bool:
        """Whether no process of its group is left by then."""
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False

    def await_ready(self) -> None:
        """Raises PDError when it does not serve in time."""
        deadline = time.monotonic() + START_S
        while not self.is_live:
            with contextlib.suppress(OSError):
                ended = self.pipe.poll(0.2)
            if ended or time.monotonic() > deadline:
                raise PDError(f"{self.name} {'has ended' if ended else 'did not answer in time'}; see the log")


class ServerFactory:
    """Forks servers. Use it as a context: at its end all of them have ended."""

    def __init__(self, env: dict[str, str], log: Path) -> None:
        self._zygote = Zygote({**os.environ, **env})
        self._log, self._cores = log.absolute(), sorted(os.sched_getaffinity(0))
        self._started: list[ForkedServer] = []

    def __enter__(self) -> "ServerFactory":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._started:
            server.kill()
        self._zygote.close()

    def start(self, name: str, port: int, arguments: Sequence[str], env: dict[str, str], target: str = SERVE,
              **more: object) -> ForkedServer:
        """Starts `vllm serve` with these arguments and this in its environment. `target`: a function as `serve`, which
        gets `more`, too."""
        pid, pipe = self._zygote.fork(target, self._cores, env=env, log=str(self._log), **more,
                                      arguments=[*arguments, "--host", HOST, "--port", str(port)])
        self._started.append(ForkedServer(name, port, pid, pipe))
        return self._started[-1]
