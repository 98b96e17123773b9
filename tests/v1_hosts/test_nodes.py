# SPDX-License-Identifier: Apache-2.0
"""A prefill engine on two machines (`--nnodes 2`), whose second rank is on the other: the answers, and the end of that
rank in the middle of a write. The decode engine is on a third machine, so it sees the lifeline only."""
from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from tests.hosts.fleet import Fleet
from tests.hosts.rack import Host, Rack
from tests.v1_hosts.test_servers import ANSWER_S, BACK_S, SLOW, START_S, Server, prompt
from tests.verdict import WrongAnswer
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.timeout(1800)]


class Nodes:
    """Both nodes of P, D, and what lies between."""

    def __init__(self, rack: Rack) -> None:
        self._fleet = Fleet(rack.host("b"))
        self._hosts = rack.host("p0"), rack.host("p1")
        self.d = Server(rack.host("d"), self._fleet, "kv_consumer")
        self.start_p(29500)
        self.d.ready()

    def start_p(self, master_port: int) -> None:
        """Both nodes; returns when P serves."""
        self.begin_p(master_port)
        self.p.ready()

    def begin_p(self, master_port: int, **settings: object) -> None:
        """Both nodes, the second with these settings."""
        first, second = self._hosts
        self.p, self.other = (Server(host, self._fleet, "kv_producer", "--tensor-parallel-size", "2", "--nnodes", "2",
                                     "--master-addr", first.ip, "--master-port", str(master_port), *flags, **own)
                              for host, flags, own in ((first, ("--node-rank", "0"), {}),
                                                       (second, ("--node-rank", "1", "--headless"), settings)))

    def end_p(self) -> None:
        """The server of the first node. Returns when all of P has ended."""
        self.p.host.run("sh", "-c", "kill -TERM $(pgrep -o -f 'vllm serve')")
        self.until_ended()

    def until_ended(self) -> None:
        """Wait until all of P has ended."""
        wait_for(self.has_ended, lambda: f"{self.p.said()[-2000:]}\n{self.other.said()[-2000:]}", ANSWER_S)

    def kill_other_rank(self) -> None:
        self.other.host.run("sh", "-c", "kill -9 $(pgrep -f '^VLLM::Worker_TP1')")

    def has_ended(self) -> bool:
        """Whether P serves no more, with all its processes on both nodes."""
        return not any(self._has_processes(host) for host in self._hosts)

    def other_has_ended(self) -> bool:
        """Whether the second node has no process of P."""
        return not self._has_processes(self._hosts[1])

    @staticmethod
    def _has_processes(host: Host) -> bool:
        try:
            host.run("pgrep", "--runstates", "R,S,D,T", "-f", "vllm|VLLM|guardian")
        except subprocess.CalledProcessError:
            return False
        return True


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with Rack(tmp_path_factory.mktemp("rack")) as rack:
        yield Nodes(rack)


def test_b101_an_engine_on_two_nodes(nodes):
    """Its answers are those of a plain engine, and so is what D makes of its KV. B101."""
    tokens = prompt()
    plain, split = nodes.d.complete(tokens, "local"), nodes.p.complete(tokens, "local")
    if plain != split:
        raise WrongAnswer(f"{split}, and it should be {plain}")
    for _ in range(3):
        tokens, before = prompt(), nodes.d.done()
        answer = nodes.d.complete(tokens, "remote")
        right = nodes.p.complete(tokens, "local")
        if answer != right:
            raise WrongAnswer(f"{answer}, and it should be {right}")
        assert nodes.d.done() == before + 1


def test_b21_b105_the_rank_on_the_other_node_is_killed_while_it_writes(nodes):
    """The engine ends, also where vLLM sees nothing; D has its blocks back, and answers. B21, B105."""
    nodes.other.host.shape("eth0", SLOW)
    tokens, answers = prompt(), []
    asking = threading.Thread(target=lambda: answers.append(nodes.d.complete(tokens, "remote")))
    asking.start()
    wait_for(lambda: nodes.d.gauges()["decode_granted"] == 1, "P has the prompt", ANSWER_S)
    time.sleep(1.0)
    assert not answers, "it is under way"
    nodes.kill_other_rank()
    asking.join(ANSWER_S)
    assert len(answers) == 1 and answers[0] == nodes.d.complete(tokens, "local")
    wait_for(nodes.has_ended, lambda: nodes.p.said()[-3000:], ANSWER_S)
    assert "rank 1 on node 1 (tcp://" in nodes.p.said()
    wait_for(lambda: not any(nodes.d.gauges()[name] for name in ("decode_fenced", "decode_queued", "decode_granted")),
             lambda: str(nodes.d.gauges()), BACK_S)


def test_b43_an_engine_that_is_ended_on_its_first_node_ends_on_the_other(nodes):
    """B43. A stock one would stay there."""
    nodes.other.host.unshape("eth0")
    nodes.start_p(29501)
    before = nodes.d.done()
    wait_for(lambda: nodes.d.complete(prompt(), "remote") and nodes.d.done() > before, "P is known", ANSWER_S)
    nodes.end_p()


def test_b21_b80_a_node_with_other_settings_ends(nodes):
    """With EngineCore, which has not connected to that node's rank then. B21, B80."""
    if not nodes.has_ended():
        nodes.end_p()
    nodes.begin_p(29502, max_local_prefill_tokens=33)

    def is_refused() -> bool:
        return "max_local_prefill_tokens='33' can't be used: node 1 has that" in nodes.p.said()

    wait_for(is_refused, lambda: nodes.p.said()[-3000:], START_S)
    wait_for(nodes.other_has_ended, lambda: nodes.other.said()[-2000:], ANSWER_S)
    assert "this rank ends: no engine has connected" in nodes.other.said()
