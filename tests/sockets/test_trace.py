# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd trace` at servers that answer as engines do, or as nothing does."""
import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.fakes.page_server import PageServer, Reply
from tests.waiting import wait_for
from vllm_pd import cli
from vllm_pd.ops import trace
from vllm_pd.rpc.ports import take_free

D, P = "d" * 32, "p" * 32


class FakeEngine:
    """A server with one rank. Each question finds one prompt more, decided about a moment ago. `key`: which it asks
    for; `answer`: what it says in place of all that."""

    def __init__(self, name: str, key: str | None = None, answer: Reply | None = None) -> None:
        self.name, self.key, self.answer = name, key, answer
        self.asked: list[float] = []  # when

    def __call__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply | None:
        assert (method, path) == ("GET", "/pd/prompts")
        now = time.monotonic()
        self.asked.append(now)
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return Reply({"error": "Unauthorized"}, 401)
        if self.answer is not None:
            return self.answer
        prompts = [{"request_id": f"cmpl-{number}-0", "age_s": now - decided_at, "decision": "remote",
                    "reason": "length", "tokens": 9, "peer": P, "outcome": "done", "parked_s": 0.02,
                    "first_step_s": 0.01, "later_release": [1],
                    "timings": {"queue_s": 0.001, "prefill_s": 0.01, "transfer_s": 0.002, "measured": True}}
                   for number, decided_at in enumerate(self.asked)] if self.name == D else []
        return Reply({"ranks": [{"incarnation": self.name, "role": "kv_both", "prompts": prompts}]})


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["vllm-pd", "trace", "--seconds", "0.9", *arguments])
    try:
        cli.main()
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    said = capsys.readouterr()
    return status, said.out, said.err


def state_of(folder, decode: list[str], prefill: list[str]) -> str:
    """The state file of a fleet with these engines."""
    path = folder / "state.json"
    path.write_text(json.dumps({"engines": [{"role": role, "url": url} for role, urls in (
        ("decode", decode), ("prefill", prefill)) for url in urls]}))
    return str(path)


def test_a_fleet_for_some_seconds(monkeypatch, capsys, tmp_path):
    output = tmp_path / "x.json"
    with PageServer(FakeEngine(D)) as d, PageServer(FakeEngine(P)) as p:
        state = state_of(tmp_path, [d.url], [p.url])
        status, out, _ = run(monkeypatch, capsys, "--state", state, "--output", str(output))
    assert status == 0 and "reading 2 engines" in out and "of 2 engines" in out and "perfetto" in out, out
    events = json.loads(output.read_text())["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    assert sorted(name.split()[1] for name in names.values()) == [D[:12], P[:12]]
    jobs = [one for one in events if one["name"].startswith("job: ")]
    assert len(jobs) >= 2 and all(P[:12] in names[one["pid"]] for one in jobs)
    assert len({one["name"] for one in jobs}) == len(jobs), "each once, however often it is reported"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "x.json"], "no unfinished file"


def test_the_engines_that_the_broker_knows(monkeypatch, capsys, tmp_path):
    with PageServer(FakeEngine(D)) as d:
        members = [SimpleNamespace(http=url) for url in (d.url, "", d.url)]
        monkeypatch.setattr(trace, "list_members", lambda broker, timeout_s, access: SimpleNamespace(members=members))
        status, out, _ = run(monkeypatch, capsys, "--broker", "tcp://127.0.0.1:9", "--output", str(tmp_path / "x"))
        assert status == 0 and "reading 1 engine " in out
        members[:] = [SimpleNamespace(http="")]
        status, _, err = run(monkeypatch, capsys, "--broker", "tcp://127.0.0.1:9", "--output", str(tmp_path / "x"))
        assert status == 2 and "--state" in err


@pytest.mark.parametrize("answer, said", [
    (Reply({"a": 1}, 404), "without disaggregation"), (Reply({"a": 1}, 403), "--api-key"),
    (Reply({"a": 1}, 500), "answers 500"), (Reply({"ranks": 7}), "Expected `array`"),
    (Reply({"ranks": [{"incarnation": D, "prompts": [{"request_id": "r"}]}]}), "required field")])
