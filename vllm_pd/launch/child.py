# SPDX-License-Identifier: Apache-2.0
"""One child process of `vllm-pd up`, in a process group of its own.

After `start()`, each line that the process prints is printed with its name in front, and the last lines are kept. Lines
that can't be printed, or not fast enough, are counted and dropped, because a process whose pipe is full stops. When the
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LAST_LINES = 30
MAX_UNPRINTED = 20_000  # lines
Say = Callable[[str, str], None]


def say_aloud(name: str, line: str) -> None:
    """Print a line of the process with this name."""
    sys.stdout.write(f"[{name}] {line}\n")  # one call, as many threads print
    sys.stdout.flush()


@dataclass(frozen=True)
class Exited:
    """`child` has ended. `code` is its exit status, or minus the number of the signal that killed it."""
    child: "Child"
    code: int


class Child:
    """A process with a name. All methods are called from the main thread, which must outlive the process. `cores`: to
    which it is pinned, all where empty."""

    def __init__(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None,
                 cores: Sequence[int] = (), say: Say = say_aloud) -> None:
        self.name = name
        self._command = list(command)
        self._env = {**os.environ, **(env or {}), "VLLM_PD_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._cores = list(cores)
        self._say = say
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._unprinted: queue.Queue[str | None] = queue.Queue(MAX_UNPRINTED)  # None ends it
        self._dropped = 0  # lines
        self._process: subprocess.Popen | None = None
        self._reaping = threading.Lock()  # held to reap the process, and to send it a signal
        self._threads: list[threading.Thread] = []

    def start(self, events: "queue.SimpleQueue") -> None:
        """Start the process. Its Exited will be put into `events` exactly once."""
        pinned = ["--cores", ",".join(map(str, self._cores))] if self._cores else []
        command = [sys.executable, "-m", "vllm_pd.launch.exec_child", *pinned, "--", *self._command]
        self._process = subprocess.Popen(command, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, start_new_session=True)
        for work in (self._relay, self._print, lambda: self._await_end(events)):
            thread = threading.Thread(target=work, name=f"{self.name}-watch", daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    def last_lines(self) -> list[str]:
        """The last 30 lines that the process has printed, newest last. Complete once its Exited was received."""
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
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self.alive

    def _relay(self) -> None:
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            self._lines.append(line)
            try:
                self._unprinted.put_nowait(line)
            except queue.Full:
                self._dropped += 1
        self._unprinted.put(None)

    def _print(self) -> None:
        failed = reported = 0
        line: str | None = ""
        while line is not None:
            line = self._unprinted.get()
            try:
                if lost := self._dropped + failed - reported:
                    self._say(self.name, f"(lines that could not be printed: {lost})")
                    reported += lost
                if line is not None:
                    self._say(self.name, line)
            except Exception:  # the disk is full, or the reader has gone: the next line may succeed
                failed += 1

    def _await_end(self, events: "queue.SimpleQueue") -> None:
        with contextlib.suppress(ChildProcessError):  # the kernel has reaped it, where SIGCHLD is ignored
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        with self._reaping:
            code = self._process.wait()
        deadline = time.monotonic() + 2.0
        for thread in self._threads[:2]:  # the last lines
            thread.join(max(0.0, deadline - time.monotonic()))
        events.put(Exited(self, code))
