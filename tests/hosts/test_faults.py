# SPDX-License-Identifier: Apache-2.0
"""B105 to B108: faults between machines. Whoever is in doubt about a peer ends by its own act what that peer could
still do in its memory, has every block back within seconds, and works with the peer again once that is possible."""
import time

import pytest

from tests.hosts.fleet import LARGE_HEAD, Fleet, HostedEngine
from tests.hosts.matrix import AGAIN_S, BACK_S, FAULTS, PROMPT_EVERY_S, WORK_S, judge, other_address, run
from tests.hosts.rack import Host, Rack

NOTICED_S = 15.0  # until a pair that can't talk is known: 5 s of silence, 3 s without an answer, and a heartbeat
ADDED_S = 40.0  # until P tries again to reach the memory of a D, and can
LONG_DOWN_S = 10.0  # several tries to make an agent
SLOW, LONG_BLOCKS = "2mbit", 24  # 6 MiB in 25 s


@pytest.fixture
def hosts(rack: Rack) -> tuple[Host, Host, Host]:
    """One for the broker, one for a prefill engine, one for a decode engine."""
    return rack.host("b"), rack.host("p"), rack.host("d")


def end_well(p: HostedEngine, d: HostedEngine) -> None:
    """The fault is over: the two work together again. In the end every prompt has ended, everything is back, and no
    block was written while it was free."""
    d.hands_over(AGAIN_S)
    d.ask("load", 0)
    for engine in (d, p):
        engine.rests(BACK_S)
    d.take_ended()
    assert d.serve(8, blocks=1) == {"remote": 8}
    for engine in (d, p):
        engine.rests(BACK_S)
        engine.keeps_free_blocks()


def pair_with_a_slow_fabric(hosts: tuple[Host, Host, Host], **settings: object) -> tuple[HostedEngine, HostedEngine]:
    """Their KV takes another way than their messages, and takes long."""
    broker, prefill, decode = hosts
    prefill.connect(decode, "fab0", "10.80.0", SLOW)
    return Fleet(broker, **settings).pair(prefill, decode, head_size=LARGE_HEAD,
                                          environment={"UCX_NET_DEVICES": "fab0"})


def test_b105_b106_a_live_prefill_engine_is_taken_for_dead(hosts):
    """B105, B106: a firewall of P's host resets what D sends to it, while P writes over another network. D has its
    blocks back, and nothing of what P still writes lands in one that is free."""
    p, d = pair_with_a_slow_fabric(hosts)
    names = d.submit(1, LONG_BLOCKS)
    p.wait_until(lambda report: report["handles"] == 1, "P writes")
    hosts[1].reject(hosts[2])
    assert d.ended(names) == {"local": 1}
    d.wait_until(lambda report: report["open"] == 0, "D has its blocks back", BACK_S)
    until_s = time.monotonic() + 20.0
    while p.report()["handles"] and time.monotonic() < until_s:
        d.keeps_free_blocks()
        time.sleep(0.5)
    d.wait_until(lambda report: report["degraded"], "it says that P is away")
    hosts[1].accept()
    end_well(p, d)


def test_b105_b106_a_live_decode_engine_is_taken_for_dead(hosts):
    """B105, B106: a firewall of D's host resets what P sends to it, while D reads what P holds over another network. P
    has its blocks back, and D takes nothing for the prompt's KV that is not."""
    p, d = pair_with_a_slow_fabric(hosts, lease_s=60.0, attempt_deadline_s=120.0)
    tokens = list(range(1, 1 + 16 * LONG_BLOCKS))
    d.ask("read", "read", p.ask("hold", tokens), tokens)
    d.wait_until(lambda report: report["reading"] == 1, "D reads")
    hosts[2].reject(hosts[1])
    p.wait_until(lambda report: report["held"] == 0, "P has its blocks back", BACK_S)
    assert sum(d.ended({"read"}).values()) == 1
    hosts[2].accept()
    end_well(p, d)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.in_tests], ids=str)
def test_b105_b106_b107_what_breaks_and_is_mended_costs_no_answer_and_no_block(rack, fault):
    """B105, B106, B107: cables, firewalls, addresses and the broker fail for a while. Every prompt ends, with right KV,
    every block comes back, and soon prompts are handed over again; nobody is started again, but who has lost its
    address for good."""
    outcome = run(rack, fault)
    print(outcome)
    judge(fault, outcome)


