# SPDX-License-Identifier: Apache-2.0
"""The demo's verdict: a different token, a prompt prefilled in the wrong place or a leak is a failure."""

import dataclasses
import json

import demo
import pytest
from _demo import pause, rest
from _demo.pause import PauseComparison, PauseTrial
from _demo.questions import DemoCase
from _demo.report import DemoOutcome, DemoReport

from tests.fakes.http_engine import FakeEngine
from vllm_pd.bench.load import GenerationAnswer, GenerationRequest
from vllm_pd.bench.serve.drive import ServedLoad, ServedRequest
from vllm_pd.bench.serve.traffic import PromptKind
from vllm_pd.handover.metrics import STAGES

ANSWER = GenerationAnswer("<1><2>", (1, 2), "length", (600, 2), (0.5, 0.6))


def outcome(remote: bool = True, **changes) -> DemoOutcome:
    made = {"case": DemoCase("q", GenerationRequest("x", 2, stream=True), remote),
            "answer": ANSWER, "reference": ANSWER,
            "decisions": [("remote", "length")] if remote else [("local", "threshold")],
            "ends": ["done"] if remote else [], "stages_s": dict.fromkeys(STAGES, 0.1 if remote else 0.0),
            "transfer_bytes": 10**6 if remote else 0}
    return DemoOutcome(**made | changes)


def trial(running_s: tuple[float, ...] = (0.1, 0.2, 3.2, 3.3), at_s: float = 1.0, first_s: float = 2.1,
          ids: tuple[int, ...] = (7, 8), error: str = "") -> PauseTrial:
    """A running answer with tokens at these times, and a chapter that is sent at `at_s` and has its first token
    `first_s` later."""
    running = GenerationAnswer("t", ids, "length", (9, 5), running_s, running_s[-1])
    chapter = GenerationAnswer("c", (1, ), "length", (1200, 1), (first_s, ), first_s)
    return PauseTrial(ServedLoad((
        ServedRequest("running answer", PromptKind.SHORT, 0.0, None if error else running, error),
        ServedRequest("chapter", PromptKind.LONG, at_s, chapter)), 4.0))


PAUSES = PauseComparison(trial((0.1, 0.2, 1.4, 1.5, 3.2)), trial(), remote=1)


@pytest.mark.parametrize("running_s, longest_s, outlasted", [
    ((0.1, 0.2, 3.2, 3.3), 3.0, True),  # it begins before the chapter comes, and ends after its first token
    ((0.1, 0.9, 1.3, 3.0, 3.05, 9.0), 5.95, True),  # the last one overlaps the first token at 3.1
    ((0.1, 0.9, 1.3, 1.5, 3.2, 9.0), 1.7, True),  # 9.0 comes later
    ((0.1, 0.95, 0.99, 1.5, 1.6), 0.51, False),
    ((0.1, 0.2, 0.9), None, False), ((3.5, 3.6), None, True), ((0.4, ), None, False),
])
def test_the_longest_pause_is_that_beside_the_chapter(running_s, longest_s, outlasted):
    one = trial(running_s)
    assert one.outlasted is outlasted
    assert one.longest_s == (None if longest_s is None else pytest.approx(longest_s))


def test_the_last_line_says_both_pauses(tmp_path):
    assert PAUSES.line() == ("while a chapter of 1,200 tokens is prefilled, the longest pause of a running answer is "
                             "1.70 s with PD and 3.00 s without, on the same cores")
    assert "0.51 s (it ended before the chapter's first token) with PD" in dataclasses.replace(
        PAUSES, pd=trial((0.1, 0.95, 0.99, 1.5, 1.6))).line()
    PAUSES.plot(tmp_path / "pause.png")
    assert (tmp_path / "pause.png").stat().st_size > 10_000
    assert json.loads(json.dumps(PAUSES.as_json()))["off"]["timeline"]["long"] == [[1.0, 3.1]]


@pytest.mark.parametrize("changes, fault", [
    ({"pd": trial(ids=(7, 9))}, "the running answer differs"),
    ({"remote": 0}, "0 prompts were prefilled remotely"), ({"remote": 2}, "2 prompts were prefilled remotely"),
    ({"off": trial(error="it broke")}, "PD off: running answer: it broke"),
    ({"pd": trial(error="it broke")}, "PD: running answer: it broke"),
])
def test_what_goes_wrong_beside_the_chapter_is_a_fault(tmp_path, capsys, changes, fault):
    found = dataclasses.replace(PAUSES, **changes)
    report = DemoReport([outcome()], [], 40, 100, found)
    assert not report.good and fault in report.faults[0]
    report.show()
    assert "FAULT" in capsys.readouterr().out and found.line()
    found.plot(tmp_path / "pause.png")
    json.dumps(report.as_json())


def test_the_chapter_comes_while_the_answer_is_running(monkeypatch):
    monkeypatch.setattr(demo, "NAME", "fake")
    for name, value in (("RUNNING_TOKENS", 4), ("CHAPTER_ANSWER_TOKENS", 4), ("LEAD_S", 0.2)):
        monkeypatch.setattr(pause, name, value)
    with FakeEngine(max_local=100, gap_s=0.2) as engine:
        one, remote = demo.pause_with_pd(engine.url, ["a story", 200 * "chapter "])
    assert remote == 1 and one.failed == []
    running, chapter = one.served.requests
    assert (running.kind, chapter.kind) == (PromptKind.SHORT, PromptKind.LONG)
    assert 0.2 <= chapter.at_s < running.answer.arrivals_s[-1]
    assert one.longest_s >= 0.15 and one.chapter_tokens == 1600  # of gaps of 0.2 s, as they were read
    assert all(body["stream"] and body["ignore_eos"] for body in engine.bodies)


def test_all_well(tmp_path, capsys):
    report = DemoReport([outcome(), outcome(remote=False)], [], 40, 100, PAUSES)
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
    report = DemoReport([outcome(**changes)], [], 40, 100, PAUSES)
    assert not report.good and fault in report.faults[0]
    report.show()
    assert "FAULT" in capsys.readouterr().out
    json.dumps(report.as_json())


def test_a_leak_is_a_fault(capsys):
    report = DemoReport([outcome()], ["decode engine: vllm:pd_parked_blocks is 3, not 0"], 40, 100, PAUSES)
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
