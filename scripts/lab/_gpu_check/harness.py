# SPDX-License-Identifier: Apache-2.0
"""Runs parts, each in a process of its own with a deadline of its own, all within one budget.

Life of a part: `grant_s` decides how long it may take, or that too little of the budget is left. Its process runs
`_gpu_check.child`. At its deadline it gets SIGTERM, on which it ends what it has started, and STOP_S later SIGKILL. A
signal to this process kills the parts at once.
Whatever it has left running is killed after it, so that the next part finds the device free: `adopting_orphans` makes
this process the "child subreaper" of them all, so they stay its descendants when their parent dies. `MARK` says whose
they are, where parts run side by side.
"""
from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from _gpu_check.results import PartOutcome, PartResult, read_result

STOP_S = 12.0  # from SIGTERM to SIGKILL: engines must end and free the device
LAST_CHARS = 1500
STOCK = "stock"  # the part whose answers are right
ANSWERS = "stock_answers.json"  # in the folder of results: what a stock engine answered in this run
MARK = "VLLM_PD_GPU_CHECK_PART"  # a variable of all processes that a part starts: its name
PR_SET_CHILD_SUBREAPER = 36
SCRIPTS = Path(__file__).resolve().parents[1:3]  # scripts/lab, scripts


class GpuPart(NamedTuple):
    """A part. `target` is its function, "module:function". `deadline_s`: how long it may take; with less than `least_s`
    it is not begun. `what` says in words what it checks."""
    name: str
    target: str
    what: str
    deadline_s: float
    least_s: float


@dataclass(frozen=True)
class CheckSettings:
    """What every part gets. `device` is "cuda" or "cpu"; `out` is the folder for logs and results; `model` is "" where
    there is none. `engine_args` goes to every engine. `at_once`: the parts run side by side."""
    device: str
    out: str
    model: str = ""
    prompts: int = 50
    engine_args: tuple[str, ...] = ()
    at_once: bool = False


def grant_s(part: GpuPart, left_s: float) -> float | None:
    """How long the part may take if so much of the budget is left; None: too little. The time to end it is kept
    back."""
    usable_s = min(part.deadline_s, left_s - STOP_S)
    return usable_s if usable_s >= part.least_s else None


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Inside the `with` block, processes whose parent dies become children of this process."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def run_part(part: GpuPart, settings: CheckSettings, deadline_s: float, stop_s: float = STOP_S) -> PartResult:
    """Run one part to its end. When it returns, all processes of the part have ended."""
    out = Path(settings.out)
    found, log = out / f"{part.name}.json", out / f"{part.name}.log"
    found.unlink(missing_ok=True)
    began_s = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": _path(), "PYTHONUNBUFFERED": "1", MARK: part.name,
                   "SPT_NOENV": "1"}  # setproctitle, which vLLM uses, would write its titles over the variables
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "_gpu_check.child", part.target, str(found), json.dumps(asdict(settings)),
             str(deadline_s)], stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        try:
            ended = _ends(process, deadline_s)
            if not ended:
                process.terminate()
                _ends(process, stop_s)
        finally:
            _kill(_processes_of(part.name))
    return _judge(process.wait(), ended, read_result(found), log, deadline_s, time.monotonic() - began_s)


def run_parts(parts: Sequence[GpuPart], settings: CheckSettings, budget_s: float,
              keep: Callable[[str, PartResult], str]) -> None:
    """Run the parts in order. `keep` gets each result at once; it returns why nothing else can run here, or "".
    With `at_once` the parts behind the first run side by side, and `keep` gets their results as they come."""
    ends_s, reason, stopping = time.monotonic() + budget_s, "", threading.Event()

    def run_within_budget(part: GpuPart) -> PartResult:
        left_s = 0.0 if stopping.is_set() else ends_s - time.monotonic()
        granted_s = grant_s(part, left_s)
        if reason:
            return PartResult(PartOutcome.SKIPPED, reason)
        if granted_s is None:
            return PartResult(PartOutcome.SKIPPED, f"{max(0.0, left_s):.0f} s are left of the {budget_s:g} s, and it "
                              f"takes at least {part.least_s + STOP_S:.0f} s")
        return run_part(part, settings, granted_s)

    groups = [parts[:1], parts[1:]] if settings.at_once else [[part] for part in parts]
    for group in filter(None, groups):
        with ThreadPoolExecutor(len(group)) as pool:
            running = {pool.submit(run_within_budget, part): part for part in group}
            try:
                for ended in as_completed(running):
                    reason = keep(running[ended].name, ended.result()) or reason
            except BaseException:  # a signal: the pool waits for its threads, and they for the parts
                stopping.set()
                while not all(future.done() for future in running):  # one may just have started a process
                    for part in group:
                        _kill(_processes_of(part.name))
                    time.sleep(0.1)
                raise


def _judge(status: int, ended: bool, found: PartResult | None, log: Path, deadline_s: float,
           took_s: float) -> PartResult:
    """The result of a part whose process has ended with `status`, in time if `ended`, and has written `found`."""
    figures = found.figures if found is not None else {}
    if not ended:
        return PartResult(PartOutcome.TIMED_OUT, f"no end within {deadline_s:.0f} s; its last lines:\n{_tail(log)}",
                          figures, took_s)
    if found is None or found.outcome is PartOutcome.RUNNING:
        return PartResult(PartOutcome.FAILED, f"its process ended with {status} before it had a result; its last lines:"
                          f"\n{_tail(log)}", figures, took_s)
    if status:
        return PartResult(PartOutcome.FAILED, f"its process ended with {status} after its result, which was: "
                          f"{found.outcome} {found.reason}", figures, took_s)
    return PartResult(found.outcome, found.reason, figures, took_s)


def _ends(process: subprocess.Popen, timeout_s: float) -> bool:
    """Whether the process ends in so long."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
        return True
    return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LAST_CHARS:].strip() or "(none)"


def _processes_of(part: str) -> set[psutil.Process]:
    """The processes below this one that the part has started, by the variable that all of them have got."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if process.environ().get(MARK) == part:
                found.add(process)
    return found


def _kill(processes: set[psutil.Process]) -> None:
    """SIGKILL to all of them. Returns when they have ended, or after STOP_S."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=STOP_S)


def _path() -> str:
    """PYTHONPATH for a part: what it has, and the scripts."""
    return os.pathsep.join(filter(None, [*map(str, SCRIPTS), os.environ.get("PYTHONPATH", "")]))
