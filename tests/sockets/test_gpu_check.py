# SPDX-License-Identifier: Apache-2.0
"""scripts/lab/gpu_check.py's harness: a part that fails, hangs or breaks off harms no other one, and all is said."""
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gpu_check
import psutil
import pytest
from _gpu_check.harness import CheckSettings, GpuPart, adopting_orphans, run_part, run_parts
from _gpu_check.results import PartOutcome, PartResult

FAKES = Path(__file__).resolve().parents[1] / "fakes"
PARTS = "gpu_parts:"


def part(target: str, name: str = "part", deadline_s: float = 60.0) -> GpuPart:
    return GpuPart(name, PARTS + target, "", deadline_s, 1.0)


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Iterator[CheckSettings]:
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    with adopting_orphans():
        yield CheckSettings("cpu", str(tmp_path))


@pytest.mark.parametrize("target, outcome, reason, figures", [
    ("fails", "failed", "block 7 is wrong", {"blocks": 3}),
    ("skips", "skipped", "it is Monday", {}),
    ("needs_more", "skipped", "not installed here: no_such_module, nor_this_one", {}),
    ("raises", "failed", "ZeroDivisionError: by nought", {"blocks": 4}),
    ("no_such_part", "failed", "no_such_part", {}),
    ("dies", "failed", "ended with 9 before it had a result; its last lines:\nmy last words", {"blocks": 5}),
    ("dies_after_its_result", "failed", "ended with 11 after its result, which was: passed", {"blocks": 6}),
    ("dies_while_it_writes", "failed", "before it had a result", {}),
])
def test_a_part_that_does_not_pass_says_why(settings, target, outcome, reason, figures):
    result = run_part(part(target), settings, 60.0)
    assert result.outcome == outcome and reason in result.reason and result.figures == figures


def test_a_part_that_passes_has_its_figures_and_knows_its_deadline(settings):
    result = run_part(part("passes"), settings, 60.0)
    assert (result.outcome, result.reason) == (PartOutcome.PASSED, "") and result.took_s > 0
    assert result.figures.pop("left_s") == pytest.approx(60, abs=10)
    assert result.figures == {"device": "cpu", "more": 1}


def test_a_part_that_hangs_is_ended_with_all_that_it_started(settings):
    began_s = time.monotonic()
    result = run_part(part("hangs"), settings, 3.0, stop_s=0.5)
    assert result.outcome is PartOutcome.TIMED_OUT and result.reason.endswith("I hang")
    assert not psutil.pid_exists(result.figures["pid"]) and time.monotonic() - began_s < 60


def test_what_a_part_leaves_running_is_ended(settings):
    result = run_part(part("leaves_a_process"), settings, 60.0)
    assert result.outcome is PartOutcome.PASSED and not psutil.pid_exists(result.figures["pid"])


def test_a_part_is_first_asked_to_end(settings):
    result = run_part(part("ends_when_asked"), settings, 3.0, stop_s=30.0)
    assert result.outcome is PartOutcome.TIMED_OUT and result.figures == {"ended": "in order"}


def test_processes_of_others_are_left_alone(settings):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        run_part(part("passes"), settings, 60.0)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_one_part_does_not_end_the_others_and_the_budget_does(settings):
    found: dict[str, PartResult] = {}

    def keep(name: str, result: PartResult) -> str:
        found[name] = result
        return ""

    parts = [part("dies", "a"), part("passes", "b"), part("passes", "c")._replace(least_s=1000.0)]
    run_parts(parts, settings, 100.0, keep)
    assert [result.outcome for result in found.values()] == ["failed", "passed", "skipped"]
    assert found["b"].figures["left_s"] <= 60 and "of the 100 s" in found["c"].reason


def test_side_by_side_a_part_ends_only_what_it_has_started(settings):
    """The first describes the machine, alone. Then one leaves a process behind, one hangs, and one needs longest."""
    found: dict[str, PartResult] = {}

    def keep(name: str, result: PartResult) -> str:
        found[name] = result
        return ""

    parts = [part("passes", "machine"), part("leaves_a_process", "leaves"), part("hangs", "hangs", deadline_s=6.0),
             part("takes_three_seconds", "long")]
    began_s = time.monotonic()
    run_parts(parts, replace(settings, at_once=True), 100.0, keep)
    assert list(found)[0] == "machine" and time.monotonic() - began_s < 60
    assert {name: str(result.outcome) for name, result in found.items()} == {
        "machine": "passed", "leaves": "passed", "hangs": "timed out", "long": "passed"}
    assert found["long"].figures == {"alive": True}
    assert not any(psutil.pid_exists(found[name].figures["pid"]) for name in ("leaves", "hangs"))


