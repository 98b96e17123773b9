# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/lab/gpu_check.py that have engines, beside servers that stand in for them."""
import contextlib
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from _gpu_check import deaths, engines
from _gpu_check.child import PartRun
from _gpu_check.engines import EngineVariant, RunningPair
from _gpu_check.harness import ANSWERS, CheckSettings
from _gpu_check.results import PartFailed, PartOutcome, PartResult, PartSkipped

from tests.fakes.http_engine import FakeEngine
from tests.waiting import wait_for
from vllm_pd.bench.serve.arms import ArmKind
from vllm_pd.broker import members
from vllm_pd.protocol.messages import Role

RIGHT = (11, 12, 13)
VARIANT = EngineVariant({"GPU_CHECK_TEST": "1"}, ("--flag", ), needs={"layout": "heads"}, lines=("graphs", ))


class FakeFleets:
    """In place of `engines.started`. `pd`: how the decode engine differs from the stock one."""

    def __init__(self, **pd) -> None:
        self.pd = pd
        self.asked: list[tuple[ArmKind, tuple[str, ...]]] = []

    @contextlib.contextmanager
    def started(self, run, arm, arguments, pd=None):
        self.asked.append((arm.kind, tuple(arguments)))
        with contextlib.ExitStack() as stack:
            count = 1 if arm.kind is ArmKind.SINGLE else 2
            about = {"token_ids": RIGHT, "first_s": 0.0, "gap_s": 0.0, "late_s": 0.01, "max_local": 40}
            found = [stack.enter_context(FakeEngine(**about | (self.pd if arm.kind is ArmKind.PD else {})))
                     for _ in range(count)]
            lines = [("decode 0", "with graphs"), ("prefill 0", "with graphs")]
            yield RunningPair([one.url for one in found], (1, 2), "tcp://127.0.0.1:9", lines)


@pytest.fixture
def run(tmp_path, monkeypatch) -> PartRun:
    monkeypatch.setenv("GPU_CHECK_TEST", "")
    print_ = SimpleNamespace(layout="kv-heads-first", engine="vllm", dtype="half", kv_dtype="half", block_size=16)
    listed = members.MemberList((SimpleNamespace(role=Role.DECODE, fingerprint=print_),
                                 SimpleNamespace(role=Role.PREFILL, fingerprint=print_)), 0)
    monkeypatch.setattr(members, "list_members", lambda broker: listed)
    return PartRun(CheckSettings("cpu", str(tmp_path)), tmp_path / "part.json", 60.0)


def fleets(monkeypatch, **pd) -> FakeFleets:
    found = FakeFleets(**pd)
    monkeypatch.setattr(engines, "started", found.started)
    return found


def test_b1_a_pair_that_says_what_the_stock_engine_says_passes(run, monkeypatch):
    found = fleets(monkeypatch)
    engines.stock_answers(run, 6, v1=True)
    engines.check_pair(run, VARIANT, 6)
    assert (run.figures["prompts"], run.figures["wrong"], run.figures["remote"]) == (6, [], 6)
    assert run.figures["engines"]["prefill"]["layout"] == "kv-heads-first"
    assert found.asked == [(ArmKind.SINGLE, ("--enforce-eager", )), (ArmKind.PD, ("--flag", ))]
    assert run.figures["runner_v2"] is False and run.figures["metrics"]["vllm:pd_attempts_total{outcome=done}"] >= 6
    engines.check_pair(run, VARIANT, 4)
    assert len(found.asked) == 3, "a stock engine is started once"


def test_parts_that_compare_are_left_out_without_answers(run, monkeypatch):
    found = fleets(monkeypatch)
    with pytest.raises(PartSkipped, match="no answers of a stock engine: see part stock"):
        engines.check_pair(run, VARIANT, 3)
    assert not found.asked, "nothing was started"


def test_side_by_side_they_wait_for_the_answers_and_no_longer_than_the_stock_engine_lives(run, monkeypatch):
    fleets(monkeypatch)
    at_once = PartRun(replace(run.settings, at_once=True), run.file, 60.0)
    stock = PartRun(run.settings, run.file.with_name("stock.json"), 60.0)
    stock.note()
    timer = threading.Timer(1.0, lambda: engines.stock_answers(stock, 3, v1=True))
    timer.start()
    engines.check_pair(at_once, VARIANT, 3)
    timer.join()
    assert at_once.figures["prompts"] == 3
    (engines.Path(run.settings.out) / ANSWERS).unlink()
    stock.write(PartResult(PartOutcome.FAILED, "no memory"))
    with pytest.raises(PartSkipped, match="see part stock"):
        engines.check_pair(at_once, VARIANT, 3)


