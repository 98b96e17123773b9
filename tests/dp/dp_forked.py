# SPDX-License-Identifier: Apache-2.0
"""Groups and programs that are up in half the time: forks of one process that has imported vLLM. On one core importing
takes each of them seven seconds. What they run and how they talk is the same."""

import atexit
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from _chaos.zygote import Zygote

from vllm_pd.bench.dp.group import environment

ENDED = "ended"


class Child:
    """What is used of `subprocess.Popen`, for a child of the zygote's. It has no exit status."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def wait(self, timeout: float) -> None:
        """Raises subprocess.TimeoutExpired."""
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Have it ended and forgotten."""
        self.kill()
        os.close(self._descriptor)

    def _signal(self, number: signal.Signals) -> None:
        if not select.select([self._descriptor], [], [], 0)[0]:
            signal.pidfd_send_signal(self._descriptor, number)


class Forks:
    """Starts children in the vLLM of `tree`. Close it: that kills those that are left."""

    def __init__(self, tree: Path | None) -> None:
        env = environment(tree)
        path = os.pathsep.join([str(Path(__file__).parent), env["PYTHONPATH"]])
        self._zygote = Zygote(env | {"PYTHONPATH": path})
        self._children: list[Child] = []

    def driver(self, arguments: list[str], pipes: tuple[int, int], log: Path) -> Child:
        """`start` of a `Group`."""
        return self._fork("drive", log, list(pipes), arguments=arguments)

    def script(self, path: str, arguments: list[str], log: Path, output: int, **env: str) -> Child:
        """A python program: a file, or the name of a module. Its standard output goes to the file `output`, and ENDED
        when it has ended in order."""
        return self._fork("run", log, [output], path=path, arguments=arguments, env=env)

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._zygote.close()

    def _fork(self, what: str, log: Path, files: list[int], **details: object) -> Child:
        pid, connection = self._zygote.fork(f"dp_forked:{what}", sorted(os.sched_getaffinity(0)), log=str(log),
                                            **details)  # fmt: skip
        with socket.socket(fileno=os.dup(connection.fileno())) as channel:
            socket.send_fds(channel, [b"files"], files)
        connection.close()
        self._children.append(Child(pid))
        return self._children[-1]


def drive(connection: Connection, arguments: list[str], log: str) -> None:
    """In the child: the driver of a group."""
    import dp_driver

    pipes = _settle(connection, 2, log)
    sys.argv = ["driver", *map(str, pipes), *arguments]
    dp_driver.main()


def run(connection: Connection, path: str, arguments: list[str], env: dict[str, str], log: str) -> None:
    """In the child: a program, with the model's class known, and the engines that it starts forked, too."""
    import multiprocessing

    import vllm.v1.engine.utils
    from vllm.model_executor.models import ModelRegistry

    [output] = _settle(connection, 1, log)
    os.dup2(output, 1)
    os.close(output)
    os.environ.update(env)
    for name in ("LlamaForCausalLM", "MixtralForCausalLM"):
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = [path, *arguments]
    if path.endswith(".py"):
        runpy.run_path(path, run_name="__main__")
    else:
        runpy.run_module(path, run_name="__main__", alter_sys=True)
    atexit._run_exitfuncs()  # a zygote's child goes without
    print(ENDED, flush=True)


def _settle(connection: Connection, count: int, log: str) -> list[int]:
    """A session of its own, the log, all cores for its threads, as a process started by hand has. The files given."""
    with socket.socket(fileno=connection.fileno()) as channel:
        _, files, _, _ = socket.recv_fds(channel, 16, count)
        channel.detach()
    connection.close()
    os.setsid()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "all"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    return list(files)