@pytest.mark.parametrize("at", ["p", "d"])
def test_b107_an_engine_says_that_it_has_lost_its_address(rack, at):
    """B107: its host has another one for good. While that is so D answers by itself. An operator starts the engine
    again, and the two work together."""
    fault = other_address(at)
    outcome = run(rack, fault)
    print(outcome)
    judge(fault, outcome)
    said = {"p": outcome.p_said, "d": outcome.d_said}[at]
    assert said.startswith("address: this machine does not have the address 10.79.0.") and "start the engine" in said


def test_b107_a_pair_that_can_not_talk_gets_no_work(rack, hosts):
    """B107: D is cut off from P, which other Ds reach. Nobody waits for what can't be: D's prompts stay with it, those
    of others go to P, and both say who can't talk to whom."""
    broker, prefill, decode = hosts
    fleet = Fleet(broker)
    p, d = fleet.pair(prefill, decode)
    e = fleet.engine(rack.host("e"), "kv_consumer").start()
    e.wait_until(lambda report: report["prefill_peers"] == 1, "P is there")
    rack.cut(prefill, decode)
    d.wait_until(lambda report: report["prefill_peers"] == 0, "D knows", NOTICED_S)
    p_name, d_name = p.member["incarnation"], d.member["incarnation"]
    assert p_name in d.report()["degraded"] and "can't reach this one" in d.report()["degraded"]
    assert fleet.status(broker, p_name) >= {f"  can't reach decode engine {d_name}"}
    begin = time.monotonic()
    assert d.serve(4) == {"local": 4} and time.monotonic() - begin < 5.0
    assert e.serve(8) == {"remote": 8} and not e.report()["degraded"]
    rack.heal()
    end_well(p, d)
    assert not d.report()["degraded"]


def test_b107_a_fabric_that_is_cut_costs_few_prompts_their_time(hosts):
    """B107: KV takes another way than messages, and that way is cut, which nothing but a transfer shows. After a few
    prompts D leaves P alone for ever longer pauses; then the way is whole again."""
    broker, prefill, decode = hosts
    prefill.connect(decode, "fab0", "10.80.0", "100mbit")
    p, d = Fleet(broker, attempt_deadline_s=4.0).pair(prefill, decode, environment={"UCX_NET_DEVICES": "fab0"})
    decode.drop("fab0")
    d.ask("load", PROMPT_EVERY_S)
    d.wait_until(lambda report: report["prefill_peers"] == 0 and not report["gauges"]["parted"], "D leaves P alone")
    d.wait_until(lambda report: p.member["incarnation"] in report["degraded"], "it says so")
    d.ask("load", 0)
    decode.accept()
    d.hands_over(ADDED_S)
    end_well(p, d)


def test_b107_a_fabric_that_is_down_while_agents_are_to_be_made(hosts):
    """B107: KV has a network of its own, whose interface is down: so no new transfer agents can be made after the
    writes that fail. D answers by itself, and says why. When the interface is up again the two go on by themselves."""
    broker, prefill, decode = hosts
    prefill.connect(decode, "fab0", "10.80.0", "100mbit")
    p, d = Fleet(broker, attempt_deadline_s=4.0).pair(prefill, decode, environment={"UCX_NET_DEVICES": "fab0"})
    p.ask("work", WORK_S)
    names = d.submit(2)
    p.wait_until(lambda report: report["jobs"] == 2, "P has work")
    decode.switch_off("fab0")
    assert d.ended(names) == {"local": 2}
    for engine in (p, d):
        engine.wait_until(lambda report: report["degraded"].startswith("agents: "), "it says so")
    assert "fab0 is down, switch it on" in d.report()["degraded"]
    begin = time.monotonic()
    assert d.serve(4) == {"local": 4} and time.monotonic() - begin < 5.0, "they do not try"
    time.sleep(LONG_DOWN_S)
    for report in (p.report(), d.report()):
        assert report["gauges"]["generation"] == 0 and report["error"] is None, "there are the former agents"
    decode.switch_on("fab0")
    d.hands_over(ADDED_S)
    end_well(p, d)


