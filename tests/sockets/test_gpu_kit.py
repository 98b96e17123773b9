# SPDX-License-Identifier: Apache-2.0
"""The scripts of scripts/lab/gpu_kit without a GPU: that bash reads them, what they refuse, that a chapter ends."""
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fits
import pytest

from tests.waiting import wait_for

FOLDER = Path(fits.__file__).parent


def test_the_printed_variables_are_those_of_a_shell(tmp_path):
    (tmp_path / "kit.json").write_text('{"archives": [], "files": {}}')
    dest = tmp_path / "it's here"
    shell = 'eval "$("$1" "$2" "$3" "$4" 2>/dev/null)" && printf "%s\\n" "$PYTHONPATH" "$VLLM_HOST_IP"'
    done = subprocess.run(["bash", "-c", shell, "bash", sys.executable, FOLDER / "unpack.py", tmp_path, dest],
                          env={**os.environ, "PYTHONPATH": "/before"}, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines() == [f"{dest}/site:/before", "127.0.0.1"]


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_bash_reads_the_scripts(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""


@pytest.fixture
def start(tmp_path):
    """Start device.sh with a kit that has these programs instead of its own. A chapter may take `limit_s`."""
    folder = tmp_path / "kit"
    folder.mkdir()
    shutil.copy(FOLDER / "device.sh", folder)
    (tmp_path / "scripts" / "lab").mkdir(parents=True)
    (tmp_path / "scripts" / "lab" / "gpu_check.py").touch()
    env = {**os.environ, "PYTHON": sys.executable, "DEST": str(tmp_path / "dest"), "OUT": str(tmp_path / "out"),
           "GRACE_S": "1", "PIDS": str(tmp_path / "pids")}

    def start(*chapters: str, limit_s: int = 60, **programs: str) -> subprocess.Popen:
        for name, text in ({"fits": "", "unpack": ""} | programs).items():
            (folder / f"{name}.py").write_text(text)
        return subprocess.Popen(["bash", folder / "device.sh", *chapters], env={**env, "LIMIT": str(limit_s)},
                                cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return start


@pytest.fixture
def device(start):
    """The same to its end: status and output."""
    def run(*chapters: str, **options) -> tuple[int, str]:
        with start(*chapters, **options) as process:
            said, _ = process.communicate(timeout=120)
        return process.returncode, said
    return run


def test_what_does_not_fit_ends_it_before_anything_is_unpacked(device, tmp_path):
    said = device("first", fits="print('does not fit: gpu: ...'); raise SystemExit(2)", unpack="raise SystemExit(1)")
    assert said == (2, "does not fit: gpu: ...\n")
    assert not (tmp_path / "dest").exists()


def test_an_unknown_chapter_is_refused(device):
    status, said = device("frist")
    assert status == 1 and "no chapter is named frist" in said


def test_a_failed_preflight_is_the_last_chapter(device):
    status, said = device("first", "together", preflight="print('rms_norm FAILED'); raise SystemExit(1)")
    assert status == 1 and "rms_norm FAILED" in said and "no other chapter" in said


HANGING = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:  # the second one is in a session of its own, and outlives the first
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
with open(os.environ["PIDS"], "a") as file:
    print(os.getpid(), file=file)
time.sleep(600)
"""


@pytest.fixture
def hanging(tmp_path):
    """Those processes of HANGING that were started and are still there. They are killed after the test."""
    def pids() -> list[int]:
        file = tmp_path / "pids"
        return [int(one) for one in file.read_text().split()] if file.exists() else []

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False
    yield lambda: (len(pids()), [pid for pid in pids() if alive(pid)])
    for pid in filter(alive, pids()):
        os.kill(pid, signal.SIGKILL)


def test_no_chapter_passes_its_limit_and_nothing_is_left_running(device, hanging, tmp_path):
    status, said = device("first", limit_s=5, preflight=HANGING)
    assert hanging() == (2, [])
    assert status == 1 and "first FAILED" in said
    assert (tmp_path / "out" / "logs.tar.xz").is_file()


def test_a_cut_leaves_nothing_running(start, hanging):
    with start("first", preflight=HANGING) as process:
        wait_for(lambda: hanging()[0] == 2)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143 and hanging() == (2, [])


@pytest.fixture
def gpu_v0(tmp_path):
    """Run gpu_v0.sh in a folder with a model, a wheel and an environment whose programs only tell their arguments."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "vllm-pd"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (programs / name).chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "a.whl").touch()

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["bash", FOLDER.parent / "gpu_v0.sh", *arguments], cwd=tmp_path, text=True,
                              env={**os.environ, "VENV": "venv"}, capture_output=True)
    return run


def test_paths_of_v0_are_those_of_the_caller_and_its_parts_are_named(gpu_v0, tmp_path):
    done = gpu_v0("a.whl", "model", "--prompts", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "vllm-pd doctor",
        f"python scripts/lab/gpu_check.py --model {tmp_path}/model --out build/gpu_v0 --part bits --part order "
        "--part stock --part b1 --part death --part serve --prompts 8"]


@pytest.mark.parametrize("parts", [("--part", "b1"), ("--part=b1", )])
def test_the_caller_may_name_the_parts_of_v0(gpu_v0, tmp_path, parts):
    told = gpu_v0("a.whl", "model", *parts).stdout
    assert told.endswith(f"--model {tmp_path}/model --out build/gpu_v0 {' '.join(parts)}\n")


def test_two_wheels_for_v0_are_refused(gpu_v0):
    done = gpu_v0("a.whl", "b.whl", "model")
    assert (done.returncode, done.stdout) == (2, "")
    assert "more than one file" in done.stderr and "write the name of one" in done.stderr
    assert len(done.stderr.splitlines()) == 1