def test_b1_another_token_is_found(run, monkeypatch):
    fleets(monkeypatch, token_ids=(11, 12, 14))
    engines.stock_answers(run, 3, v1=True)
    with pytest.raises(PartFailed, match="3 of 3 answers differ"):
        engines.check_pair(run, VARIANT, 3)
    assert run.figures["wrong"] == [0, 1, 2]


def test_b1_prompts_that_stay_local_are_found(run, monkeypatch):
    """The first that does go remote is the warm-up's, of 200 tokens."""
    fleets(monkeypatch, max_local=199)
    monkeypatch.setattr(engines, "PROMPT_TOKENS", (50, 90))
    engines.stock_answers(run, 3, v1=True)
    count = engines.await_count
    monkeypatch.setattr(engines, "await_count", lambda one, wanted, timeout_s=1.0: count(one, wanted, 1.0))
    with pytest.raises(PartFailed, match="0 of 3 prompts were prefilled remotely"):
        engines.check_pair(run, VARIANT, 3)


def test_engines_that_do_not_find_each_other_are_found(run, monkeypatch):
    fleets(monkeypatch, max_local=10_000)
    monkeypatch.setattr(engines, "PAIR_S", 0.1)
    engines.stock_answers(run, 3, v1=True)
    with pytest.raises(PartFailed, match="no prompt was prefilled remotely within 0.1 s; registered"):
        engines.check_pair(run, VARIANT, 3)


def test_prompts_whose_answer_a_rounding_could_change_do_not_count(run, monkeypatch):
    fleets(monkeypatch)
    monkeypatch.setitem(engines.MARGINS, "cpu", 4.8)
    engines.stock_answers(run, 3, v1=True)
    assert len(engines.known_answers(run, 3)) == 3
    (engines.Path(run.settings.out) / ANSWERS).unlink()
    monkeypatch.setitem(engines.MARGINS, "cpu", 5.0)
    with pytest.raises(PartFailed, match="only 0 prompts"):
        engines.stock_answers(run, 3, v1=True)


@pytest.fixture
def killed(monkeypatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(deaths, "kill_with_children", found.append)
    monkeypatch.setattr(deaths, "prepare", lambda run: True)
    monkeypatch.setattr(deaths, "attempts_lost", lambda url: len(found))
    return found


def test_the_prefill_engine_is_killed_once_and_in_the_middle(run, monkeypatch, killed):
    fleets(monkeypatch, first_s=0.3)
    eight = PartRun(replace(run.settings, prompts=8), run.file, 60.0)
    engines.stock_answers(eight, 8, v1=True)
    deaths.check_death(eight)
    assert killed == [2] and eight.figures["wrong"] == []
    assert eight.figures["asked_before"] == 2 and eight.figures["interrupted"] == 1


def test_a_death_that_interrupts_nothing_shows_nothing(run, monkeypatch, killed):
    fleets(monkeypatch)
    four = PartRun(replace(run.settings, prompts=4), run.file, 60.0)
    engines.stock_answers(four, 4, v1=True)
    monkeypatch.setattr(deaths, "attempts_lost", lambda url: 0)
    with pytest.raises(PartFailed, match="nothing was under way"):
        deaths.check_death(four)


def test_a_wrong_answer_after_the_death_is_found(run, monkeypatch, killed):
    fleets(monkeypatch, token_ids=(11, 12, 14), first_s=0.3)
    engines.stock_answers(PartRun(replace(run.settings, prompts=3), run.file, 60.0), 3, v1=True)
    with pytest.raises(PartFailed, match="3 of 3 answers differ"):
        deaths.check_death(PartRun(replace(run.settings, prompts=3), run.file, 60.0))


def test_a_process_is_killed_with_all_below_it():
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as top:
        child = psutil.Process(int(top.stdout.readline()))
        deaths.kill_with_children(top.pid)
        assert top.wait(10) == -signal.SIGKILL
        wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child lives")
