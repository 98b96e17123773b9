# SPDX-License-Identifier: Apache-2.0
"""B42, B112: `vllm-pd doctor` says whether what a fleet has on NATS outlives one of the servers."""
import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.js import api

from tests.fakes.brokers import NatsCluster, patience  # noqa: F401
from tests.sockets.test_broker_contract import Settings, Speaker
from tests.sockets.test_nats_cluster import HELD_S, has_leader
from tests.waiting import wait_for
from vllm_pd.broker import nats_store
from vllm_pd.broker.members import Access
from vllm_pd.broker.nats_store import Kept, KeptStream, Store
from vllm_pd.ops import doctor, kept
from vllm_pd.ops.finding import Finding
from vllm_pd.protocol import messages as m


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    with contextlib.closing(NatsCluster(tmp_path)) as cluster:
        asyncio.run(has_leader(cluster))
        yield cluster


@pytest.mark.usefixtures("patience")
def test_b42_b112_doctor_says_how_many_of_three_servers_keep_it(cluster: NatsCluster, monkeypatch: pytest.MonkeyPatch):
    """All three; one of them alone, where somebody made it so; and two, with the third one down."""
    monkeypatch.setattr(kept, "ANSWER_S", HELD_S)
    speaker = Speaker(Settings(cluster.url, "t", ttl_s=HELD_S), m.Role.DECODE)
    with contextlib.closing(speaker):
        speaker.register()
    wait_for(lambda: is_whole(ask(cluster.url)), "three servers keep it")
    found = ask(cluster.url)
    assert found.lines == ["ok   nats      3 servers in the cluster; replicas that are current: "
                           "KV_t_members has 3 of 3, t_jobs has 3 of 3"]
    assert ask(cluster.servers[0].url).fact == found.fact, "the others are known from the one that is named"
    asyncio.run(keep_alone(cluster.url, "t_jobs"))
    alone = ask(cluster.url)
    assert alone.lines[0].startswith("-- ") and "t_jobs has 1 of 1" in alone.fact
    assert alone.hint == "nats stream update t_jobs --replicas=3"
    asyncio.run(keep_alone(cluster.url, "t_jobs", 3))
    wait_for(lambda: is_whole(ask(cluster.url)), "three servers keep it again")
    cluster.servers[2].kill()
    url = ",".join(server.url for server in cluster.servers[:2])
    wait_for(lambda: lacks_one(ask(url)), "two servers are left, and have a leader")


def ask(url: str) -> Finding:
    """What the doctor says of it. A server that has just changed may have no answer yet."""
    [found] = kept.check_kept(url, Access(nats_prefix="t", ttl_s=HELD_S))
    return found


def is_whole(found: Finding) -> bool:
    return found.ok and not found.hint


def lacks_one(found: Finding) -> bool:
    return (found.ok and found.fact.endswith("KV_t_members has 2 of 3, t_jobs has 2 of 3")
            and found.hint.startswith("start the servers that are down"))


async def keep_alone(url: str, stream: str, replicas: int = 1) -> None:
    """Change on how many servers a stream is, as `nats stream update` does."""
    client = await nats.connect(url.split(","))
    js = client.jetstream(timeout=HELD_S)
    config: api.StreamConfig = (await js.stream_info(stream)).config
    config.num_replicas = replicas
    await js.update_stream(config)
    await client.close()


@pytest.mark.parametrize("servers, replicas, current, hint", [
    (3, 3, 3, ""), (5, 5, 5, ""), (3, 3, 2, "start the servers"), (2, 3, 2, "start the servers"),
    (3, 1, 1, "nats stream update jobs --replicas=3"), (2, 2, 2, "make it a cluster of three servers"),
    (1, 1, 1, "make it a cluster of three servers")])
def test_b42_what_any_one_server_would_take_with_it_has_its_cure(servers: int, replicas: int, current: int, hint: str):
    found = kept.judge_kept(Kept((KeptStream("jobs", replicas, current, servers > 1), ), servers))
    assert found.ok and found.hint.startswith(hint) and bool(found.hint) is bool(hint)


def test_b42_a_replica_that_is_behind_or_gone_is_not_current():
    info = {"config": {"name": "jobs", "num_replicas": 3}, "cluster": {"name": "c", "leader": "s0", "replicas": [
        {"name": "s1", "current": True}, {"name": "s2", "current": False}]}}
    assert KeptStream.of(info) == KeptStream("jobs", 3, 2, True)
    info["cluster"]["replicas"][0]["offline"] = True
    assert KeptStream.of(info).current == 1
    del info["cluster"]["leader"]
    assert KeptStream.of(info).current == 0
    assert KeptStream.of({"config": {"name": "jobs"}}) == KeptStream("jobs", 1, 1, False)


def test_b42_a_server_that_ends_between_two_questions_is_named(monkeypatch: pytest.MonkeyPatch):
    async def refuse(*_: object, **__: object) -> Store:
        raise ConnectionError("no server")

    monkeypatch.setattr(nats_store.Store, "open", refuse)
    [found] = kept.check_kept("nats://127.0.0.1:4222", Access())
    assert not found.ok and "no server" in found.fact and found.cure
    assert [one.check for one in doctor.check_peers("nats://127.0.0.1:4222")] == ["broker"]
