# SPDX-License-Identifier: Apache-2.0
"""The scripts of scripts/lab/gpu_kit without a GPU: that bash reads them, what they refuse, that a chapter ends."""
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import fits
import pytest
import torch.multiprocessing
import transfer_rate

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

    def start(*chapters: str, limit_s: int = 60, variables: dict[str, str] | None = None,
              **programs: str) -> subprocess.Popen:
        for name, text in ({"fits": "", "unpack": ""} | programs).items():
            (folder / f"{name}.py").write_text(text)
        return subprocess.Popen(["bash", folder / "device.sh", *chapters], cwd=tmp_path, text=True,
                                env={**env, "LIMIT": str(limit_s), **(variables or {})},
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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
    status, said = device("first", limit_s=20, preflight=HANGING, variables={"GRACE_S": "5"})
    assert hanging() == (2, [])
    began_s, ended_s = (int(line.split()[1]) for line in said.splitlines() if line.startswith("== "))
    assert 12 <= ended_s - began_s <= 22, said  # 20 s with its end, and what a busy machine adds
    assert status == 1 and "first FAILED" in said
    assert (tmp_path / "out" / "logs.tar.xz").is_file()


def test_a_cut_leaves_nothing_running(start, hanging):
    with start("first", preflight=HANGING) as process:
        wait_for(lambda: hanging()[0] == 2)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143 and hanging() == (2, [])


@pytest.fixture
def model(tmp_path):
    """What chapter `warm` makes is there already."""
    for file in ("dest/models/small/config.json", "dest/models/8b/config.json", "dest/cache/modelinfos/llama.json"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()


@pytest.fixture
def told_limits(tmp_path):
    """Variables with which device.sh finds a `timeout` that only tells its arguments."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "timeout").write_text('#!/bin/sh\necho limited "$@"\n')
    (tmp_path / "bin" / "timeout").chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def test_a_limit_of_nothing_is_not_no_limit(device, model, told_limits):
    _, said = device("together", limit_s=0, variables=told_limits)
    assert f"limited -k 1 1 {sys.executable} scripts/lab/gpu_check.py" in said


def test_a_command_gets_no_more_than_its_chapter(device, told_limits):
    _, said = device("first", limit_s=30, variables=told_limits)
    limits_s = [int(line.split()[3]) for line in said.splitlines() if line.startswith("limited")]
    assert len(limits_s) == 3 and all(15 < one <= 30 - 1 - 3 for one in limits_s), said


@pytest.mark.parametrize("chosen, arms", [({}, ["pd", "single", "mixed-rr", "alone"]), ({"ARMS": "pd"}, ["pd"]),
                                          ({"ARMS": "alone pd"}, ["alone", "pd"])])
def test_the_caller_may_choose_the_arms(device, model, told_limits, tmp_path, chosen, arms):
    status, _ = device("speed", variables=told_limits | chosen)
    words = (tmp_path / "build" / "gpu_logs" / "speed.log").read_text().split()
    assert status == 0 and [word for before, word in zip(words, words[1:], strict=False) if before == "--arm"] == arms


def test_old_results_of_a_chapter_do_not_pass_for_new(device, model, tmp_path):
    logs, out = tmp_path / "build" / "gpu_logs", tmp_path / "out"
    old = [logs / "together" / "gpu_check.json", out / "together.json", out / "speed.json"]
    for file in old:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("old")
    check = tmp_path / "scripts" / "lab" / "gpu_check.py"
    check.write_text("raise SystemExit(1)")
    assert device("together")[0] == 1
    assert [file.exists() for file in old] == [False, False, True]
    check.write_text(f"import pathlib; pathlib.Path({str(old[0])!r}).write_text('new')")
    assert device("together")[0] == 0
    assert old[1].read_text() == "new" and list(out.glob("*.part")) == []


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


class CopyingAgent:
    """Stands for NIXL's agent where both sides are in this process. `spoil(WRITES, PAIRS)` changes what it copies:
    pairs of pieces, (address, size, device) each."""

    def __init__(self, spoil) -> None:
        self._spoil, self._writes = spoil, 0

    def get_agent_metadata(self) -> bytes:
        return b""

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return b"receiver"

    def prep_xfer_dlist(self, peer: str, places: list, kind: str) -> list:
        return places

    def make_prepped_xfer(self, kind: str, ours: list, which: list[int], theirs: list, to: list[int], notice: bytes):
        return [(ours[one], theirs[other]) for one, other in zip(which, to, strict=True)]

    def transfer(self, pairs: list) -> str:
        self._writes += 1
        for (source, size, _), (sink, _, _) in self._spoil(self._writes, pairs):
            ctypes.memmove(sink, source, size)
        return "DONE"

    def deregister_memory(self, registered: None) -> None: ...
    def release_xfer_handle(self, handle: list) -> None: ...
    def release_dlist_handle(self, handle: list) -> None: ...


class ThreadContext:
    """Stands for a context of multiprocessing: a thread, with a pipe end of its own."""
    Pipe = staticmethod(multiprocessing.Pipe)

    @staticmethod
    def Process(target, args: tuple, daemon: bool) -> threading.Thread:
        return threading.Thread(target=target, args=(Connection(os.dup(args[0].fileno())), *args[1:]), daemon=daemon)


@pytest.fixture
def rates(monkeypatch):
    """Measure with a CopyingAgent."""
    def measure(spoil) -> dict:
        monkeypatch.setattr(transfer_rate, "start_agent", lambda name, buffer: (CopyingAgent(spoil), None))
        return transfer_rate.measure("cpu", 1 << 20)

    monkeypatch.setattr(transfer_rate, "SIZES", (12 << 10, 64 << 10))
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: ThreadContext)
    return measure


def test_rates_where_all_bytes_are_right(rates):
    rows = rates(lambda writes, pairs: pairs)
    assert rows["all bytes right"] is True
    assert [rows[name]["pieces"] for name in ("12 KiB rising", "12 KiB scattered", "64 KiB rising")] == [85, 85, 16]


WRITES = transfer_rate.ROUNDS + 2  # of each size and order


@pytest.mark.parametrize("spoil", [
    lambda writes, pairs: pairs if writes <= WRITES else [],
    lambda writes, pairs: pairs if writes != WRITES + 1 else pairs[1:],
    lambda writes, pairs: [(one[0], other[1]) for one, other in zip(pairs, pairs[1:] + pairs[:1], strict=True)],
    lambda writes, pairs: [(source, pairs[0][1]) for source, _ in pairs],
], ids=["only the first order is written", "a piece is missing once", "pieces are swapped", "one piece gets all"])
def test_wrong_bytes_are_seen(rates, spoil):
    assert rates(spoil)["all bytes right"] is False


def test_a_receiver_that_dies_ends_the_sender(rates, monkeypatch):
    ended = []

    def measure() -> None:
        try:
            rates(lambda writes, pairs: pairs)
        except EOFError as error:
            ended.append(error)

    monkeypatch.setattr(transfer_rate, "receive", lambda pipe, *_: pipe.close())
    sender = threading.Thread(target=measure, daemon=True)
    sender.start()
    sender.join(20)
    assert len(ended) == 1
