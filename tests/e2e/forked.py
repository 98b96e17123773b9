# SPDX-License-Identifier: Apache-2.0
"""Engines that are up in two seconds, for tests that kill them: forks of a process that has imported vLLM."""

import os
import select
import signal
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path

from _chaos.zygote import Zygote
from harness import EngineProcess, core, engine_env

NO_CODE = -1  # an exit status that only its parent knows


def start_zygote() -> Zygote:
    """To be closed by the caller."""
    here = str(Path(__file__).resolve().parent)
    env = {**engine_env(0), "VLLM_USE_V1": "0", "TQDM_DISABLE": "1"}
    return Zygote({**env, "PYTHONPATH": os.pathsep.join([here, *filter(None, [env.get("PYTHONPATH")])])})


class ForkedEngine(EngineProcess):
    """An `EngineProcess` that was forked."""

    def __init__(self, zygote: Zygote, *arguments, **keywords) -> None:
        self._zygote = zygote
        super().__init__(*arguments, **keywords)

    def _spawn(self, setup: dict, index: int) -> Connection:
        pid, pipe = self._zygote.fork("engine_process:serve", [core(index)], setup=setup)
        self.process = OthersChild(pid)
        return pipe

    def kill(self) -> None:
        """SIGKILL, and not a trace of it left."""
        self.process.kill()
        self.process.wait(10)
        self._pipe.close()


class OthersChild:
    """What is used of `subprocess.Popen`, for a process whose parent is another one."""

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

    def kill(self) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _end(self) -> None:
        self.returncode = NO_CODE
        os.close(self._descriptor)
