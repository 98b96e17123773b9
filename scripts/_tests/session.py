# SPDX-License-Identifier: Apache-2.0
"""One run of all tests: each folder in a pytest of its own, two lanes of folders side by side, then what failed again.

A lane runs its folders one after the other. The output of a folder is printed as a whole when the folder has ended. A
lane that has no folder left takes one from the end of another lane.

A test that failed runs again at the end, alone in a pytest of its own. If it passes then, it is *flaky*: listed, with
both outputs kept, but the run stays green. A wrong answer, a leak or a crash (tests/verdict.py says which failures
these are) is red at once, and so is a pytest that broke off or did not end in LIMIT_S. More failures than MOST_AGAIN
are no noise either. A run in which no test has passed is red.
"""

import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from _tests.pytest_run import LIMIT_S, NONE_COLLECTED, PASSED, PYTEST, STOP_S, Failure, Outcome, PytestRun

MOST_AGAIN = 12
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLOWEST = ("--durations=10", "--durations-min=3")


class Interrupted(BaseException):
    """A signal that ends the run. `status` is the exit status for it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.status = 128 + number


@dataclass(frozen=True)
class FolderRow:
    """A line of the table at the end."""
    folder: str
    lane: str
    result: str
    skipped: int
    began_s: float
    took_s: float


@dataclass
class Session:
    """Runs pytest on folders and then on what failed. `kept` is the folder for the outputs (emptied first). `options`
    are for every pytest, `folder_options` for that of one folder. `commands` start the pytest of a folder that has
    another environment than this process."""
    root: Path
    options: list[str]
    kept: Path
    folder_options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rows: list[FolderRow] = field(default_factory=list)
    red: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._running: list[PytestRun] = []
        self._again: list[Failure] = []
        self._errors: list[BaseException] = []
        self._passed = 0

    def run(self, lanes: Mapping[str, Sequence[str]]) -> int:
        """Run the folders (or tests) of each lane. The exit status: 1 if anything is red, 128 + the number of the
        signal that ended the run."""
        shutil.rmtree(self.kept, ignore_errors=True)
        self.kept.mkdir(parents=True)
        self._began = time.monotonic()
        self._left = {name: deque(folders) for name, folders in lanes.items()}
        threads = [threading.Thread(target=self._lane, args=(name,), name=f"lane-{name}") for name in lanes]
        with _signals_raise():
            try:
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads) and not self._errors:
                    time.sleep(0.1)  # a join would hold a signal back
                if self._errors:
                    raise self._errors[0]
                self._second_tries(self._again)
                if not (self._passed or self.red or {"--collect-only", "--co"} & {*self.options}):
                    self.red.append("no test has passed: see what the arguments choose, and why tests are skipped")
            except BaseException as error:
                self._stop(threads)
                self._report()
                if not isinstance(error, Interrupted):
                    raise
                print(f"ended by {error}", flush=True)
                return error.status
        self._report()
        return 1 if self.red else 0

    def _lane(self, name: str) -> None:
        """The life of a lane's thread."""
        try:
            while folder := self._next(name):
                self._folder(folder, name)
        except BaseException as error:
            self._errors.append(error)

    def _next(self, lane: str) -> str | None:
        """The next folder of this lane, else the last one of the lane that has most left."""
        with self._lock:
            if self._stopped:
                return None
            if self._left[lane]:
                return self._left[lane].popleft()
            longest = max(self._left.values(), key=len)
            return longest.pop() if longest else None

    def _folder(self, folder: str, lane: str) -> None:
        """Run one folder, print its output, and note what failed."""
        began = time.monotonic()
        print(f"== {folder} begins (lane {lane})", flush=True)
        output = self._place(folder, "output")
        outcome = self._pytest([folder, *SLOWEST, *self.folder_options.get(folder, ())], output)
        result = {PASSED: "passed", NONE_COLLECTED: "no tests"}.get(outcome.code, f"FAILED ({outcome.code})")
        took_s = time.monotonic() - began
        with self._lock:
            self.rows.append(FolderRow(folder, lane, result, outcome.skipped, began - self._began, took_s))
            self._passed += outcome.passed
            if self._stopped:
                return
            print(f"== {folder} (lane {lane}): {result}, {took_s:.0f} s\n{output.read_text(errors='replace')}",
                  flush=True)
            if outcome.broke_off:
                late = f" after the limit of {LIMIT_S:.0f} s" if outcome.late else ""
                self.red.append(f"{folder}: pytest ended with {outcome.code}{late}")
            for failure in outcome.failures.values():
                self._place(failure.test, "first").write_text(f"{failure.test}\n{failure.output}")
                if failure.kind:
                    self.red.append(f"{failure.test} ({failure.kind})")
                else:
                    self._again.append(failure)

    def _second_tries(self, failures: list[Failure]) -> None:
        if len(failures) > MOST_AGAIN:
            self.red += [f"{failure.test} (one of {len(failures)}: too many for noise)" for failure in failures]
            return
        for failure in failures:
            began = time.monotonic()
            print(f"== once more, alone: {failure.test}", flush=True)
            output = self._place(failure.test, "second")
            outcome = self._pytest([failure.test], output)
            print(output.read_text(errors="replace"), flush=True)
            if outcome.code == PASSED and outcome.passed:
                self.flaky.append(failure.test)
                self._passed += outcome.passed
            else:
                self.red.append(f"{failure.test} (twice)")
            self.rows.append(FolderRow("second try", "-", "passed" if outcome.code == PASSED else "FAILED",
                                       outcome.skipped, began - self._began, time.monotonic() - began))

    def _pytest(self, arguments: list[str], output: Path) -> Outcome:
        """Run pytest; its output goes to the file `output`. The first argument is a folder or one of its tests."""
        command = next((command for folder, command in self.commands.items()
                        if arguments[0] == folder or arguments[0].startswith(f"{folder}/")), PYTEST)
        with self._lock:
            if self._stopped:
                raise Interrupted(signal.SIGINT)
            run = PytestRun(self.root, [*arguments, *self.options], output, command)
            self._running.append(run)
        try:
            return run.wait(LIMIT_S)
        finally:
            self._running.remove(run)

    def _stop(self, threads: list[threading.Thread]) -> None:
        """End every pytest that runs, print what it has written, and wait for the lanes."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for run in running:
            run.interrupt()
        deadline = time.monotonic() + STOP_S
        for run in running:
            run.kill(max(0.0, deadline - time.monotonic()))
        for thread in threads:
            if thread.ident is not None:
                thread.join(STOP_S)
        for run in running:
            print(f"== interrupted: {run.output.stem}\n{run.output.read_text(errors='replace')}", flush=True)

    def _report(self) -> None:
        """Print the table and what was not green."""
        width = max((len(row.folder) for row in self.rows), default=0)
        print(f"\n{'folder':<{width}}  {'lane':<8}  {'result':<10}  {'skipped':>7}  {'begins at':>9}  {'takes':>7}")
        for row in sorted(self.rows, key=lambda row: row.began_s):
            print(f"{row.folder:<{width}}  {row.lane:<8}  {row.result:<10}  {row.skipped:>7}  {row.began_s:7.0f} s  "
                  f"{row.took_s:5.0f} s")
        skipped = sum(row.skipped for row in self.rows)
        print(f"{'total':<{width}}  {'':<8}  {'':<10}  {skipped:>7}  {'':>9}  {time.monotonic() - self._began:5.0f} s")
        for name, tests in (("flaky", self.flaky), ("red", self.red)):
            for test in tests:
                print(f"{name}: {test}")
        print(f"outputs: {self.kept}", flush=True)

    def _place(self, test: str, which: str) -> Path:
        """The file for the output of a test."""
        name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in test)
        return self.kept / f"{name[-150:]}.{which}.txt"


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Interrupted in the main thread; those after the first one have no effect."""
    def nothing(number: int, _: object) -> None:
        """Unlike SIG_IGN, a child does not inherit this: pytest must be interruptible."""

    def interrupt(number: int, _: object) -> None:
        for other in SIGNALS:
            signal.signal(other, nothing)
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, nothing if handler is signal.SIG_IGN else interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
