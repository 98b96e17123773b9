# SPDX-License-Identifier: Apache-2.0
"""A worker process, as the process that compares it sees it."""

import json
import select
import subprocess
from collections.abc import Mapping
from pathlib import Path

from _wheel import process

ANSWER_S = 600.0  # an engine may have to start


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
        """Its next line, which it writes as a whole. Raises BuildError where it has ended, or writes none within
        ANSWER_S."""
        came = select.select([self.process.stdout], [], [], ANSWER_S)[0]
        line = self.process.stdout.readline() if came else ""
        if not line:
            what = f"ended with {self.process.wait()}" if came else f"has not answered within {ANSWER_S:g} s"
            raise process.BuildError(f"the worker {what}; the end of {self.log}:\n"
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
