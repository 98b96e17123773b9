# SPDX-License-Identifier: Apache-2.0
"""B119: `vllm-pd doctor --try URL` at servers that answer as an engine, a router, or something else does."""
import json
import sys
from typing import Any

import pytest

from tests.fakes.page_server import PageServer, Reply
from vllm_pd import cli
from vllm_pd.ops import trial_requests
from vllm_pd.ops.trial import ANSWER_TOKENS
from vllm_pd.rpc.ports import take_free

P = "ab" * 16
TOKENS = list(range(40, 40 + ANSWER_TOKENS))


class FakeVllm:
    """A decode engine. `stays`: why it computes everything itself. `refuses_salt`: as V0 does. `spoiled`: the token
    that comes after a remote prefill in place of the third one. `late`: how often it is asked about a request before it
    has measured it. `known`: whether it remembers requests. `key`: which it asks for."""

    def __init__(self, **changes: Any) -> None:
        self.stays, self.refuses_salt, self.spoiled, self.late, self.known, self.key = "", False, None, 0, True, None
        self.models = [{"id": "m", "root": "/m", "max_model_len": 4096}]
        self.pages: dict[str, Reply | None] = {}
        self.served: dict[str, dict] = {}  # by request id: the body
        self.bodies: list[dict] = []
        self.asked_paths: list[str] = []
        for name, value in changes.items():
            assert name in vars(self), name
            setattr(self, name, value)

    def __call__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply | None:
        self.asked_paths.append(path)
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return Reply({"error": "Unauthorized"}, 401)
        if path in self.pages:
            return self.pages[path]
        if path == "/v1/models":
            return Reply({"object": "list", "data": self.models})
        if path == "/version":
            return Reply({"version": "0.32.0"})
        if path == "/pd/status":
            return Reply({"incarnation": "d" * 32, "degraded": "peer: nobody is there" if self.stays else None})
        if path == "/tokenize":
            words = json.loads(body)["prompt"].split()
            return Reply({"tokens": [1, *map(int, words)], "count": len(words) + 1})
        if path == "/v1/completions":
            return self._complete(json.loads(body), headers["x-request-id"])
        return self._report(path.removeprefix("/pd/prompts/")) if path.startswith("/pd/prompts/") else None

    def _complete(self, body: dict, name: str) -> Reply:
        self.bodies.append(body)
        if "cache_salt" in body and self.refuses_salt:
            return Reply({"message": "Parameter 'cache_salt' is not supported with this instance"}, 400)
        self.served[name] = body
        tokens = list(TOKENS)
        if body["kv_transfer_params"]["pd"] == "remote" and self.spoiled is not None:
            tokens[2] = self.spoiled
        top = [{f"token_id:{one}": -0.1, "token_id:9": -5.0} for one in tokens]
        return Reply({"choices": [{"text": "", "logprobs": {"tokens": [f"token_id:{one}" for one in tokens],
                                                            "top_logprobs": top}}]})

    def _report(self, name: str) -> Reply | None:
        body = self.served.get(name)
        if body is None or not self.known:
            return None
        report = {"request_id": f"cmpl-{name}-0", "tokens": len(body["prompt"]), "asked": "remote", "reason": "asked",
                  "decision": "remote", "attempts": 1, "peer": P, "address": "tcp://127.0.0.1:9", "outcome": "done",
                  "timings": {"queue_s": 0.002, "bytes": 1000000, "transfer_s": 0.01, "measured": self.late <= 0},
                  "first_step_s": 0.1}
        self.late -= 1
        stayed = {"tokens": len(body["prompt"]), "decision": "local", "reason": self.stays}
        return Reply(stayed if self.stays else report)


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["vllm-pd", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize("refuses_salt", [False, True])
def test_a_prompt_by_a_prefill_engine_and_without_one(monkeypatch, capsys, refuses_salt):
    """The second request uses nothing that the first one has left in the cache."""
    engine = FakeVllm(refuses_salt=refuses_salt, late=2)
    with PageServer(engine) as server:
        status, out, _ = run(monkeypatch, capsys, "--try", f"{server.url}/v1/", "--prompt-tokens", "300")
    assert status == 0 and "BAD" not in out, out
    assert P[:12] in out and "300 tokens" in out and "queue 2.0 ms" in out and f"all {ANSWER_TOKENS}" in out
    remote, *_, local = engine.bodies
    assert remote["prompt"] == local["prompt"] and len(remote["prompt"]) == 300 and remote["temperature"] == 0
    assert remote["kv_transfer_params"] == {"pd": "remote"} and local["kv_transfer_params"] == {"pd": "local"}
    assert "cache_salt" not in remote and "prompt_logprobs" not in remote, "it could not go remote"
    assert ("prompt_logprobs" in local) is refuses_salt and ("cache_salt" in local) is not refuses_salt
    again = FakeVllm()
    with PageServer(again) as server:
        run(monkeypatch, capsys, "--try", server.url, "--prompt-tokens", "300")
    assert again.bodies[0]["prompt"][:20] != remote["prompt"][:20], "no prompt is in a cache"


def test_other_tokens(monkeypatch, capsys):
    with PageServer(FakeVllm(spoiled=9)) as server:
        status, out, _ = run(monkeypatch, capsys, "--try", server.url)
    assert status == 1 and f"token 3 is 9 after the remote prefill, and {TOKENS[2]}" in out and "4.9" in out


def test_a_prompt_that_stays_has_a_reason_and_a_cure(monkeypatch, capsys):
    engine = FakeVllm(stays="peer")
    with PageServer(engine) as server:
        status, out, _ = run(monkeypatch, capsys, "--try", server.url)
    assert status == 1 and "reason peer; the engine is degraded, peer: nobody is there" in out
    assert "-> start a prefill engine" in out and len(engine.bodies) == 1, "there is nothing to compare"


def test_behind_a_router_the_engine_is_asked_that_had_the_request(monkeypatch, capsys):
    engine = FakeVllm(key="of-engines")
    with PageServer(engine) as worker:
        def route(method, path, headers, body):
            if path == "/workers":
                return Reply({"workers": []})
            reply = engine(method, path, {**headers, "authorization": "Bearer of-engines"}, body)
            explained = {"X-Vllm-Pd-Worker": worker.url} if "x-vllm-pd-explain" in headers else {}
            return Reply(reply.body, reply.status, explained) if not path.startswith("/pd/") else None

        with PageServer(route) as router:
            refused, out, _ = run(monkeypatch, capsys, "--try", router.url)
            status, well, _ = run(monkeypatch, capsys, "--try", router.url, "--worker-api-key", "of-engines")
    assert refused == 1 and "asks for a key" in out and "--worker-api-key" in out
    assert status == 0 and f"router {router.url}" in well, well


@pytest.mark.parametrize("named", [{}, {"X-Vllm-Pd-Worker": "http://["}, {"X-Vllm-Pd-Worker": "file:///etc/passwd"}])
def test_a_router_that_names_no_engine(monkeypatch, capsys, named):
    engine = FakeVllm()

    def route(method, path, headers, body):
        reply = Reply({"workers": []}) if path == "/workers" else engine(method, path, headers, body)
        return Reply(reply.body, reply.status, named)

    with PageServer(route) as router:
        status, out, _ = run(monkeypatch, capsys, "--try", router.url)
    assert status == 1 and "does not say which engine" in out


@pytest.mark.parametrize("changes, pages, said", [
    ({}, {"/pd/status": None}, ["vLLM without disaggregation", "-> start it with --kv-transfer-config '{\"kv_conn"]),
    ({}, {"/pd/status": None, "/version": None}, ["is no vLLM", "-> write the URL of a decode engine"]),
    ({}, {"/v1/models": None}, ["is not what a vLLM answers: 404"]),
    ({}, {"/v1/models": Reply(b"<html>hello</html>")}, ["is not what a vLLM answers: 200, <html>hello"]),
    ({}, {"/v1/models": Reply(b"\xff")}, ["is not what a vLLM answers"]),
    ({}, {"/v1/models": Reply(b"x" * (5 << 20))}, ["more than 4 MiB"]),
    ({"key": "k"}, {}, ["asks for a key", "--api-key"]),
    ({}, {"/tokenize": Reply({"tokens": [1]})}, ["/tokenize makes 1 tokens"]),
    ({}, {"/v1/completions": Reply({"error": "it is being drained"}, 503)}, ["503", "being drained", "vllm-pd status"]),
    ({}, {"/v1/completions": Reply({"choices": []})}, ["not a completion"]),
    ({}, {"/v1/completions": Reply(b'\x1b[2J\r\nok')}, ["\\x1b[2J"]),
    ({"known": False}, {}, ["does not know this request", "X-Request-Id"]),
])
def test_what_is_no_engine_of_ours_is_named_with_the_cure(monkeypatch, capsys, changes, pages, said):
    monkeypatch.setattr(trial_requests, "COUNTED_S", 0.3)
    engine = FakeVllm(**changes, pages=pages)
    with PageServer(engine) as server:
        status, out, _ = run(monkeypatch, capsys, "--try", server.url)
    assert status == 1 and "BAD" in out and "Traceback" not in out
    assert all(part in out for part in said), out
    assert all(line.isprintable() for line in out.splitlines())


def test_a_key_of_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    with PageServer(FakeVllm(key="k")) as server:
        assert run(monkeypatch, capsys, "--try", server.url)[0] == 0


def test_nobody_listens_or_answers(monkeypatch, capsys):
    status, out, _ = run(monkeypatch, capsys, "--try", f"http://127.0.0.1:{take_free('127.0.0.1')}")
    assert status == 1 and "Connect call failed" in out and "-> start the engine" in out
    monkeypatch.setattr(trial_requests, "PAGE_S", 0.3)
    for reply in (Reply(delay_s=60.0), Reply(b"x" * 1000, drip=True)):
        with PageServer(lambda *_, reply=reply: reply) as server:
            status, out, _ = run(monkeypatch, capsys, "--try", server.url)
        assert status == 1 and "no answer within 0.3 s" in out
    with PageServer(FakeVllm(pages={"/v1/completions": Reply(delay_s=60.0)})) as server:
        status, out, _ = run(monkeypatch, capsys, "--try", server.url, "--answer-timeout-s", "0.2")
    assert status == 1 and "/v1/completions: no answer within 0.2 s" in out


@pytest.mark.parametrize("arguments, key", [
    (["--try", "no url"], "--try"), (["--try", "http://h:1", "--broker", "tcp://127.0.0.1:1"], "--try"),
    (["--try", "http://h:1", "--from", "e"], "--try"), (["--try", "http://h:1", "--port", "1"], "--try"),
    (["--try", "http://h:1", "--api-key", "\n"], "--api-key"), (["--prompt-tokens", "3"], "--prompt-tokens")])
def test_options_that_can_not_be_used(monkeypatch, capsys, arguments, key):
    status, out, error = run(monkeypatch, capsys, *arguments)
    assert status == 2 and not out and error.startswith(f"error: {key}=") and error.count("\n") == 1


@pytest.mark.parametrize("models, arguments, said", [
    ([{"id": "a", "root": "/a"}, {"id": "b", "root": "/b"}], [], "--model=None can't be used: write one of a, b"),
    ([{"id": "a", "max_model_len": 512}], ["--prompt-tokens", "500"], "write 496 or less")])
def test_what_the_model_does_not_take(monkeypatch, capsys, models, arguments, said):
    engine = FakeVllm(models=models)
    with PageServer(engine) as server:
        status, _, error = run(monkeypatch, capsys, "--try", server.url, *arguments)
        assert status == 2 and said in error and not engine.bodies
        assert run(monkeypatch, capsys, "--try", server.url, "--model", "a")[0] == 0
