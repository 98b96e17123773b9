# SPDX-License-Identifier: Apache-2.0
"""One pytest run of upstream's tests on one tree, in a process group of its own, with progress.

A run ends with a junit file and a log, or it died; then the error names the test that was running. What failed runs
once more by itself, because on a busy machine a test with a time limit of its own fails now and then. What passes then
is marked as unsteady.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from _series.errors import Refusal

from . import results, trees
from .lists import TestList

_LINE = re.compile(r"^(?P<test>tests/\S+?::.*?)(?:\s(?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$")
MAX_RERUN = 40  # more failures are not due to a busy machine
REPORT_S = 15.0


class RunDied(Exception):
    """pytest ended without results on `tree`, a site's name. The text names the test that ran last."""

    def __init__(self, tree: str, text: str) -> None:
        super().__init__(f"the run on the {tree} tree died: {text}")
        self.tree = tree


@dataclass(frozen=True)
class Site:
    """Where a run happens. `tests` and `tree` are made by trees.stage*, `out` is a folder for logs and junit files, and
    setting `stop` ends the run early."""

    name: str  # of the tree: "unpatched", "patched"
    tree: Path
    tests: Path
    hub: Path
    out: Path
    stop: threading.Event
    test_limit_s: float = 300.0
    run_limit_s: float = 3600.0


def run(site: Site, wanted: TestList, say: Callable[[str], None]) -> dict[str, results.UpstreamResult]:
    """The results of all tests of the list. Raises RunDied."""
    first = once(site, wanted.arguments, wanted, "", say)
    again = results.unpassed(first)
    if not 0 < len(again) <= MAX_RERUN:
        return first
    try:
        return results.merged(first, once(site, tuple(again), wanted, "-again", say))
    except RunDied as died:
        say(f"{site.name} {wanted.name}: the second run of {len(again)} tests died: {died}")
        return first


def once(site: Site, arguments: tuple[str, ...], wanted: TestList, suffix: str,
         say: Callable[[str], None]) -> dict[str, results.UpstreamResult]:
    """One pytest run; `suffix` tells its files from those of the first. Raises RunDied."""
    stem = site.out / f"{site.name}-{wanted.name}{suffix}"
    junit, log = stem.with_suffix(".xml"), stem.with_suffix(".log")
    junit.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--timeout={site.test_limit_s}",
               "--continue-on-collection-errors", f"--junitxml={junit}", "-o", "junit_family=xunit1",
               *(f"--deselect={test}" for test in wanted.deselected), *arguments]
    settings = {"VLLM_USE_V1": wanted.use_v1, "HF_HOME": str(site.hub),
                "VLLM_CACHE_ROOT": str(site.out / "vllm-cache"), "VLLM_CONFIG_ROOT": str(site.out / "vllm-config")}
    env = trees.environment([site.tests, site.tests / "tests" / "vllm_test_utils", site.tree], settings)
    began_s = time.monotonic()
    last, code = follow(command, env, site, log, lambda text: say(f"{site.name} {wanted.name}{suffix}: {text}"))
    if code not in (0, 1):
        raise RunDied(site.name, f"pytest ended with {code} after {time.monotonic() - began_s:.0f} s, last in {last} "
                                 f"(see {log})")
    try:
        return results.read_junit(junit)
    except Refusal as error:
        raise RunDied(site.name, str(error)) from error


def follow(command: list[str], env: dict[str, str], site: Site, log: Path,
           say: Callable[[str], None]) -> tuple[str, int]:
    """Runs pytest with its output in `log`, and reports progress. The test named last, and the exit status (negative: a
    signal). Raises RunDied at the time limit, or when it is stopped."""
    progress, began_s, reports = PytestProgress(), time.monotonic(), 0
    with open(log, "w") as sink, open(log, errors="replace") as tail:
        process = subprocess.Popen(command, cwd=site.tests, env=env, stdin=subprocess.DEVNULL, stdout=sink,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while True:
                progress.read(tail)
                elapsed_s = time.monotonic() - began_s
                if elapsed_s > site.run_limit_s or site.stop.is_set():
                    raise RunDied(site.name, f"no end after {elapsed_s:.0f} s, in {progress.last} (see {log})")
                if not running(process):
                    break
                if elapsed_s // REPORT_S > reports:
                    reports = elapsed_s // REPORT_S
                    say(f"{elapsed_s:4.0f} s, {progress}")
        finally:
            end_group(process)
        progress.read(tail)
    say(f"{time.monotonic() - began_s:4.0f} s, {progress}; done")
    return progress.last, process.returncode


class PytestProgress:
    """Progress as read from the growing log of ``pytest -v``."""

    def __init__(self) -> None:
        self.last, self.done, self.failed = "the collection", 0, 0
        self._rest = ""

    def read(self, tail: TextIO) -> None:
        """Reads what was added to the log. A line that is still being written waits for its end."""
        *lines, self._rest = (self._rest + tail.read()).split("\n")
        for line in lines:
            if (match := _LINE.match(line)) and match["outcome"]:
                self.last = match["test"]
                self.done += 1
                self.failed += match["outcome"] in ("FAILED", "ERROR")
        if match := _LINE.match(self._rest):
            self.last = match["test"]

    def __str__(self) -> str:
        return f"{self.done} tests, {self.failed} failed, last {self.last[:90]}"


def running(process: subprocess.Popen, wait_s: float = 0.5) -> bool:
    """Waits up to `wait_s`. Whether the process still runs."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def end_group(process: subprocess.Popen) -> None:
    """Kills pytest and what its tests have left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
