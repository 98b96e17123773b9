# SPDX-License-Identifier: Apache-2.0
"""B107, B112: a fleet over NATS, whose three servers are on hosts of their own."""
from __future__ import annotations

from tests.hosts.fleet import HostedEngine
from tests.hosts.nats_fleet import FAULTS, NatsFleet
from tests.hosts.rack import Rack
from tests.waiting import wait_for
from vllm_pd.broker.nats_store import REPLICAS

BACK_S = 30.0
NEXT_JOB_S = 60.0  # by an idle machine 10 (B112); a busy one needs longer for an election
AGAIN_S = 10.0


def cut_off_from_nats(rack: Rack, fleet: NatsFleet, engine: HostedEngine, d: HostedEngine) -> None:
    """The engine is, and reaches the other one as before. D answers by itself; when the cut has ended, P works for it
    again."""
    for server in fleet.servers.values():
        rack.cut(engine.host, server)
    noticed_s = engine.wait_until(lambda report: not report["broker_up"], "it knows that NATS is away", BACK_S)
    assert sum(d.serve(2).values()) == 2
    rack.heal()
    print(f"{engine.host.name} is cut off from NATS: it knows after {noticed_s:.1f} s")
    d.hands_over(AGAIN_S)


def lose_the_leader(rack: Rack, fleet: NatsFleet, fault: str, engines: list[HostedEngine], d: HostedEngine) -> None:
    """The server that leads the jobs goes: the next job goes by the others. Later it has all of it again."""
    replicas, leader, others = fleet.jobs("n1")
    assert replicas == REPLICAS and {leader, *others} == fleet.servers.keys()
    print(f"{leader}, which leads the jobs, is {fault}")
    with fleet.without(rack, leader, fault, engines):
        d.hands_over(NEXT_JOB_S)
    print(f"it holds all again after {fleet.holds_all(leader, others[0], BACK_S):.1f} s")


def test_b107_b112_nats_of_three_servers(rack):
    """B107: an engine is cut off from NATS alone. B112: a server goes. In the end everything is back."""
    fleet = NatsFleet([rack.host(name) for name in ("n1", "n2", "n3")])
    p, d = fleet.pair(rack.host("p"), rack.host("d"))
    for engine in (d, p):
        cut_off_from_nats(rack, fleet, engine, d)
    for fault in FAULTS:
        lose_the_leader(rack, fleet, fault, [p, d], d)
        # With a server that comes back some elect anew, maybe seconds later: the broker is away for a second then.
        wait_for(lambda: d.serve(8, blocks=1) == {"remote": 8}, "they don't work together", NEXT_JOB_S)
    for engine in (p, d):
        engine.rests(BACK_S)
        engine.keeps_free_blocks()