def test_b107_a_firewall_that_drops_the_ports_of_kv_stops_nobody_else(rack, hosts):
    """B107: who sets a fleet up forgets them. P can't write to that D, whose prompts fall back at once, and goes on for
    the others."""
    broker, prefill, decode = hosts
    fleet = Fleet(broker, attempt_deadline_s=20.0)
    decode.drop("eth0", "30000-30099")
    p = fleet.engine(prefill, "kv_producer").start()
    d = fleet.engine(decode, "kv_consumer", environment={"UCX_TCP_PORT_RANGE": "30000-30099"}).start()
    e = fleet.engine(rack.host("e"), "kv_consumer").start()
    e.wait_until(lambda report: report["prefill_peers"] == 1, "P is there")
    d.wait_until(lambda report: report["prefill_peers"] or p.member["incarnation"] in (report["degraded"] or ""),
                 "P is there, or has tried already")
    d.ask("load", PROMPT_EVERY_S)
    until_s, longest_s = time.monotonic() + 40.0, 0.0
    while time.monotonic() < until_s:
        begin = time.monotonic()
        assert e.serve(blocks=1) == {"remote": 1}
        longest_s = max(longest_s, time.monotonic() - begin)
    assert longest_s < 15.0  # one try at a time, of 3 s
    assert p.report()["gauges"]["unadded"] == 1 and p.member["incarnation"] in d.report()["degraded"]
    d.ask("load", 0)
    assert set(d.take_ended().values()) == {"local"}
    decode.accept()
    d.hands_over(ADDED_S)
    for engine in (p, d, e):
        engine.rests(BACK_S)
        engine.keeps_free_blocks()


@pytest.mark.parametrize("is_gone", [True, False])
def test_b108_an_operator_says_that_a_host_is_gone(rack, hosts, is_gone):
    """B108: `vllm-pd gone` gives D's blocks back at once, long before the lease is over. It is a mistake: nothing is
    lost, no block is written while it is free, and the two work together again."""
    broker, prefill, decode = hosts
    fleet = Fleet(broker, lease_s=60.0)
    p, d = fleet.pair(prefill, decode, head_size=LARGE_HEAD)
    prefill.shape("eth0", SLOW)
    names = d.submit(1, LONG_BLOCKS)
    p.wait_until(lambda report: report["handles"] == 1, "P writes")
    if is_gone:
        prefill.power_off()
    begin = time.monotonic()
    said = fleet.say_gone(broker, p.member["incarnation"])
    assert any(d.member["incarnation"][:12] in line and "told" in line for line in said)
    assert d.ended(names) == {"local": 1}
    d.rests(BACK_S)
    assert time.monotonic() - begin < 15.0
    if not is_gone:
        end_well(p, d)


@pytest.mark.parametrize("state", ["computing", "writing"])
def test_b108_the_host_of_a_prefill_engine_is_gone_for_good(rack, hosts, state):
    """B108: what it was granted comes back, and another prefill engine is used."""
    broker, prefill, decode = hosts
    fleet = Fleet(broker)
    p, d = fleet.pair(prefill, decode, head_size=LARGE_HEAD)
    if state == "computing":
        p.ask("work", 600.0)
        names = d.submit(3)
        d.wait_until(lambda report: report["gauges"]["decode_granted"] == 3, "P computes")
    else:
        prefill.shape("eth0", SLOW)
        names = d.submit(1, LONG_BLOCKS)
        p.wait_until(lambda report: report["handles"] == 1, "P writes")
    prefill.power_off()
    assert d.ended(names) == {"local": len(names)}
    d.rests(BACK_S)
    other = fleet.engine(rack.host("other"), "kv_producer", LARGE_HEAD).start()
    end_well(other, d)


@pytest.mark.parametrize("state", ["reading", "written"])
def test_b108_the_host_of_a_decode_engine_is_gone_for_good(rack, hosts, state):
    """B108: what it has claimed at a prefill engine comes back, and so does what was being written to it. Another
    decode engine is served."""
    broker, prefill, decode = hosts
    fleet = Fleet(broker)
    p, d = fleet.pair(prefill, decode, head_size=LARGE_HEAD)
    prefill.shape("eth0", SLOW)
    if state == "reading":
        tokens = list(range(1, 1 + 16 * LONG_BLOCKS))
        d.ask("read", "read", p.ask("hold", tokens), tokens)
        d.wait_until(lambda report: report["reading"] == 1, "D reads")
    else:
        d.submit(1, LONG_BLOCKS)
        p.wait_until(lambda report: report["handles"] == 1, "P writes")
    decode.power_off()
    p.rests(BACK_S)
    other = fleet.engine(rack.host("other"), "kv_consumer", LARGE_HEAD).start()
    end_well(p, other)
