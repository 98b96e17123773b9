# SPDX-License-Identifier: Apache-2.0
"""One pytest process: start it, wait for it, read what tests/verdict.py has recorded of its failures."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RECORD = "VLLM_PD_FAILURES"  # tests/verdict.py appends the failures to the file that this variable names
PASSED, SOME_FAILED, NONE_COLLECTED = 0, 1, 5  # of pytest's exit codes; all others mean that it broke off
PYTEST = (sys.executable, "-m", "pytest")
LIMIT_S = 2 * 3600.0  # of one pytest; the longest folder takes about an hour
STOP_S = 60.0  # what the fixtures of an interrupted pytest get to end their processes


@dataclass
class Failure:
    """A test that failed. `kind`: why this cannot be noise, None if it may be noise."""
    test: str
    kind: str | None
    output: str


@dataclass
class Outcome:
    """The result of one pytest. `announced`: the exit status that it recorded last, None if it did not get there.
    `late`: it did not end in time."""
    code: int
    failures: dict[str, Failure]
    announced: int | None
    passed: int
    skipped: int
    late: bool

    @property
    def broke_off(self) -> bool:
        """pytest itself died, did not end, could not collect, or failed without a failed test."""
        return self.late or self.code not in (PASSED, SOME_FAILED, NONE_COLLECTED) or self.announced != self.code or (
            self.code == SOME_FAILED and not self.failures)


class PytestRun:
    """pytest, started by `command`, with `arguments` in the folder `root`, in a process group of its own, so that only
    the caller interrupts it. It writes to the file `output`; the failures go to a file beside that."""

    def __init__(self, root: Path, arguments: list[str], output: Path, command: Sequence[str] = PYTEST) -> None:
        self.output = output
        self._record = output.with_suffix(".jsonl")
        self._record.unlink(missing_ok=True)
        with output.open("wb") as file:
            self._process = subprocess.Popen([*command, *arguments], cwd=root, stdout=file, stderr=subprocess.STDOUT,
                                             start_new_session=True,
                                             env={**os.environ, RECORD: str(self._record)})

    def wait(self, limit_s: float) -> Outcome:
        """The outcome, once the process has ended, by itself or because it took longer than limit_s. Kills what is left
        of its group and removes the record."""
        late = False
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
            self.interrupt()
            self.kill(STOP_S)
        code = self._process.wait(STOP_S)
        self._kill_group()
        failures: dict[str, Failure] = {}
        announced, passed, skipped = None, 0, 0
        for line in self._record.read_text().splitlines() if self._record.exists() else ():
            entry = json.loads(line)
            if "code" in entry:
                announced, passed, skipped = entry["code"], entry["passed"], entry["skipped"]
                continue
            failure = failures.setdefault(entry["test"], Failure(entry["test"], None, ""))
            failure.kind = failure.kind or entry["kind"]  # a test may fail in its teardown, too
            failure.output += f"== {entry['phase']}\n{entry['output']}\n"
        self._record.unlink(missing_ok=True)
        return Outcome(code, failures, announced, passed, skipped, late)

    def interrupt(self) -> None:
        """Have pytest end as by Ctrl-C: it runs the teardown of its fixtures."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def kill(self, within_s: float) -> None:
        """Wait so long for the end of the process, then kill it and what is left of its group."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
