# SPDX-License-Identifier: Apache-2.0
"""The demo's verdict: a different token, a prompt prefilled in the wrong place or a leak is a failure."""

import dataclasses
import json

import demo
import pytest
from _demo import rest
from _demo.questions import DemoCase
from _demo.report import DemoOutcome, DemoReport

from tests.fakes.http_engine import FakeEngine
from vllm_pd.bench.load import GenerationAnswer, GenerationRequest
from vllm_pd.metrics import STAGES

ANSWER = GenerationAnswer("<1><2>", (1, 2), "length", (600, 2), (0.5, 0.6))


def outcome(remote: bool = True, **changes) -> DemoOutcome:
    made = {"case": DemoCase("q", GenerationRequest("x", 2, stream=True), remote),
            "answer": ANSWER, "reference": ANSWER,
            "decisions": [("remote", "length")] if remote else [("local", "threshold")],
            "ends": ["done"] if remote else [], "stages_s": dict.fromkeys(STAGES, 0.1 if remote else 0.0),
            "transfer_bytes": 10**6 if remote else 0}
    return DemoOutcome(**made | changes)


def test_all_well(tmp_path, capsys):
    report = DemoReport([outcome(), outcome(remote=False)], [], 40, 100)
    assert report.good and report.faults == []
    assert report.transfer_gb_per_s == pytest.approx(0.01)
    report.show()
    shown = capsys.readouterr().out
    assert "2 of 2 answers" in shown and "nothing is left over" in shown and "FAULT" not in shown
    assert json.loads(json.dumps(report.as_json()))["good"] is True
    report.plot(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000


@pytest.mark.parametrize("changes, fault", [
    ({"answer": dataclasses.replace(ANSWER, token_ids=(1, 3))}, "another answer"),
    ({"answer": dataclasses.replace(ANSWER, text="<1><2> ")}, "another answer"),
    ({"answer": dataclasses.replace(ANSWER, finish_reason="stop")}, "another answer"),
    ({"answer": dataclasses.replace(ANSWER, usage=(600, 3))}, "another answer"),
    ({"ends": ["failed"]}, "prefill engine should have"),
    ({"decisions": [("local", "peer")], "ends": []}, "prefill engine should have"),
    ({"decisions": [("remote", "length"), ("local", "retry")]}, "2 decisions"),
    ({"case": DemoCase("q", GenerationRequest("x", 2), False)}, "decode engine should have"),
])
def test_faults(capsys, changes, fault):
    report = DemoReport([outcome(**changes)], [], 40, 100)
    assert not report.good and fault in report.faults[0]
    report.show()
    assert "FAULT" in capsys.readouterr().out
    json.dumps(report.as_json())


def test_a_leak_is_a_fault(capsys):
    report = DemoReport([outcome()], ["decode engine: vllm:pd_parked_blocks is 3, not 0"], 40, 100)
    assert not report.good and "parked_blocks is 3" in report.faults[0]
    report.show()
    assert "SOMETHING IS left over" in capsys.readouterr().out


def test_counters_tell_what_the_engine_did(monkeypatch):
    monkeypatch.setattr(demo, "NAME", "fake")
    with FakeEngine(max_local=100) as engine:
        long = demo.hand_over(DemoCase("long", GenerationRequest([5] * 200, 4, stream=True), True), engine.url, ANSWER)
        short = demo.hand_over(DemoCase("short", GenerationRequest([5] * 50, 4), False), engine.url, ANSWER)
    assert (long.remote, long.decisions, long.transfer_bytes) == (True, [("remote", "length")], 200_000)
    assert long.stages_s["prefill"] == pytest.approx(0.02)
    assert (short.remote, short.decisions, short.ends) == (False, [("local", "threshold")], [])
    assert not long.answer.same_as(ANSWER)


def test_gauges_that_are_not_zero_are_leaks(monkeypatch):
    with FakeEngine() as engine:
        assert rest.leaks_now({"decode": engine.url}) == []
        monkeypatch.setattr(rest, "MUST_BE_ZERO", ("vllm:pd_decisions_total", ))
        engine.count(5)
        assert rest.leaks_now({"decode": engine.url}) == ["decode engine: vllm:pd_decisions_total is 1, not 0"]
