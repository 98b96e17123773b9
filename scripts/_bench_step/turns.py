# SPDX-License-Identifier: Apache-2.0
"""A worker process, as the process that compares it sees it."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from _wheel import process


class StepWorker:
    """A process that times steps. `command` must be one of the workers. It is to be `ready` before it is asked for
    steps; `about` is what it said then."""

    def __init__(self, command: list[str], environment: Mapping[str, str], core: int, log: Path) -> None:
        self.log = log
        self.about: dict = {}
        with open(log, "a") as sink:
            self.process = subprocess.Popen(["taskset", "-c", str(core), *command], text=True, stderr=sink,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def ready(self) -> "StepWorker":
        """Wait until it has started. Raises BuildError where it ends instead."""
        self.about = self.answer()
        return self

    def answer(self) -> dict:
        """Its next line. Raises BuildError where it has ended."""
        line = self.process.stdout.readline()
        if not line:
            raise process.BuildError(f"the worker ended with {self.process.wait()}; the end of {self.log}:\n"
                                     + self.log.read_text(errors="replace")[-2000:])
        return json.loads(line)

    def steps(self, count: int) -> dict:
        """What `_bench_step.worker.timed` gives for so many steps."""
        print(count, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()
