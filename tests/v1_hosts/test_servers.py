# SPDX-License-Identifier: Apache-2.0
"""B40, B105, B107: two servers of engine V1 on machines of their own, a router and an operator on two others, set up by
the words of docs/configuration.md ("Beyond one machine")."""
from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.fleet import ROOT, VLLM_PD, Fleet
from tests.hosts.rack import Host, Rack
from tests.verdict import Leak, TokenIds, WrongAnswer
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
MODEL = "tiny"
START_S, ANSWER_S, BACK_S = 600.0, 120.0, 40.0
PROMPT_TOKENS, ANSWER_TOKENS = 600, 8
SLOW = "1mbit"  # at which a prompt's KV takes seconds
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "VLLM_CPU_CI_ENV": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
               "VLLM_LOGGING_STREAM": "ext://sys.stderr", "GLOO_SOCKET_IFNAME": "eth0"}
PD = {"bind": "auto", "max_local_prefill_tokens": 32, "lease_s": 8.0}
REQUEST = """import sys, urllib.request
url, body, timeout_s = sys.argv[1:]
asked = urllib.request.Request(url, body.encode() or None, {"Content-Type": "application/json"})
with urllib.request.urlopen(asked, timeout=float(timeout_s)) as answer:
    sys.stdout.buffer.write(answer.read())"""


def ask(host: Host, url: str, body: dict | None = None, timeout_s: float = 20.0) -> str:
    """What a server answers a client on that host. Raises CalledProcessError where it does not."""
    return host.run(sys.executable, "-c", REQUEST, url, "" if body is None else json.dumps(body), str(timeout_s),
                    timeout_s=timeout_s + 10.0)


class Server:
    """`vllm serve` with these flags, and settings of ours, on a host, which also has its clients."""

    def __init__(self, host: Host, fleet: Fleet, role: str, *flags: str, **settings: object) -> None:
        self.host, self._url = host, f"http://{host.ip}:8000"
        pd = {"kv_connector": "PDConnector", "kv_role": role,
              "kv_connector_extra_config": {"broker": fleet.url, "keys": str(fleet.keys), **PD, **settings}}
        self._log = host.folder / "server.log"
        host.start([str(Path(sys.executable).with_name("vllm")), "serve", os.environ["VLLM_PD_TINY_MODEL"], "--host",
                    host.ip, "--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "2048",
                    "--enforce-eager", "--num-gpu-blocks-override", "512", "--kv-transfer-config", json.dumps(pd),
                    *flags],
                   subprocess.DEVNULL, self._log, {**ENVIRONMENT, "VLLM_HOST_IP": host.ip})

    def ready(self) -> Server:
        """Wait until it answers."""
        def answers() -> bool:
            try:
                return MODEL in ask(self.host, f"{self._url}/v1/models")
            except subprocess.CalledProcessError:
                return False
        wait_for(answers, lambda: f"{self.host.name}: {self.said()[-2000:]}", START_S, lambda: time.sleep(1.0))
        return self

    def said(self) -> str:
        """Its log."""
        return self._log.read_text()

    def complete(self, tokens: list[int], where: str) -> TokenIds:
        """The greedy tokens that follow; the prompt is to be prefilled "local" or "remote"."""
        body = {"model": MODEL, "prompt": tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "kv_transfer_params": {"pd": where}}
        answer = json.loads(ask(self.host, f"{self._url}/v1/completions", body, ANSWER_S))
        return TokenIds(answer["choices"][0]["token_ids"])

    def gauges(self) -> dict[str, int]:
        """Of /pd/status."""
        return json.loads(ask(self.host, f"{self._url}/pd/status"))["gauges"]

    def done(self) -> int:
        """How many prompts were prefilled elsewhere."""
        lines = ask(self.host, f"{self._url}/metrics").splitlines()
        return int(sum(float(line.split()[-1]) for line in lines
                       if line.startswith("vllm:pd_attempts_total{") and 'outcome="done"' in line))


