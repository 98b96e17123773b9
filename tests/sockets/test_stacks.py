# SPDX-License-Identifier: Apache-2.0
"""A test that fails shows what its processes are at (tests/stacks.py)."""
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import stacks
from tests.forked import freeze

ROOT = Path(__file__).parents[2]
WAITS = """
import os, threading
def waits_in_a_thread():
    threading.Event().wait(60)
threading.Thread(target=waits_in_a_thread, daemon=True).start()
if {fork} and os.fork():
    os.wait()
print("ready", flush=True)
def waits_here():
    threading.Event().wait(60)
waits_here()
"""


@pytest.fixture
def prepared(monkeypatch, tmp_path) -> None:
    """As in a folder whose conftest calls `prepare`, with what was there before afterwards."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv(stacks.DUMPS, "")
    monkeypatch.delenv(stacks.DUMPS)
    stacks.prepare()


@pytest.fixture
def start() -> Iterator:
    started = []

    def start(*command: str) -> psutil.Process:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        if command[0] == sys.executable:
            assert process.stdout.readline() == "ready\n"
        return psutil.Process(process.pid)

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.wait()


@pytest.mark.parametrize("fork", [0, 1])
def test_each_thread_of_a_python_process(prepared, start, fork):
    process = start(sys.executable, "-c", WAITS.format(fork=fork))
    waiting = process.children()[0] if fork else process
    for _ in range(2):  # and another time
        text = stacks.describe([process, *process.children()])
        of_waiting = text[text.index(f"process {waiting.pid},"):]
        assert "waits_here" in of_waiting and "child of" in of_waiting
        assert "waits_in_a_thread" in text and ("in wait" in text)
    assert waiting.is_running()


def test_a_process_that_is_stopped_and_one_that_is_no_python(prepared, start, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_S", 0.5)
    stopped, other = start(sys.executable, "-c", WAITS.format(fork=0)), start("sleep", "60")
    freeze(stopped.pid)
    first, second = stacks.describe([stopped, other]).split("\n\n")
    assert f"process {stopped.pid}, child of {os.getpid()}: stopped" in first and ": T " in first
    assert "waits_here" not in first
    assert "sleep 60" in second and ": S hrtimer_nanosleep" in second
    stopped.send_signal(signal.SIGCONT)
    assert other.is_running() and other.status() != psutil.STATUS_ZOMBIE


def test_a_process_that_was_not_prepared_lives_on(start):
    process = start(sys.executable, "-c", WAITS.format(fork=0))
    assert "futex" in stacks.describe([process]) and process.is_running()
    assert process.status() != psutil.STATUS_ZOMBIE


def test_a_failure_has_the_section(tmp_path):
    (tmp_path / "test_planted.py").write_text(f"""
import subprocess, sys, pytest
sys.path.insert(0, {str(ROOT)!r})
@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "61"]) as process:
        yield
        process.kill()
def test_planted(child):
    assert False
""")
    options = ["-p", "no:cacheprovider", "-p", "tests.stacks", "--rootdir", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, str(tmp_path)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    shown = done.stdout[done.stdout.index(" processes "):]
    assert "sleep 61" in shown
