# SPDX-License-Identifier: Apache-2.0
"""B107, B112: a fleet over NATS, whose three servers are on hosts of their own."""
from __future__ import annotations

import json
import subprocess
import sys
import time

import nkeys

from tests.fakes.brokers import nats_server
from tests.hosts.fleet import Fleet, HostedEngine
from tests.hosts.rack import Host, Rack
from tests.waiting import wait_for
from vllm_pd.broker.nats_store import REPLICAS

CLIENTS, ROUTES = 4222, 6222
SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
PUBLIC = nkeys.from_seed(bytearray(SEED.encode())).public_key.decode()
START_S, BACK_S = 60.0, 30.0
NEXT_JOB_S = 60.0  # by an idle machine 10 (B112); a busy one needs longer for an election
AGAIN_S = 10.0
# Prints what the servers at ARGUMENT say of the stream of jobs, null while it has no leader; without one, "ready" once
# they have found each other.
ASK = f"""import asyncio, json, sys
import nats
async def main(urls, stream):
    client = await nats.connect(urls.split(","), nkeys_seed_str="{SEED}", connect_timeout=2, max_reconnect_attempts=1)
    js = client.jetstream(timeout=2)
    try:
        if not stream:
            await js.account_info()
            print("ready")
            return
        info = await js.stream_info(stream)
        print(json.dumps([info.config.num_replicas, info.cluster.leader,
                          [one.name for one in info.cluster.replicas or () if one.current]]))
    finally:
        await client.close()
asyncio.run(main(*sys.argv[1:]))"""


class NatsFleet(Fleet):
    """A fleet with a cluster of NATS, a server on each of these hosts, in place of the broker. A server has the name of
    its host."""

    def __init__(self, hosts: list[Host]) -> None:
        seed = hosts[0].folder / "nats.seed"
        seed.touch(0o600)
        seed.write_text(SEED)
        self._prepare(hosts[0], ",".join(f"nats://{host.ip}:{CLIENTS}" for host in hosts),
                      {"nats_credentials": str(seed)})
        self.servers = {host.name: host for host in hosts}
        routes = ", ".join(f'"nats://{host.ip}:{ROUTES}"' for host in hosts)
        for host in hosts:
            config = host.folder / "nats.conf"
            config.write_text(
                f'server_name: {host.name}\nhost: "{host.ip}"\nport: {CLIENTS}\nmax_payload: 1MB\n'
                f'jetstream {{store_dir: "{host.folder}", max_memory_store: 1GB}}\n'
                f"authorization {{users: [{{nkey: {PUBLIC}}}]}}\n"
                f'cluster {{name: c, listen: "{host.ip}:{ROUTES}", routes: [{routes}]}}\n')
            host.start([nats_server(), "-c", str(config)], subprocess.DEVNULL, host.folder / "nats.log")
        self._ask(hosts[0], self.url, "")

    def jobs(self, asked: Host) -> tuple[int, str, list[str]]:
        """What the server on that host says of the stream of jobs: how many servers are to hold it, the one that leads
        it, and the others that have all of it."""
        return tuple(json.loads(self._ask(asked, f"nats://{asked.ip}:{CLIENTS}", "vllm_pd_jobs")))

    def _ask(self, host: Host, urls: str, stream: str) -> str:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return host.run(sys.executable, "-c", ASK, urls, stream)
            except subprocess.CalledProcessError as error:
                assert time.monotonic() < deadline_s, error.stderr


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


def cut_the_leader_off(rack: Rack, fleet: NatsFleet, engines: list[HostedEngine], d: HostedEngine) -> None:
    """The server that leads the jobs is cut off from the other servers, and from the engines: the next job goes by the
    others. Later it has all of it again."""
    replicas, leader, others = fleet.jobs(fleet.servers["n1"])
    assert replicas == REPLICAS and {leader, *others} == fleet.servers.keys()
    for host in (*(engine.host for engine in engines), *(fleet.servers[name] for name in others)):
        rack.cut(fleet.servers[leader], host)
    print(f"{leader}, which leads the jobs, is cut off")
    d.hands_over(NEXT_JOB_S)
    rack.heal()
    healed_s = time.monotonic()
    while leader not in (found := fleet.jobs(fleet.servers[others[0]]))[2] and leader != found[1]:
        assert time.monotonic() < healed_s + BACK_S, found
    print(f"it holds all again {time.monotonic() - healed_s:.1f} s after the cut has ended")


def test_b107_b112_nats_of_three_servers(rack):
    """B107: an engine is cut off from NATS alone. B112: a server is. In the end everything is back."""
    fleet = NatsFleet([rack.host(name) for name in ("n1", "n2", "n3")])
    p, d = fleet.pair(rack.host("p"), rack.host("d"))
    for engine in (d, p):
        cut_off_from_nats(rack, fleet, engine, d)
    cut_the_leader_off(rack, fleet, [p, d], d)
    # With a server that comes back some elect anew, which may be seconds later: the broker is away for a second then.
    wait_for(lambda: d.serve(8, blocks=1) == {"remote": 8}, "they don't work together", NEXT_JOB_S)
    for engine in (p, d):
        engine.rests(BACK_S)
        engine.keeps_free_blocks()