def test_an_engine_that_says_nothing_useful_is_named_once_and_the_others_are_read(monkeypatch, capsys, tmp_path, answer,
                                                                                  said):
    output = tmp_path / "x.json"
    with PageServer(FakeEngine(D)) as d, PageServer(FakeEngine(P, answer=answer)) as p:
        status, out, _ = run(monkeypatch, capsys, "--state", state_of(tmp_path, [d.url], [p.url]), "--output",
                             str(output))
    assert status == 0 and out.count(p.url) == 1 and said in out and "of 1 engines" in out, out


def test_no_engine_that_answers(monkeypatch, capsys, tmp_path):
    free = take_free("127.0.0.1")
    state = state_of(tmp_path, [f"http://127.0.0.1:{free}"], [])
    status, out, err = run(monkeypatch, capsys, "--state", state, "--output", str(tmp_path / "x"))
    assert status == 2 and "none of 1" in err and str(free) in out
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_an_engine_that_does_not_answer_is_named_and_holds_the_others_up_for_no_longer_than_a_question(
        monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(trace, "PAGE_S", 0.3)
    output = tmp_path / "x.json"
    with PageServer(FakeEngine(D)) as d, PageServer(FakeEngine(P, answer=Reply({}, delay_s=30.0))) as p:
        status, out, _ = run(monkeypatch, capsys, "--state", state_of(tmp_path, [d.url], [p.url]), "--output",
                             str(output))
    assert status == 0 and f"{p.url}: no answer in 0.3 s" in out and out.count(p.url) == 1, out
    assert [one for one in json.loads(output.read_text())["traceEvents"] if one["name"].startswith("job: ")]


@pytest.mark.parametrize("delay_s", [0.0, 30.0], ids=["between two questions", "in a question"])
def test_ctrl_c_ends_it_with_what_there_is(tmp_path, delay_s):
    engine = FakeEngine(D)
    output = tmp_path / "x.json"
    with PageServer(engine) as d, PageServer(FakeEngine(P, answer=Reply({"ranks": []}, delay_s=delay_s))) as p:
        state = state_of(tmp_path, [d.url], [p.url])
        child = subprocess.Popen([sys.executable, "-m", "vllm_pd.cli", "trace", "--seconds", "300", "--state", state,
                                  "--output", str(output)], stdout=subprocess.PIPE, text=True)
        wait_for(lambda: len(engine.asked) >= 2, "it reads")
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and "of 1 engines" in out or "of 2 engines" in out, out
    assert json.loads(output.read_text())["traceEvents"] and output.stat().st_mode & 0o777 == 0o600


def test_keys(monkeypatch, capsys, tmp_path):
    with PageServer(FakeEngine(D, key="k")) as d:
        arguments = "--state", state_of(tmp_path, [d.url], []), "--output", str(tmp_path / "x")
        status, out, _ = run(monkeypatch, capsys, *arguments)
        assert status == 2 and "--api-key" in out
        assert run(monkeypatch, capsys, *arguments, "--api-key", "k")[0] == 0


@pytest.mark.parametrize("arguments, key", [
    (("--broker", "tcp://127.0.0.1:9", "--seconds", "nan"), "--seconds"),
    (("--broker", "tcp://127.0.0.1:9", "--seconds", "0"), "--seconds"),
    (("--broker", "tcp://127.0.0.1:9", "--output", "/nowhere/x.json"), "--output"),
    (("--broker", "tcp://127.0.0.1:9", "--output", "."), "--output"),
    (("--broker", "tcp://127.0.0.1:9", "--output", "/dev/null"), "--output"),
    ((), "--broker"), (("--broker", "tcp://127.0.0.1:9", "--state", "x"), "--broker"),
    (("--state", "/nowhere"), "--state")])
def test_what_can_t_be_used_is_said_at_once(monkeypatch, capsys, tmp_path, arguments, key):
    monkeypatch.chdir(tmp_path)
    status, _, err = run(monkeypatch, capsys, *arguments)
    assert status == 2 and f"error: {key}=" in err