def test_side_by_side_nothing_runs_where_the_first_says_why(settings):
    found: dict[str, PartResult] = {}

    def keep(name: str, result: PartResult) -> str:
        found[name] = result
        return "no GPU"

    run_parts([part("passes", "machine"), part("passes", "a"), part("passes", "b")], replace(settings, at_once=True),
              100.0, keep)
    assert [found[name].reason for name in ("a", "b")] == ["no GPU", "no GPU"]


def test_what_compares_brings_the_stock_engine_along(tmp_path, monkeypatch, capsys):
    _, found, _ = report(tmp_path, monkeypatch, capsys, "--part", "b1", bits="passes", stock="passes", b1="passes")
    assert list(found["parts"]) == [gpu_check.ABOUT, "stock", "b1"]


def report(tmp_path, monkeypatch, capsys, *arguments: str, about: str = "has_gpu", **targets: str):
    """The exit status, the JSON and what was printed of a run with these parts."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setattr(gpu_check, "PARTS", (part(about, gpu_check.ABOUT),
                                             *(part(target, name) for name, target in targets.items())))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path), *arguments])
    status = gpu_check.main()
    return status, json.loads((tmp_path / "gpu_check.json").read_text()), capsys.readouterr().out


def test_the_exit_status_is_0_where_nothing_failed(tmp_path, monkeypatch, capsys):
    status, found, shown = report(tmp_path, monkeypatch, capsys, one="passes", two="skips")
    assert status == found["status"] == 0 and found["device"] == "a GPU"
    assert [one["outcome"] for one in found["parts"].values()] == ["passed", "passed", "skipped"]
    assert "it is Monday" in shown and found["parts"]["two"]["reason"] == "it is Monday"


def test_the_exit_status_is_1_where_a_part_failed(tmp_path, monkeypatch, capsys):
    status, found, _ = report(tmp_path, monkeypatch, capsys, one="fails", two="passes")
    assert status == found["status"] == 1 and found["parts"]["two"]["outcome"] == "passed"


def test_only_the_named_parts_run(tmp_path, monkeypatch, capsys):
    status, found, _ = report(tmp_path, monkeypatch, capsys, "--part", "two", one="fails", two="passes")
    assert status == 0 and list(found["parts"]) == [gpu_check.ABOUT, "two"]


def test_a_machine_without_a_gpu_says_so_and_has_checked_nothing(tmp_path, monkeypatch, capsys):
    status, found, shown = report(tmp_path, monkeypatch, capsys, about="has_no_gpu", one="passes", two="passes")
    assert status == 2 and "nothing was checked" in shown
    assert {one["outcome"] for name, one in found["parts"].items() if name != gpu_check.ABOUT} == {"skipped"}
    assert "there is no GPU" in found["parts"]["one"]["reason"]


def test_without_a_gpu_the_parts_run_on_the_cpu_where_that_is_asked_for(tmp_path, monkeypatch, capsys):
    status, found, _ = report(tmp_path, monkeypatch, capsys, "--device", "cpu", about="has_no_gpu", one="passes")
    assert status == 0 and found["parts"]["one"]["figures"]["device"] == "cpu"


def test_the_report_is_there_after_each_part(tmp_path, monkeypatch):
    settings = CheckSettings("cpu", str(tmp_path))
    growing = gpu_check.GpuReport(settings, 600.0, tmp_path / "gpu_check.json")
    for number in range(3):
        growing.keep(f"part {number}", PartResult(PartOutcome.PASSED))
        assert len(json.loads((tmp_path / "gpu_check.json").read_text())["parts"]) == number + 1
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_check.json"]


def test_the_machine_is_described(tmp_path):
    from _gpu_check.child import PartRun
    from _gpu_check.machine import describe

    run = PartRun(CheckSettings("cpu", str(tmp_path)), tmp_path / "machine.json", 60.0)
    describe(run)
    assert run.figures["versions"]["torch"] and run.figures["device"] and run.figures["cores"] >= 1
    assert run.figures["gpu"] is False or run.figures["memory_gib"] > 0


def test_the_parts_that_are_listed_exist():
    import importlib
    for one in gpu_check.PARTS:
        module, _, function = one.target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), one.target
        assert one.least_s < one.deadline_s < gpu_check.BUDGET_S
