# SPDX-License-Identifier: Apache-2.0
"""Groups and programs that are up in half the time: forks of one process that has imported vLLM. On one core importing
takes each of them seven seconds. What they run (dp_children.py) and how they talk is the same."""

import os
import socket
from pathlib import Path

from _chaos.zygote import Zygote

from tests.forked import ForkedProcess
from vllm_pd.bench.dp.group import environment


class Forks:
    """Starts children in the vLLM of `tree`. Close it: that kills those that are left."""

    def __init__(self, tree: Path | None) -> None:
        env = environment(tree)
        path = os.pathsep.join([str(Path(__file__).parent), env["PYTHONPATH"]])
        self._zygote = Zygote(env | {"PYTHONPATH": path})
        self._children: list[ForkedProcess] = []

    def driver(self, arguments: list[str], pipes: tuple[int, int], log: Path) -> ForkedProcess:
        """`start` of a `Group`."""
        return self._fork("drive", log, list(pipes), arguments=arguments)

    def script(self, path: str, arguments: list[str], log: Path, output: int, **env: str) -> ForkedProcess:
        """A python program: a file, or the name of a module. Its standard output goes to the file `output`, and
        dp_children.ENDED when it has ended in order."""
        return self._fork("run", log, [output], path=path, arguments=arguments, env=env)

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._zygote.close()

    def _fork(self, what: str, log: Path, files: list[int], **details: object) -> ForkedProcess:
        pid, connection = self._zygote.fork(f"dp_children:{what}", sorted(os.sched_getaffinity(0)), log=str(log),
                                            **details)  # fmt: skip
        with socket.socket(fileno=os.dup(connection.fileno())) as channel:
            socket.send_fds(channel, [b"files"], files)
        connection.close()
        self._children.append(ForkedProcess(pid))
        return self._children[-1]
