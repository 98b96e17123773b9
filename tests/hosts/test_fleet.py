# SPDX-License-Identifier: Apache-2.0
"""B40, B102, B109: engines on machines of their own, set up by the words of docs/configuration.md."""
import random
import re
import subprocess
import sys

import pytest

from tests.hosts.fleet import BLOCK_SIZE, PROMPT_BLOCKS, ROOT, SMALL_HEAD, VLLM_PD, Fleet, HostedEngine
from tests.hosts.test_rack import attempt
from tests.verdict import WrongAnswer
from tests.waiting import wait_for

REST_S = 30.0
# Listens at all addresses, at the ports that its arguments are.
OPEN = """import socket, sys, time
listeners = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
time.sleep(600)"""


def prompt(blocks: int = PROMPT_BLOCKS) -> list[int]:
    return [random.randrange(1, 30_000) for _ in range(blocks * BLOCK_SIZE)]


def test_b40_two_machines(rack):
    """Prompts are prefilled by the other machine, with the right KV in each block; holds are read. Everything is back
    in the end."""
    one, other = rack.host("one"), rack.host("other")
    p, d = Fleet(one).pair(one, other)
    assert d.serve(40) == {"remote": 40}
    for number in range(5):
        tokens = prompt()
        d.ask("read", f"read {number}", p.ask("hold", tokens), tokens)
        assert d.ended({f"read {number}"}) == {"remote": 1}
    for engine in (p, d):
        engine.rests(REST_S)
        engine.keeps_free_blocks()


def test_b109_every_process_listens_at_the_address_of_bind(rack):
    """B109: on each machine nothing listens anywhere but there, TCP and UDP. A fleet without keys, with the defaults,
    listens on the loopback."""
    hosts = broker, prefill, decode, alone = [rack.host(name) for name in ("b", "p", "d", "alone")]
    for host in hosts:
        host.add_device("office", f"192.168.9.{host.number}")
    p, d = Fleet(broker).pair(prefill, decode)
    p.ask("hold", prompt())
    assert d.serve(3) == {"remote": 3}
    assert [host.listening() for host in hosts] == [{broker.ip}, {prefill.ip}, {decode.ip}, set()]
    alone.start([*VLLM_PD, "broker"], subprocess.DEVNULL, alone.folder / "broker.log", {"PYTHONPATH": str(ROOT)})
    p, d = (HostedEngine(alone, role, {"broker": "tcp://127.0.0.1:5700"}, SMALL_HEAD, {}).start()
            for role in ("kv_producer", "kv_consumer"))
    d.wait_until(lambda report: report["prefill_peers"] == 1, "P is there")
    assert d.serve(3) == {"remote": 3} and alone.listening() == {"127.0.0.1"}


@pytest.mark.parametrize("known_as, bind, kind", [
    ("10.79.0.1", "tcp://auto:5702", "ip"), ("[fd79::1]", "tcp://auto:5702", "ip6"),
    ("broker.lab", "tcp://self.lab:5702", "ip6")])
def test_two_machines_by_names_and_addresses_of_both_kinds(rack, known_as, bind, kind):
    """Everything listens at the addresses that the settings mean, and nowhere else. Firewalls let only the ports in
    that docs/configuration.md names. KV goes both ways, and each sees the other's lifeline."""
    hosts = broker, prefill, decode = [rack.host(name) for name in ("b", "p", "d")]
    for host in hosts:
        host.know({"broker.lab": broker.ip6, "self.lab": host.ip6})
        host.open_only("5700" if host is broker else "5702, 5703, 30000-30009")
    fleet = Fleet(broker, known_as, bind=bind, lifeline_port=5703)
    p, d = fleet.pair(prefill, decode, environment={"UCX_TCP_PORT_RANGE": "30000-30009"})
    assert d.serve(5) == {"remote": 5}
    tokens = prompt()
    d.ask("read", "read", p.ask("hold", tokens), tokens)
    assert d.ended({"read"}) == {"remote": 1}
    shown = [host.ip if kind == "ip" else f"[{host.ip6}]" for host in hosts]
    assert [host.listening() for host in hosts] == [{one} for one in shown]
    for engine in (p, d):
        engine.rests(REST_S)


def test_b109_the_rules_of_the_page_let_a_fleet_work_and_nobody_else_in(rack):
    """docs/configuration.md, "Ports": its lines for nft on each machine, with the addresses of these. They are loaded
    twice, the second time under load."""
    [rules] = re.findall(r"```nft\n(.*?)```", (ROOT / "docs/configuration.md").read_text(), re.DOTALL)
    hosts = broker, prefill, decode = [rack.host(name) for name in ("b", "p", "d")]
    stranger = rack.host("stranger")
    assert rules.count("10.0.0.0/24") == 1
    rules = rules.replace("10.0.0.0/24", ", ".join(host.ip for host in hosts))
    for host in hosts:
        host.load(rules)
    p, d = Fleet(broker, bind="tcp://auto:5702", lifeline_port=5703).pair(
        prefill, decode, environment={"UCX_TCP_PORT_RANGE": "30000-30999"})
    tokens = prompt()
    d.ask("read", "read", p.ask("hold", tokens), tokens)
    assert d.ended({"read"}) == {"remote": 1}
    names = d.submit(20)
    for host in hosts:
        host.load(rules)
    assert d.ended(names) == {"remote": 20}
    prefill.start([sys.executable, "-c", OPEN, "8000", "41953"], subprocess.DEVNULL, prefill.folder / "open.log")
    wait_for(lambda: attempt(stranger, prefill, 8000) == "open", "the HTTP port is open to all", 30.0)
    assert attempt(prefill, prefill, 41953) == "open", "it listens"
    for host in (decode, stranger):
        assert attempt(host, prefill, 41953) == "silent", "as what a stock engine opens by itself"
    kv = [port for port in map(int, re.findall(r":(\d+) ", prefill.run("ss", "-Hltn"))) if 30_000 <= port <= 30_999]
    assert kv
    for port in (5702, 5703, *kv):
        assert attempt(stranger, prefill, port) == "silent" and attempt(decode, prefill, port) == "open", port
    for engine in (p, d):
        engine.rests(REST_S)


def test_a_write_into_a_free_block_is_found(rack):
    """The other tests would notice it, also after the block was used again."""
    host = rack.host("one")
    d = Fleet(host).engine(host, "kv_consumer").start()
    d.keeps_free_blocks()
    d.ask("scribble")
    for _ in range(2):
        with pytest.raises(WrongAnswer, match="1 blocks were written while they were free"):
            d.keeps_free_blocks()
