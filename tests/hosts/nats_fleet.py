# SPDX-License-Identifier: Apache-2.0
"""A fleet over NATS, whose servers are on hosts of their own, and what may happen to one of these."""
from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import nkeys

from tests.fakes.brokers import nats_server
from tests.hosts.fleet import Fleet, HostedEngine, freeze, kill, thaw
from tests.hosts.rack import Host, Rack

CLIENTS, ROUTES = 4222, 6222
SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
PUBLIC = nkeys.from_seed(bytearray(SEED.encode())).public_key.decode()
START_S = 60.0
FAULTS = ("killed", "frozen", "cut off", "alone")
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


class Jobs(NamedTuple):
    """What a server says of the stream of jobs: how many servers are to hold it, the one that leads it (None: none),
    and the others that have all of it."""
    replicas: int
    leader: str | None
    others: list[str]


class NatsFleet(Fleet):
    """A fleet with NATS in place of the broker: a server on each of these hosts, which has its name. Several are a
    cluster. `settings` are those of all engines."""

    def __init__(self, hosts: list[Host], **settings: object) -> None:
        seed = hosts[0].folder / "nats.seed"
        seed.touch(0o600)
        seed.write_text(SEED)
        self._prepare(hosts[0], ",".join(f"nats://{host.ip}:{CLIENTS}" for host in hosts),
                      {"nats_credentials": str(seed), **settings})
        self.servers = {host.name: host for host in hosts}
        self._programs: dict[str, subprocess.Popen] = {}
        routes = ", ".join(f'"nats://{host.ip}:{ROUTES}"' for host in hosts)
        for host in hosts:
            cluster = f'cluster {{name: c, listen: "{host.ip}:{ROUTES}", routes: [{routes}]}}\n'
            (host.folder / "nats.conf").write_text(
                f'server_name: {host.name}\nhost: "{host.ip}"\nport: {CLIENTS}\nmax_payload: 1MB\n'
                f'jetstream {{store_dir: "{host.folder}", max_memory_store: 1GB}}\n'
                f"authorization {{users: [{{nkey: {PUBLIC}}}]}}\n{cluster if len(hosts) > 1 else ''}")
            self._start_server(host)
        self._ask(hosts[0], self.url, "")

    def jobs(self, asked: str) -> Jobs:
        """What that server says of the stream of jobs."""
        host = self.servers[asked]
        return Jobs(*json.loads(self._ask(host, f"nats://{host.ip}:{CLIENTS}", "vllm_pd_jobs")))

    @contextlib.contextmanager
    def without(self, rack: Rack, name: str, fault: str, engines: Iterable[HostedEngine]) -> Iterator[None]:
        """That server is killed, frozen, cut off from the other servers and from the engines, or alone: cut off from
        the other servers, and the engines reach it. In the end it is back."""
        host, program = self.servers[name], self._programs[name]
        if fault in ("cut off", "alone"):
            cut = [server for server in self.servers.values() if server is not host]
            cut += [engine.host for engine in engines if fault == "cut off"]
            for other in cut:
                rack.cut(host, other)
            end = rack.heal
        elif fault == "frozen":
            freeze(program)
            end = functools.partial(thaw, program)
        else:
            kill(program)
            end = functools.partial(self._start_server, host)
        try:
            yield
        finally:
            end()

    def holds_all(self, name: str, asked: str, timeout_s: float) -> float:
        """Wait until that server holds all jobs again, by the word of another one. Returns the seconds that took."""
        began_s = time.monotonic()
        while name not in (found := self.jobs(asked)).others and name != found.leader:
            assert time.monotonic() < began_s + timeout_s, found
            time.sleep(0.1)
        return time.monotonic() - began_s

    def _start_server(self, host: Host) -> None:
        command = [nats_server(), "-c", str(host.folder / "nats.conf")]
        self._programs[host.name] = host.start(command, subprocess.DEVNULL, host.folder / "nats.log")

    def _ask(self, host: Host, urls: str, stream: str) -> str:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return host.run(sys.executable, "-c", ASK, urls, stream)
            except subprocess.CalledProcessError as error:
                assert time.monotonic() < deadline_s, error.stderr
