# SPDX-License-Identifier: Apache-2.0
"""B102: a broker that is known by a name goes on at another machine, where the name leads now."""
import time

import pytest

from tests.hosts.fleet import Fleet, HostedEngine
from tests.hosts.rack import Host, Rack

NAME = "broker.lab"
BACK_S = 10.0
NOTICED_S = 30.0  # 5 s of silence, and what a busy machine takes
REST_S = 30.0


def lead(name: str, to: str, *hosts: Host) -> None:
    """From now on these hosts look that name up so."""
    for host in hosts:
        host.know({name: to})


def moved(rack: Rack, one: str, other: str, fault: str = "off") -> tuple[HostedEngine, HostedEngine]:
    """Two engines whose broker is gone from the machine where it was, killed, or with that machine and without a word,
    while another machine has a broker to which its name leads. `one`, `other`: "ip" or "ip6", the address of the name
    before and after."""
    first, second, prefill, decode = (rack.host(name) for name in ("first", "second", "p", "d"))
    before, after = getattr(first, one), getattr(second, other)
    lead(NAME, before, first, prefill, decode)
    fleet = Fleet(first, NAME, bind="tcp://auto:0")
    p, d = fleet.pair(prefill, decode)
    if fault == "killed":
        fleet.kill_broker()
    else:
        first.power_off()
    for engine in (p, d):
        engine.wait_until(lambda report: not report["broker_up"], "it misses the broker", NOTICED_S)
    assert d.serve(2) == {"local": 2}
    lead(NAME, after, second, prefill, decode)
    fleet.start_broker(second)
    return p, d


@pytest.mark.parametrize("one, other, fault", [
    ("ip", "ip", "killed"), ("ip", "ip", "off"), ("ip6", "ip6", "off"), ("ip6", "ip", "off")])
def test_b102_a_broker_that_has_moved_is_found_by_its_name(rack: Rack, one: str, other: str, fault: str):
    """B102: nobody is started again, and prompts are handed over."""
    p, d = moved(rack, one, other, fault)
    began_s = time.monotonic()
    for engine in (p, d):
        engine.wait_until(lambda report: report["broker_up"] and not report["degraded"], "it has a broker", BACK_S)
    d.hands_over(BACK_S - (time.monotonic() - began_s))
    assert d.serve(5) == {"remote": 5}
    for engine in (p, d):
        engine.rests(REST_S)
        engine.keeps_free_blocks()


def test_b102_a_broker_that_has_moved_from_ipv4_to_ipv6_is_not(rack: Rack):
    """libzmq has to know at the start of a socket whether it is for IPv6 (docs/configuration.md, "Addresses")."""
    p, d = moved(rack, "ip", "ip6")
    time.sleep(2 * BACK_S)
    assert not any(engine.report()["broker_up"] for engine in (p, d)) and d.serve(2) == {"local": 2}
