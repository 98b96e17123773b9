# SPDX-License-Identifier: Apache-2.0
"""B104: two servers of engine V1 on machines of their own, each with the KV store of its machine, without a broker. A
conversation whose first turn one has computed goes on at the other."""
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

from tests.hosts.rack import Host, Rack
from tests.v1_hosts.test_servers import ANSWER_S, BACK_S, ENVIRONMENT, MODEL, START_S, ask
from tests.verdict import TokenIds, WrongAnswer
from tests.waiting import wait_for
from vllm_pd.rpc.keys import Keys

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
BLOCK, PROMPT_TOKENS, ANSWER_TOKENS = 32, 500, 40
PORT, WAIT_S = 5900, 6.0
MEET_S = 120.0
CHATS = 4
SLOW = "1mbit"  # at which a prompt's KV takes seconds


class Server:
    """`vllm serve` on a host. `others`: the hosts whose stores it asks; None: it has no store."""

    def __init__(self, host: Host, keys: Path, others: list[Host] | None) -> None:
        self.host, self._url, self._log = host, f"http://{host.ip}:8000", host.folder / "server.log"
        store = [] if others is None else ["--kv-transfer-config", json.dumps({
            "kv_connector": "PDStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "memory_gib": 0.05, "listen": f"tcp://{host.ip}:{PORT}", "keys": str(keys), "wait_s": WAIT_S,
                "hosts": ",".join(f"tcp://{other.ip}:{PORT}" for other in others)}})]
        host.start([str(Path(sys.executable).with_name("vllm")), "serve", os.environ["VLLM_PD_TINY_MODEL"], "--host",
                    host.ip, "--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "2048",
                    "--enforce-eager", "--num-gpu-blocks-override", "512", "--block-size", str(BLOCK),
                    "--enable-prompt-tokens-details", *store], subprocess.DEVNULL, self._log, ENVIRONMENT)

    def ready(self) -> Server:
        """Wait until it answers."""
        def answers() -> bool:
            try:
                return MODEL in ask(self.host, f"{self._url}/v1/models")
            except subprocess.CalledProcessError:
                return False
        wait_for(answers, lambda: f"{self.host.name}: {self._log.read_text()[-2000:]}", START_S,
                 lambda: time.sleep(1.0))
        return self

    def complete(self, tokens: list[int]) -> tuple[TokenIds, int]:
        """(the greedy tokens that follow, how many tokens of the prompt were not computed)."""
        body = {"model": MODEL, "prompt": tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}
        answer = json.loads(ask(self.host, f"{self._url}/v1/completions", body, ANSWER_S))
        details = answer["usage"].get("prompt_tokens_details") or {}
        return TokenIds(answer["choices"][0]["token_ids"]), details.get("cached_tokens") or 0

    def figure(self, name: str) -> int:
        """Of /metrics: the sum of the samples that begin so."""
        return int(sum(float(line.split()[-1]) for line in ask(self.host, f"{self._url}/metrics").splitlines()
                       if line.startswith(f"vllm:pd_store_{name}")))


class Machines:
    """Two hosts with stores, and one with a plain engine."""

    def __init__(self, rack: Rack, keys: Path) -> None:
        self.rack = rack
        a, b, plain = (rack.host(name) for name in ("a", "b", "plain"))
        self.a, self.b, self.plain = Server(a, keys, [a, b]), Server(b, keys, [a, b]), Server(plain, keys, None)
        for server in (self.a, self.b, self.plain):
            server.ready()
        for one, other in ((self.a, self.b), (self.b, self.a)):
            wait_for(lambda one=one, other=other: self._is_shared(one, other), "no block comes", MEET_S)

    @staticmethod
    def _is_shared(one: Server, other: Server) -> bool:
        """Whether what one has computed is a hit at the other: a busy machine may take longer to connect them than a
        prompt waits for that."""
        chat = new_tokens(3 * BLOCK)
        one.complete(chat)
        return other.complete(chat)[1] > 0

    def compare(self, tokens: list[int], answer: TokenIds) -> None:
        """Raises WrongAnswer if it is not that of the plain engine."""
        right, _ = self.plain.complete(tokens)
        if answer != right:
            raise WrongAnswer(f"{answer}, and it should be {right}")


def new_tokens(count: int) -> list[int]:
    return [random.randrange(100, 20_000) for _ in range(count)]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("rack")
    keys = Keys.make(folder / "keys")
    with Rack(folder) as rack:
        yield Machines(rack, keys)


def test_b104_a_conversation_over_two_hosts_computes_its_new_tokens(machines):
    """B104: each turn on the other host. All whole blocks of the turns before are a prefix hit, but for the block of
    the last token, whose KV no turn has computed. On a busy machine a turn may come before the blocks of the one before
    are in the store, or wait for them for too short a time: then there is another conversation."""
    assert any(_is_all_shared(machines) for _ in range(CHATS)), "no conversation had all of its blocks"
    assert machines.b.figure('far_fetches_total{') > 0


def _is_all_shared(machines: Machines) -> bool:
    """Whether each turn of a conversation has computed new tokens only. Raises WrongAnswer."""
    chat, whole = new_tokens(PROMPT_TOKENS), 0
    for turn in range(4):
        server = (machines.a, machines.b)[turn % 2]
        answer, cached = server.complete(chat)
        machines.compare(chat, answer)
        assert cached <= whole, turn
        if cached < whole:
            return False
        whole = (len(chat) + len(answer) - 1) // BLOCK * BLOCK
        chat = [*chat, *answer, *new_tokens(BLOCK + turn)]
    return True


@pytest.mark.parametrize("fault", ["the way is cut", "it rejects", "it is slow"])
def test_b104_a_host_is_cut_off_while_it_sends(machines, fault):
    """B104: the prompt is answered in spite of it, with the tokens of one engine. When the way is whole again, blocks
    come as before, without anybody's help."""
    a, b = machines.a, machines.b
    chat = new_tokens(PROMPT_TOKENS)
    machines.compare(chat, a.complete(chat)[0])
    a.host.shape("eth0", SLOW)
    answers: list[tuple[TokenIds, int]] = []
    asking = threading.Thread(target=lambda: answers.append(b.complete(chat)))
    asking.start()
    time.sleep(1.5)
    assert not answers, "it is under way"
    if fault == "the way is cut":
        machines.rack.cut(a.host, b.host)
    elif fault == "it rejects":
        a.host.reject(b.host)
    asking.join(ANSWER_S)
    machines.rack.heal()
    a.host.accept()
    a.host.unshape("eth0")
    (answer, cached), = answers
    machines.compare(chat, answer)
    assert cached < (PROMPT_TOKENS - 1) // BLOCK * BLOCK, "it was cut off while it sent"
    until_s = time.monotonic() + 3 * BACK_S
    while True:
        chat = new_tokens(PROMPT_TOKENS)
        machines.compare(chat, a.complete(chat)[0])
        answer, cached = b.complete(chat)
        machines.compare(chat, answer)
        if cached == (PROMPT_TOKENS - 1) // BLOCK * BLOCK:
            return
        assert time.monotonic() < until_s, "blocks do not come again"


def test_b104_the_servers_listen_where_they_should(machines):
    """B104: beyond HTTP, at `listen` and at the ports of their NIXL agents, all at their own address."""
    addresses = {one for one in machines.a.host.listening() if not one.startswith(("127.", "[::1]"))}
    assert addresses == {machines.a.host.ip}
