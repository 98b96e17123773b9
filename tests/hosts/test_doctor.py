# SPDX-License-Identifier: Apache-2.0
"""B107: `vllm-pd doctor --from` names the path between two machines that a firewall has closed."""
from tests.hosts.fleet import Fleet, HostedEngine
from tests.hosts.rack import Host, Rack

PORTS = {"control": "5702", "lifeline": "5703", "kv": "30000-30009"}
BACK_S = 30.0


def broken(fleet: Fleet, host: Host, engine: HostedEngine) -> list[str]:
    """What the doctor says of paths that are broken, asked from that host."""
    return [line for line in fleet.doctor(host, engine.member["incarnation"]) if line.split()[1] in PORTS]


def test_b107_doctor_names_the_path_that_a_firewall_closes(rack: Rack):
    """B107: each is closed at D's host, to P's alone. No other is said to be broken, and what was tried does no harm.
    """
    broker, prefill, decode = (rack.host(name) for name in "bpd")
    fleet = Fleet(broker, bind=f"tcp://auto:{PORTS['control']}", lifeline_port=int(PORTS["lifeline"]))
    p, d = fleet.pair(prefill, decode, environment={"UCX_TCP_PORT_RANGE": PORTS["kv"]})
    [line] = fleet.doctor(broker, d.member["incarnation"])
    assert line.startswith("ok") and "1 of control, 2 of lifeline, 2 of kv" in line
    for kind, ports in PORTS.items():
        decode.drop("eth0", ports, prefill)
        [line] = broken(fleet, broker, p if kind == "control" else d)
        print(line)
        assert line.startswith(f"BAD  {kind} ") and f"from {p.member['incarnation'][:12]}" in line
        assert f"no answer -> a firewall drops, there or on the way, or that machine is off: let {prefill.ip}" in line
        assert f"connect to port {ports[:4]}" in line and line.endswith(f" of {decode.ip}")
        decode.accept()
    d.hands_over(BACK_S)
    decode.reject(prefill)
    assert {line.split()[1] for line in broken(fleet, broker, d) if "is refused -> nothing listens there" in line
            } == PORTS.keys()
    decode.accept()
    d.hands_over(BACK_S)
    for engine in (p, d):
        engine.rests(BACK_S)
        engine.keeps_free_blocks()
