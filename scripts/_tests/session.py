# SPDX-License-Identifier: Apache-2.0
"""One run of all tests: each folder in a pytest of its own, then what failed once more.

A test that failed runs again at the end, alone in a pytest of its own. If it passes then, it is *flaky*: listed, with
both outputs kept, but the run stays green. A wrong answer, a leak or a crash (tests/verdict.py says which failures
these are) is red at once, and so is a pytest that broke off. More failures than MOST_AGAIN are no noise either.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

FILE = "VLLM_PD_FAILURES"  # tests/verdict.py appends the failures there
MOST_AGAIN = 12
PASSED, SOME_FAILED, NONE_COLLECTED = 0, 1, 5  # of pytest's exit codes; all others mean that it broke off


@dataclass
class Failure:
    """One test that failed. `kind`: what it is that can't be noise, None if it may be."""
    test: str
    kind: str | None
    output: str


@dataclass
class Outcome:
    """What a run of pytest came to. `said`: the exit status that it announced last, None if it did not get there."""
    code: int
    failures: dict[str, Failure]
    said: int | None
    passed: int

    @property
    def broke_off(self) -> bool:
        """pytest itself died, could not collect, or failed without a test that did."""
        return self.code not in (PASSED, SOME_FAILED, NONE_COLLECTED) or self.said != self.code or (
            self.code == SOME_FAILED and not self.failures)


@dataclass
class Session:
    """Runs pytest on folders and then on what failed. `kept` is the folder for outputs of failures (emptied first)."""
    root: Path
    options: list[str]
    kept: Path
    lines: list[str] = field(default_factory=list)
    red: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)

    def run(self, folders: list[str]) -> int:
        """The exit status: 1 if anything is red."""
        shutil.rmtree(self.kept, ignore_errors=True)
        self.kept.mkdir(parents=True)
        began = time.monotonic()
        again = [failure for folder in folders for failure in self._folder(folder)]
        if again:
            self._second_tries(again)
        self.lines.append(f"{'total':<16} {'':<12} {time.monotonic() - began:5.0f} s")
        print("\n".join(self.lines))
        for name, tests in (("flaky", self.flaky), ("red", self.red)):
            for test in tests:
                print(f"{name}: {test}")
        if self.flaky or self.red:
            print(f"outputs: {self.kept}")
        return 1 if self.red else 0

    def _folder(self, folder: str) -> list[Failure]:
        """Run one folder. The failures that may be noise."""
        print(f"== {folder}", flush=True)
        began = time.monotonic()
        outcome = self._pytest(folder)
        word = {PASSED: "passed", NONE_COLLECTED: "no tests"}.get(outcome.code, f"FAILED ({outcome.code})")
        self.lines.append(f"{folder:<16} {word:<12} {time.monotonic() - began:5.0f} s")
        if outcome.broke_off:
            self.red.append(f"{folder}: pytest ended with {outcome.code}")
        for failure in outcome.failures.values():
            self._place(failure.test, "first").write_text(f"{failure.test}\n{failure.output}")
            if failure.kind:
                self.red.append(f"{failure.test} ({failure.kind})")
        return [failure for failure in outcome.failures.values() if not failure.kind]

    def _second_tries(self, failures: list[Failure]) -> None:
        if len(failures) > MOST_AGAIN:
            self.red += [f"{failure.test} (one of {len(failures)}: too many for noise)" for failure in failures]
            return
        began = time.monotonic()
        for failure in failures:
            print(f"== once more, alone: {failure.test}", flush=True)
            outcome = self._pytest(failure.test, output=self._place(failure.test, "second"))
            if outcome.code == PASSED and outcome.passed:
                self.flaky.append(failure.test)
            else:
                self.red.append(f"{failure.test} (twice)")
        self.lines.append(f"{'second tries':<16} {len(failures):<12} {time.monotonic() - began:5.0f} s")

    def _pytest(self, what: str, output: Path | None = None) -> Outcome:
        """Run pytest on a folder or a test. Its output goes to the terminal, or to the file `output`."""
        record = self.kept / "failures.jsonl"
        record.unlink(missing_ok=True)
        with contextlib.nullcontext() if output is None else output.open("wb") as file:
            done = subprocess.run([sys.executable, "-m", "pytest", what, *self.options], cwd=self.root, stdout=file,
                                  stderr=file and subprocess.STDOUT, env={**os.environ, FILE: str(record)})
        if output:
            print(output.read_text(errors="replace"), flush=True)
        failures: dict[str, Failure] = {}
        said, passed = None, 0
        for line in record.read_text().splitlines() if record.exists() else ():
            told = json.loads(line)
            if "code" in told:
                said, passed = told["code"], told["passed"]
                continue
            failure = failures.setdefault(told["test"], Failure(told["test"], None, ""))
            failure.kind = failure.kind or told["kind"]  # a test may fail in its teardown, too
            failure.output += f"== {told['phase']}\n{told['output']}\n"
        record.unlink(missing_ok=True)
        return Outcome(done.returncode, failures, said, passed)

    def _place(self, test: str, which: str) -> Path:
        """The file for the output of a test."""
        name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in test)
        return self.kept / f"{name[-150:]}.{which}.txt"
