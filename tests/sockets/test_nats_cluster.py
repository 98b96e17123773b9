# SPDX-License-Identifier: Apache-2.0
"""NATS of three servers: what a fleet keeps there outlives any one of them."""
from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from tests.fakes.brokers import NatsCluster, NatsServer
from tests.sockets.test_broker_contract import Settings, Speaker, know_each_other
from vllm_pd.broker.nats_store import REPLICAS
from vllm_pd.protocol import messages as m

HELD_S = 60.0  # by an idle machine 10; a busy one needs longer for an election
_prefixes = (f"t{number}" for number in itertools.count())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    cluster = NatsCluster(tmp_path)
    try:
        asyncio.run(has_leader(cluster))
        yield cluster
    finally:
        cluster.close()


async def has_leader(cluster: NatsCluster) -> None:
    """Wait until the servers have found each other, which takes them some seconds after a start."""
    client = await nats.connect(cluster.url.split(","))
    deadline_s = time.monotonic() + HELD_S
    while True:
        try:
            await client.jetstream(timeout=1).account_info()
            break
        except (nats.errors.Error, TimeoutError):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)
    await client.close()


async def kept(url: str, prefix: str) -> dict[str, tuple[int, str | None]]:
    """By stream: its replicas, and the name of the server that leads them."""
    client = await nats.connect(url.split(","))
    found = {}
    for name in (f"KV_{prefix}_members", f"{prefix}_jobs"):
        info = await client.jetstream().stream_info(name)
        found[name] = (info.config.num_replicas, info.cluster.leader if info.cluster else None)
    await client.close()
    return found


def goes_through(d: Speaker, p: Speaker, number: int) -> float:
    """Seconds until a job of d has reached p, put again and again as a decode engine does."""
    began_s = time.monotonic()
    attempt = m.Attempt(d.name, "r", number)
    job = m.Job(attempt, "tcp://127.0.0.1:1", [1, 2, 3], 0, HELD_S)
    while attempt not in p.attempts():
        assert time.monotonic() < began_s + HELD_S, f"{p.name} heard no job, but {p.heard}"
        d.line.send(m.Put(job))
        p.line.send(m.Credit(8, p.serial))
        for one in (d, p):
            one.listen(0.2)
    return time.monotonic() - began_s


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_b112_any_one_server_may_go(cluster: NatsCluster, fault: str, request: pytest.FixtureRequest):
    """B112: the one that leads the jobs is the worst. The next job reaches a prefill engine."""
    settings = Settings(cluster.url, prefix := next(_prefixes), ttl_s=HELD_S)
    d, p = Speaker(settings, m.Role.DECODE), Speaker(settings, m.Role.PREFILL)
    request.addfinalizer(d.close)
    request.addfinalizer(p.close)
    know_each_other(d, p)
    goes_through(d, p, 1)
    found = asyncio.run(kept(cluster.url, prefix))
    assert [replicas for replicas, _ in found.values()] == [REPLICAS] * 2
    leader = cluster.servers[int(found[f"{prefix}_jobs"][1].removeprefix("s"))]
    if fault == "killed":
        leader.kill()
        took_s = goes_through(d, p, 2)
    else:
        with leader.silent():
            took_s = goes_through(d, p, 2)
    print(f"{fault}: the next job after {took_s:.1f} s")


def test_b112_one_server_keeps_it_alone(tmp_path: Path, request: pytest.FixtureRequest):
    """B112: and needs no others."""
    server = NatsServer(tmp_path)
    request.addfinalizer(server.kill)
    d = Speaker(Settings(server.url, prefix := next(_prefixes)), m.Role.DECODE)
    request.addfinalizer(d.close)
    d.register()
    assert [replicas for replicas, _ in asyncio.run(kept(server.url, prefix)).values()] == [1, 1]
