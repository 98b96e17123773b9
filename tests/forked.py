# SPDX-License-Identifier: Apache-2.0
"""The handle of a process whose parent is another one: a child of a fork server (scripts/lab/_chaos/zygote.py)."""

import os
import select
import signal
import subprocess
import time
from pathlib import Path

NO_CODE = -1  # an exit status that only the parent knows


class ForkedProcess:
    """What is used of `subprocess.Popen`. The signals go to this very process, not to one that has its number later."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Not None once it has ended."""
        if self.returncode is None and select.select([self._descriptor], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
            self._end()
        return NO_CODE

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it and forget it."""
        self.kill()
        if self.returncode is None:
            self._end()

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def _end(self) -> None:
        self.returncode = NO_CODE
        os.close(self._descriptor)


def freeze(pid: int, timeout_s: float = 60) -> None:
    """Stop a process, and return when each of its threads has stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while any(state(thread) not in "TZ" for thread in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > deadline:
            raise AssertionError(f"the process {pid} does not stop")
        time.sleep(0.001)


def state(process: Path) -> str:
    """The letter of a process's, or a thread's, state; Z where it is gone."""
    try:
        stat = (process / "stat").read_text()
    except OSError:
        return "Z"
    return stat[stat.rindex(")") + 2]