class Machines:
    """All of it. `url` is the router's, for a client on its host."""

    def __init__(self, rack: Rack) -> None:
        self.rack = rack
        broker, self.router, self.operator = (rack.host(name) for name in ("b", "r", "o"))
        self.fleet = Fleet(broker)
        self.p, self.d = (Server(rack.host(name), self.fleet, role)
                          for name, role in (("p", "kv_producer"), ("d", "kv_consumer")))
        self.url = "http://127.0.0.1:8080"
        self.router.start([*VLLM_PD, "router", "--broker", self.fleet.url, "--keys", str(self.fleet.keys), "--port",
                           "8080"], subprocess.DEVNULL, self.router.folder / "router.log", ENVIRONMENT)
        for server in (self.p, self.d):
            server.ready()
        self.right_after(0)

    def right_after(self, seconds: float) -> None:
        """Prompts are handed over again within so many seconds and what a busy machine takes, with right answers."""
        before, begin = self.d.done(), time.monotonic()
        while self.d.done() == before:
            tokens = prompt()
            self.compare(tokens, self.d.complete(tokens, "remote"))
            assert time.monotonic() < begin + seconds + BACK_S, "nothing is handed over"

    def compare(self, tokens: list[int], answer: TokenIds) -> None:
        """Raises WrongAnswer if it is not that of the prefill engine, which uses no KV from elsewhere."""
        right = self.p.complete(tokens, "local")
        if answer != right:
            raise WrongAnswer(f"{answer}, and it should be {right}")

    def at_rest(self) -> None:
        """Raises Leak where something stays set aside."""
        def nothing_is_open() -> bool:
            return not any(server.gauges()[name] for server in (self.p, self.d)
                           for name in ("decode_fenced", "decode_queued", "prefill_jobs", "holds", "parted"))
        try:
            wait_for(nothing_is_open, "all is back", BACK_S)
        except AssertionError as error:
            raise Leak(f"{self.d.gauges()} {self.p.gauges()}") from error


def prompt() -> list[int]:
    return [random.randrange(100, 20_000) for _ in range(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Rack(tmp_path_factory.mktemp("rack")) as rack:
        yield Machines(rack)


def test_b40_a_client_and_an_operator_of_other_machines(machines):
    """B40: the client asks the router on its machine, the operator the broker."""
    tokens = prompt()
    body = {"model": MODEL, "prompt": tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}
    before = machines.d.done()
    routed = json.loads(ask(machines.router, f"{machines.url}/v1/completions", body, ANSWER_S))
    machines.compare(tokens, TokenIds(routed["choices"][0]["token_ids"]))
    assert machines.d.done() == before + 1
    listed = machines.fleet.status(machines.operator)
    assert len(listed) == 2 and all(any(server.host.ip in line for line in listed)
                                    for server in (machines.p, machines.d))


@pytest.mark.parametrize("fault", ["P rejects D", "D rejects P", "the way is cut"])
def test_b105_b107_a_write_is_interrupted(machines, fault):
    """B105, B107: the prompt is answered in spite of it, and the two go on with each other, without anybody's help."""
    p, d = machines.p, machines.d
    p.host.shape("eth0", SLOW)
    tokens, answers = prompt(), []
    asking = threading.Thread(target=lambda: answers.append(d.complete(tokens, "remote")))
    asking.start()
    wait_for(lambda: d.gauges()["decode_granted"] == 1, "P has the prompt", ANSWER_S)
    time.sleep(1.0)
    assert not answers, "it is under way"
    if fault == "the way is cut":
        machines.rack.cut(p.host, d.host)
    else:
        one, other = (p, d) if fault == "P rejects D" else (d, p)
        one.host.reject(other.host)
    asking.join(ANSWER_S)
    machines.rack.heal()
    for server in (p, d):
        server.host.accept()
    p.host.unshape("eth0")
    machines.compare(tokens, *answers)
    machines.right_after(10.0)
    machines.at_rest()
