# SPDX-License-Identifier: Apache-2.0
"""The benchmarks among the scripts delete nothing, take no failure for a figure, and wait for nothing for ever."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import bench_edge
import bench_transfer
import bench_v1
import pytest
from _bench_step import turns
from _bench_v1 import pushing
from _wheel.process import BuildError

from vllm_pd.bench.checks import argument_count
from vllm_pd.bench.dp.group import Group, GroupError
from vllm_pd.bench.outputs import argument_file
from vllm_pd.transfer.nixl.agent import TransferState


def test_a_run_of_bench_v1_deletes_nothing(tmp_path):
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "mine").write_text("kept")
    first, second = bench_v1.fresh_folder(tmp_path), bench_v1.fresh_folder(tmp_path)
    assert first != second and first.parent == second.parent == tmp_path and not list(first.iterdir())
    assert (tmp_path / "stock" / "mine").read_text() == "kept"
    assert bench_v1.fresh_folder(tmp_path / "new").is_dir()


def test_part_push_sends_no_prompt_to_an_engine_twice(monkeypatch):
    """Also not by way of a decode engine, which hands its long prompts to its prefill engine."""
    fleets = {arm: (SimpleNamespace(url=f"d-{arm}"), SimpleNamespace(url=f"p-{arm}")) for arm in pushing.ARMS}
    sent: list[tuple[str, tuple[int, ...]]] = []

    def answer(url, model, request):
        sent.append((url, tuple(request.prompt)))
        if len(request.prompt) == 400 and url.startswith("d-"):
            sent.append((url.replace("d-", "p-"), tuple(request.prompt)))
        return SimpleNamespace(arrivals_s=[0.1, 0.2])

    monkeypatch.setattr(pushing, "ask", answer)
    monkeypatch.setattr(pushing, "served_model", lambda url: "m")
    monkeypatch.setattr(pushing, "LEAD_S", 0.0)
    pushing.PushComparison(fleets, tokens=400, chunk_tokens=100, rounds=4)._gaps()
    long = [one for one in sent if len(one[1]) == 400]
    assert len(long) == 4 * 5 and len(set(sent)) == len(sent)


async def test_an_answer_of_health_other_than_200_is_no_fast_one(monkeypatch):
    """And a router that has ended has no memory to show."""
    router = bench_edge.WatchedRouter(SimpleNamespace(memory_bytes=lambda: 5_000_000))
    statuses = iter([200, 503, 0] + [200] * 1000)

    async def ask(path, body=None):
        return next(statuses)

    monkeypatch.setattr(router, "ask", ask)
    async with router.watched():
        pass
    assert router.failed == {503: 1, 0: 1} and len(router.health_s) >= 1
    assert f"of {len(router.health_s)}, 1 x no answer, 1 x 503, memory +0 MB" in router.shown()

    def ended():
        raise bench_edge.psutil.NoSuchProcess(1)

    router._server.memory_bytes, router.health_s = ended, []
    assert router.shown() == "/health none, 1 x no answer, 1 x 503, the router has ended"


@pytest.mark.parametrize("wait, what", [
    (lambda: bench_transfer.complete(SimpleNamespace(post=lambda _: TransferState.OPEN,
                                                     check=lambda _: TransferState.OPEN), 1), "raw NIXL transfer"),
    (lambda: bench_transfer.ours_s(SimpleNamespace(
        write=lambda *_: None, poll=lambda: SimpleNamespace(finished=[])), [0], [0]), "our transfer"),
    (lambda: bench_transfer.received(SimpleNamespace(poll=lambda timeout_s: False)), "the other process")])
def test_a_transfer_that_does_not_end_is_an_error(monkeypatch, wait, what):
    monkeypatch.setattr(bench_transfer, "DEADLINE_S", 0.05)
    with pytest.raises(SystemExit, match=f"{what}.*0.05 s"):
        wait()


def test_a_worker_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "ANSWER_S", 0.2)
    core = min(os.sched_getaffinity(0))
    worker = turns.StepWorker(["sleep", "60"], os.environ, core, tmp_path / "log")
    try:
        with pytest.raises(BuildError, match=r"has not answered within 0.2 s"):
            worker.ready()
    finally:
        worker.close()
    worker = turns.StepWorker(["false"], os.environ, core, tmp_path / "log")
    monkeypatch.setattr(turns, "ANSWER_S", 20)
    with pytest.raises(BuildError, match="ended with 1"):
        worker.ready()
    worker.close()


def test_a_group_that_does_not_start_or_end_says_so_and_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_pd.bench.dp.group.STOP_S", 0.3)

    def start(arguments, pipes, log):
        return subprocess.Popen(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/child; wait"], pass_fds=pipes,
                                start_new_session=True)

    group = Group(tmp_path, 2, start=start)
    with pytest.raises(GroupError, match="2 ranks is not up after 0.2 s"):
        group.ready(0.2)
    deadline = time.monotonic() + 10
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    group.close()
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_a_script_has_started(number):
    text = ("import contextlib, time\nfrom vllm_pd.bench.servers import exit_on_signals\nexit_on_signals()\n"
            "with contextlib.ExitStack() as stack:\n    stack.callback(print, 'ended')\n    print('up', flush=True)\n"
            "    time.sleep(60)")
    script = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert script.stdout.readline() == "up\n"
    script.send_signal(number)
    assert script.communicate(timeout=20)[0] == "ended\n" and script.returncode == 128 + number


def test_both_scripts_end_by_signals_in_this_way():
    for name in ("bench_v1.py", "compare_connectors.py"):
        assert "    exit_on_signals()\n" in (Path(bench_v1.__file__).parent / name).read_text()


def test_b80_arguments_that_can_not_be_used_are_named(tmp_path):
    assert argument_count("2") == 2 and argument_file(str(tmp_path / "a")) == tmp_path / "a"
    for text in ("0", "-1", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' can't be used: write a whole number"):
            argument_count(text)
    with pytest.raises(argparse.ArgumentTypeError, match="no/such' can't be used: there is no such folder: make it"):
        argument_file(str(tmp_path / "no" / "such"))


def test_b80_scripts_look_at_their_files_before_they_measure(tmp_path):
    folder = Path(bench_v1.__file__).parent
    for script, option in (("bench_step", "--json"), ("bench_v1", "--json"), ("bench_transfer", "--json"),
                           ("bench_token_major", "--json"), ("bench_layerwise", "--json"), ("bench_store", "--output"),
                           ("bench_index", "--out"), ("bench_tokens", "--output"), ("compare_thresholds", "--out")):
        assert f'add_argument("{option}", type=argument_file' in (folder / f"{script}.py").read_text(), script
    command = [sys.executable, str(folder / "compare_thresholds.py"), "--out", str(tmp_path / "no" / "such")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "argument --out: " in done.stderr and "make it" in done.stderr
