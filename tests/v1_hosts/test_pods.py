# SPDX-License-Identifier: Apache-2.0
"""The pods of deploy/kubernetes/base, as far as they go without a cluster: each on a machine of its own, started by the
arguments and variables of its manifest, behind a firewall that opens what its NetworkPolicies open. Two things are not
theirs: where the model and the Secret are, and what a CPU wants."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.hosts.fleet import ROOT, VLLM_PD
from tests.hosts.rack import Rack
from tests.manifests import OUTSIDE, Fleet, Pod
from tests.v1_hosts.test_servers import ANSWER_S, ENVIRONMENT, START_S, prompt
from tests.verdict import TokenIds, WrongAnswer
from tests.waiting import wait_for
from vllm_pd.rpc.keys import Keys

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
BASE = ROOT / "deploy" / "kubernetes" / "base"
LONG_TOKENS = 800
BROKER, API_KEY = "vllm-pd-broker", "of-the-secret"
FOR_CPUS = ["--dtype=float32", "--max-model-len=2048", "--enforce-eager", "--num-gpu-blocks-override=512"]
PROGRAMS = {"broker": VLLM_PD, "decode": [str(Path(sys.executable).with_name("vllm")), "serve"]}
PROGRAMS["prefill"] = PROGRAMS["decode"]
ASK = """import os, sys, urllib.request
url, body, timeout_s = sys.argv[1:]
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["VLLM_API_KEY"]}
with urllib.request.urlopen(urllib.request.Request(url, body.encode() or None, headers), timeout=float(timeout_s)) as answer:
    sys.stdout.buffer.write(answer.read())"""  # noqa: E501
CONNECT = """import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 2.0).close()
    print("open")
