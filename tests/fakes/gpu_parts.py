# SPDX-License-Identifier: Apache-2.0
"""Parts for tests of scripts/lab/gpu_check.py's harness: each ends in a way of its own."""
import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from _gpu_check.child import PartRun, require
from _gpu_check.results import PartFailed, PartSkipped


def passes(run: PartRun) -> None:
    run.note(device=run.settings.device, left_s=run.left_s)
    run.note(more=1)


def has_gpu(run: PartRun) -> None:
    run.note(gpu=True, device="a GPU")


def has_no_gpu(run: PartRun) -> None:
    run.note(gpu=False)


def fails(run: PartRun) -> None:
    run.note(blocks=3)
    raise PartFailed("block 7 is wrong")


def skips(run: PartRun) -> None:
    raise PartSkipped("it is Monday")


def needs_more(run: PartRun) -> None:
    require("sys", "no_such_module", "nor_this_one")


def raises(run: PartRun) -> None:
    run.note(blocks=4)
    raise ZeroDivisionError("by nought")


def dies(run: PartRun) -> None:
    run.note(blocks=5)
    print("my last words", flush=True)
    os._exit(9)


def dies_after_its_result(run: PartRun) -> None:
    """As a library may that crashes while the process ends."""
    atexit.register(os._exit, 11)
    run.note(blocks=6)


def dies_while_it_writes(run: PartRun) -> None:
    Path(run.settings.out, "part.json").write_text('{"outcome": "passed", "reason": "", "fig')
    os._exit(0)


def leaves_a_process(run: PartRun) -> None:
    """In a session of its own, as an engine is; its parent dies, and it does not hear SIGTERM."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    sleeper = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    run.note(pid=sleeper.pid)


def takes_three_seconds(run: PartRun) -> None:
    sleeper = subprocess.Popen(["sleep", "3"])
    time.sleep(2.5)
    run.note(alive=sleeper.poll() is None)
    sleeper.kill()
    sleeper.wait()


def hangs(run: PartRun) -> None:
    leaves_a_process(run)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("I hang", flush=True)
    time.sleep(600)


def ends_when_asked(run: PartRun) -> None:
    try:
        time.sleep(600)
    finally:
        run.note(ended="in order")
