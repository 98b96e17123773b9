# SPDX-License-Identifier: Apache-2.0
"""What the processes of a test are at when it fails: one that hangs is gone before anybody can look.

A folder's conftest imports the hook, which adds a section to the report of a failure: each descendant of this process
with its state, and for each thread the kernel function in which it waits. Python processes that were started after
`prepare` add their stacks.
"""
import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

DUMPS = "VLLM_PD_DUMPS"
ANSWER_S = 5.0  # how long the stacks of all processes may take
MAX_PROCESSES, MAX_CHARS = 40, 100_000


def prepare() -> None:
    """From now on the Python processes that are started can say where they are."""
    if DUMPS in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="vllm-pd-dumps-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = str(Path(__file__).parent / "fakes" / "dumps")
    os.environ[DUMPS] = folder
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))


@pytest.hookimpl(wrapper=True, trylast=True)  # within tests/verdict.py's, which writes what the report says
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.failed:
        children = psutil.Process().children(recursive=True)[:MAX_PROCESSES]
        if children:
            report.sections.append(("processes", describe(children)))
    return report


def describe(processes: list[psutil.Process]) -> str:
    """What these are at, a paragraph for each. Never raises for one that ends meanwhile."""
    states = {one.pid: text for one in processes if (text := _state(one))}  # before anything wakes them
    stacks = _stacks(processes)
    return "\n\n".join(f"{text}\n{stacks.get(pid, '')}".rstrip() for pid, text in states.items())[:MAX_CHARS]


def _state(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        times = process.cpu_times()
        lines = [f"process {process.pid}, child of {process.ppid()}: {process.status()}, {times.user:.1f} s in user "
                 f"mode, {times.system:.1f} s in the kernel: {' '.join(process.cmdline())[:200]}"]
        for task in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
            with contextlib.suppress(OSError):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                lines.append(f"    {task.name} {(task / 'comm').read_text().strip()}: {state} "
                             f"{(task / 'wchan').read_text()}")
        return "\n".join(lines)
    return ""


def _stacks(processes: list[psutil.Process]) -> dict[int, str]:
    """By process id, of those that have written them in time."""
    folder = os.environ.get(DUMPS)
    asked = {one.pid: Path(folder, str(one.pid)) for one in processes if folder and _is_ready(folder, one.pid)}
    for pid, file in asked.items():
        with contextlib.suppress(OSError):
            os.truncate(file, 0)
            os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline and not all(_size(file) for file in asked.values()):
        time.sleep(0.05)
    time.sleep(0.1 if asked else 0)  # for the rest of the last one
    return {pid: file.read_text(errors="replace") for pid, file in asked.items() if _size(file)}


def _is_ready(folder: str, pid: int) -> bool:
    """Whether this process has its file and handles the signal, which would end any other."""
    try:
        caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    except (OSError, IndexError):
        return False
    return bool(int(caught, 16) >> signal.SIGUSR2 - 1 & 1) and Path(folder, str(pid)).exists()


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0