except OSError:
    print("closed")"""
SERVER = """import pathlib, sys
print(min(int(one.parent.name) for one in pathlib.Path("/proc").glob("[0-9]*/cmdline")
          if b"--served-model-name=model" in one.read_bytes().split(b"\\0")))"""


class Cluster:
    """A machine for each pod, of each Deployment one, and one for a client, which is another pod."""

    def __init__(self, rack: Rack) -> None:
        self.fleet = Fleet([one for file in BASE.glob("*.yaml") for one in yaml.safe_load_all(file.read_text())
                            if one["kind"] != "Kustomization"])
        self.pods = {pod.component: pod for pod in self.fleet.pods}
        self.hosts = {name: rack.host(name) for name in (*self.pods, "client")}
        self.secret = rack.folder / "secret"
        self.secret.mkdir(mode=0o755)
        Keys.make(self.secret / "vllm-pd.keys").chmod(0o440)  # of root's, as a Secret with defaultMode 0440
        for name, host in self.hosts.items():
            names = {BROKER: self.hosts["broker"].ip, "localhost": "127.0.0.1"}
            if name in self.pods and "hostname" in self.pods[name].spec:
                names[self.pods[name].spec["hostname"]] = host.ip
            host.know(names)
        for pod in self.pods.values():
            self._protect(pod)
        self.programs = {pod.component: self._start(pod) for pod in self.pods.values()}
        for name in ("decode", "prefill"):
            wait_for(lambda name=name: self.probe(name), lambda name=name: self._log(name).read_text()[-2000:], START_S,
                     lambda: time.sleep(2.0))

    def _log(self, name: str) -> Path:
        return self.hosts[name].folder / "program.log"

    def _protect(self, pod: Pod) -> None:
        """Drop what begins a connection that no policy allows."""
        host = self.hosts[pod.component]
        host.run("nft", "add table inet pods; add chain inet pods in { type filter hook input priority 0; }")
        for name, other in self.hosts.items():
            ports = self.fleet.open_ports(pod, self.pods[name].labels if name in self.pods else OUTSIDE)
            several = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in sorted(ports))
            host.run("nft", f'add rule inet pods in iifname "eth0" ip saddr {other.ip} tcp flags & (syn | ack) == syn '
                            f'{f"tcp dport != {{ {several} }} " if several else ""}drop')

    def _start(self, pod: Pod) -> subprocess.Popen:
        words = [word.replace("/etc/vllm-pd", str(self.secret)) for word in pod.args]
        if pod.component != "broker":
            words = [os.environ["VLLM_PD_TINY_MODEL"], *words[1:], *FOR_CPUS]
        own = {name: value.replace("/etc/vllm-pd", str(self.secret)) for name, value in pod.env.items()}
        return self.hosts[pod.component].start(
            [*PROGRAMS[pod.component], *words], subprocess.DEVNULL, self._log(pod.component),
            {**ENVIRONMENT, **own, "VLLM_API_KEY": API_KEY})

    def probe(self, name: str) -> bool:
        """Whether the readiness probe passes."""
        _, option, text = self.pods[name].container["readinessProbe"]["exec"]["command"]
        try:
            self.hosts[name].run("env", f"VLLM_API_KEY={API_KEY}", sys.executable, option, text, timeout_s=60.0)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False
        return True

    def ask(self, source: str, target: str, path: str, body: dict | None = None) -> str:
        """What an engine answers one of the pods. Raises CalledProcessError where it does not."""
        address = "127.0.0.1" if source == target else self.hosts[target].ip
        return self.hosts[source].run("env", f"VLLM_API_KEY={API_KEY}", sys.executable, "-c", ASK,
                                      f"http://{address}:8000{path}", "" if body is None else json.dumps(body),
                                      f"{ANSWER_S}", timeout_s=ANSWER_S + 10.0)

    def complete(self, source: str, target: str, tokens: list[int], where: str, answer_tokens: int = 8) -> TokenIds:
        body = {"model": "model", "prompt": tokens, "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "kv_transfer_params": {"pd": where}}
        return TokenIds(json.loads(self.ask(source, target, "/v1/completions", body))["choices"][0]["token_ids"])

    def reaches(self, source: str, target: str, port: int) -> str:
        """ "open" or "closed"."""
        return self.hosts[source].run(sys.executable, "-c", CONNECT, self.hosts[target].ip, str(port)).strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Rack(tmp_path_factory.mktemp("rack")) as rack:
        yield Cluster(rack)


def test_a_prompt_of_a_client_is_prefilled_by_the_other_pod(cluster):
    tokens = prompt()
    answer = cluster.complete("client", "decode", tokens, "remote")
    done = [line for line in cluster.ask("decode", "decode", "/metrics").splitlines()
            if line.startswith("vllm:pd_attempts_total{") and 'outcome="done"' in line]
    assert sum(float(line.split()[-1]) for line in done) == 1
    if answer != (right := cluster.complete("prefill", "prefill", tokens, "local")):
        raise WrongAnswer(f"{answer}, and it should be {right}")


def test_an_operator_in_the_broker_s_pod_finds_all_paths_open(cluster):
    engine = f"tcp://{cluster.hosts['decode'].ip}:5702"
    said = cluster.hosts["broker"].run(*VLLM_PD, "doctor", "--broker", f"tcp://{BROKER}:5700", "--keys",
                                       str(cluster.secret / "vllm-pd.keys"), "--from", engine, timeout_s=60.0)
    assert "BAD" not in said and "ok   paths" in said, said


def test_a_client_reaches_nothing_but_the_decode_engine(cluster):
    assert cluster.reaches("client", "decode", 8000) == "open"
    for target, ports in (("decode", (5702, 5703)), ("prefill", (8000, 5702, 5703)), ("broker", (5700, ))):
        for port in ports:
            assert cluster.reaches("client", target, port) == "closed", (target, port)
            if target != "prefill":
                assert cluster.reaches("prefill", target, port) == "open", (target, port)


def test_sigterm_lets_the_decode_engine_finish_and_end_within_its_grace(cluster):
    """The kubelet sends it after preStop."""
    host, pod = cluster.hosts["decode"], cluster.pods["decode"]
    answers: list[TokenIds] = []
    asking = threading.Thread(target=lambda: answers.append(
        cluster.complete("client", "decode", prompt(), "local", LONG_TOKENS)))
    asking.start()
    wait_for(lambda: re.search(r"^vllm:num_requests_running\{.*\} 1", cluster.ask("decode", "decode", "/metrics"),
                               re.MULTILINE), "the answer begins", ANSWER_S)
    host.run("kill", "-TERM", host.run(sys.executable, "-c", SERVER).strip())
    assert not cluster.probe("decode") and not answers, "it drains"
    cluster.programs["decode"].wait(pod.spec["terminationGracePeriodSeconds"])
    asking.join(ANSWER_S)
    assert [len(answer) for answer in answers] == [LONG_TOKENS]
