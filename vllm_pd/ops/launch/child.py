# SPDX-License-Identifier: Apache-2.0
"""One child process of `vllm-pd up`, in a process group of its own.

After `start()`, each line that the process prints goes to `say` with its name, and the last lines are kept. When the
process ends, an `Exited` is put into the given queue and its whole group is killed: the processes of an engine are
useless without its front end. `stop()` asks it to end, `kill()` ends it.
"""

import collections
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_pd.ops.launch.printer import Say
from vllm_pd.router.options import OPERATOR_KEY_VARIABLE

LAST_LINES = 30
MAX_LINE_BYTES = 1 << 20  # a longer one is printed as several
LAST_LINES_S = 2.0  # for what the process has printed before its end


@dataclass(frozen=True)
class Exited:
    """`child` has ended. `code` is its exit status, or minus the number of the signal that killed it."""
    child: "Child"
    code: int


class Child:
    """A process with a name. All methods are called from the main thread, which must outlive the process. `cores`: to
    which it is pinned, all where empty. It inherits this process's environment without the router's operator key;
    `env` is added. `say` must not block or raise, as a process whose pipe is full stops:
    `LinePrinter.put`."""

    def __init__(self, name: str, command: Sequence[str], *, say: Say, env: Mapping[str, str] | None = None,
                 cores: Sequence[int] = ()) -> None:
        self.name = name
        self._command = list(command)
        inherited = {key: value for key, value in os.environ.items() if key != OPERATOR_KEY_VARIABLE}
        self._env = {**inherited, **(env or {}), "VLLM_PD_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._cores = list(cores)
        self._say = say
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.printed = 0  # lines
        self._process: subprocess.Popen | None = None
        self._reaping = threading.Lock()  # held to reap the process, and to send it a signal
        self._relaying: threading.Thread | None = None
        self._watching: threading.Thread | None = None

    def start(self, events: "queue.SimpleQueue") -> None:
        """Start the process. Its Exited will be put into `events` exactly once."""
        pinned = ["--cores", ",".join(map(str, self._cores))] if self._cores else []
        command = [sys.executable, "-m", "vllm_pd.ops.launch.exec_child", *pinned, "--", *self._command]
        self._process = subprocess.Popen(command, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, start_new_session=True)
        self._relaying = threading.Thread(target=self._relay, name=f"{self.name}-lines", daemon=True)
        self._watching = threading.Thread(target=self._await_end, args=(events, ), name=f"{self.name}-watch",
                                          daemon=True)
        self._relaying.start()
        self._watching.start()

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    def last_lines(self) -> list[str]:
        """The last 30 lines that the process has printed, newest last. Of one that has ended, they are all there: this
        waits for those that are on their way, LAST_LINES_S at most."""
        if self._relaying is not None and not self.alive:
            self._relaying.join(LAST_LINES_S)
        return list(self._lines)

    def stop(self) -> None:
        """Send SIGTERM, and SIGCONT in case the process is stopped. Returns at once."""
        with self._reaping:
            if self.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, signal.SIGTERM)
                    os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process and everything that it has started (SIGKILL to its group). After its end, when its id may be
        another's, this does nothing: its group was killed then."""
        with self._reaping:
            if self.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, deadline: float) -> bool:
        """Whether the process has ended by `deadline` (time.monotonic())."""
        if self._watching is not None:
            self._watching.join(max(0.0, deadline - time.monotonic()))
        return not self.alive

    def _relay(self) -> None:
        while raw := self._process.stdout.readline(MAX_LINE_BYTES):
            line = raw.decode(errors="replace").rstrip("\n")
            self._lines.append(line)
            self.printed += 1
            self._say(self.name, line)

    def _await_end(self, events: "queue.SimpleQueue") -> None:
        with contextlib.suppress(ChildProcessError):  # the kernel has reaped it, where SIGCHLD is ignored
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        with self._reaping:
            code = self._process.wait()
        self._relaying.join(LAST_LINES_S)
        events.put(Exited(self, code))
