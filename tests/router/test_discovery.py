# SPDX-License-Identifier: Apache-2.0
"""Workers that come and go by DNS and by a file, with a name server and engines on the loopback."""
import asyncio
import contextlib
import itertools
import json
import logging
import os
from collections.abc import AsyncIterator
from functools import partial

import msgspec
import pytest

from tests.fakes.dns_server import DnsServer, Mood
from tests.fakes.faulty_engine import FaultyEngine, Served, serving
from vllm_pd.errors import ConfigError
from vllm_pd.protocol import messages as m
from vllm_pd.router import discovery
from vllm_pd.router.app import RouterApp
from vllm_pd.router.discovery import WatchedFile
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import RoutingPolicyConfig
from vllm_pd.router.workers import WorkerState
from vllm_pd.rpc.addresses import url_of
from vllm_pd.rpc.ports import take_free

NAME = "engines.test"
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "m", "float32", "float32", 16, 2, 2, 64, "hnd")
QUICK_DNS = {"dns_period_s": 0.1, "dns_timeout_s": 0.6, "file_period_s": 0.05}


@contextlib.asynccontextmanager
async def engines_at(*hosts: str) -> AsyncIterator[list[FaultyEngine]]:
    """Engines at these addresses, with one port."""
    port = take_free("127.0.0.1")
    engines = []
    for host in hosts:
        engine = FaultyEngine(host=host)
        engine.port, engine.url = port, url_of(host, port, "http")
        await engine.start()
        engines.append(engine)
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


@contextlib.asynccontextmanager
async def by_dns(server: DnsServer, *names: str, **options) -> AsyncIterator[Served]:
    async with serving(0, up=False, worker_dns=names, dns_server=server.address, **QUICK_DNS, **options) as (served, _):
        yield served


def ups(served: Served) -> set[str]:
    return {worker.url for worker in served.router.workers if worker.state is WorkerState.UP}


def known(served: Served) -> set[str]:
    return {worker.url for worker in served.router.workers}


def said(caplog, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


async def answered(server: DnsServer, times: int) -> None:
    """Wait until so many more questions have been asked."""
    until = len(server.asked) + times
    async with asyncio.timeout(60):
        while len(server.asked) < until:
            await asyncio.sleep(0.01)


async def problem(served: Served) -> str:
    [found] = (await served.ask(path="/workers", method="GET")).json["discovery"].values()
    return found


async def test_addresses_of_both_families_join_and_leave():
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2", "::1") as engines:
        server.zone = {(NAME, "A"): ["127.0.0.1", "127.0.0.2"], (NAME, "AAAA"): ["::1"]}
        async with by_dns(server, f"{NAME}:{engines[0].port}") as served:
            await served.until(lambda: ups(served) == {engine.url for engine in engines})
            assert all(engine.probes for engine in engines), "nobody gets requests before a probe"
            assert (await served.ask()).status == 200
            assert {worker.source.value for worker in served.router.workers} == {"dns"}
            assert await problem(served) == "ok"
            server.zone[(NAME, "A")] = ["127.0.0.2"]
            await served.until(lambda: known(served) == {engines[1].url, engines[2].url})
            server.zone[(NAME, "AAAA")] = []
            await answered(server, 8)
            assert engines[2].url in known(served), "all of a kind do not leave at once"
            server.zone[(NAME, "A")] = ["127.0.0.1", "127.0.0.2"]
            await served.until(lambda: engines[0].url in ups(served))


async def test_a_resolver_that_answers_with_a_part_takes_nobody_out():
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2") as engines:
        server.turns[NAME, "A"] = itertools.cycle([["127.0.0.1"], ["127.0.0.2"]])
        async with by_dns(server, f"{NAME}:{engines[0].port}") as served:
            await served.until(lambda: len(ups(served)) == 2)
            before = list(served.router.workers)
            await answered(server, 12)
            assert list(served.router.workers) == before


async def test_an_open_request_ends_at_a_worker_that_leaves():
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2") as (first, second):
        server.zone = {(NAME, "A"): ["127.0.0.1"]}
        async with by_dns(server, f"{NAME}:{first.port}") as served:
            await served.until(lambda: ups(served) == {first.url})
            first.gap_s = 0.4
            stream = asyncio.create_task(served.ask(True))
            await served.until(lambda: first.asked)
            server.zone = {(NAME, "A"): ["127.0.0.2"]}
            await served.until(lambda: ups(served) == {second.url} and known(served) == {second.url})
            assert not stream.done()
            assert (await served.ask()).json["from"] == second.port and second.asked
            assert (await stream).events[-1] == "[DONE]"


@pytest.mark.parametrize("mood", [Mood.SILENT, Mood.SERVFAIL, Mood.NOISE, Mood.CIRCLE])
async def test_a_resolver_that_fails_takes_nobody_out_and_is_reported_once(mood, caplog):
    caplog.set_level(logging.INFO, "vllm.pd.router")
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2") as engines:
        server.zone = {(NAME, "A"): ["127.0.0.1", "127.0.0.2"], (NAME, "AAAA"): []}
        async with by_dns(server, f"{NAME}:{engines[0].port}") as served:
            await served.until(lambda: len(ups(served)) == 2)
            before = list(served.router.workers)
            server.mood = mood
            await answered(server, 12)
            await served.until(lambda: said(caplog, "can't be looked up"))
            assert list(served.router.workers) == before, "not even as others of the same URLs"
            assert "its workers stay" in await problem(served)
            metric = {"source": f"--worker-dns {NAME}:{engines[0].port}"}
            assert served.count("vllm:pd_router_source_problem", **metric) == 1
            assert (await served.ask()).status == 200
            server.mood = Mood.ANSWER
            server.zone[(NAME, "A")] = ["127.0.0.2"]
            await served.until(lambda: known(served) == {engines[1].url})
            assert served.count("vllm:pd_router_source_problem", **metric) == 0
            assert said(caplog, "can't be looked up") == said(caplog, "names workers again") == 1


async def test_a_failure_at_one_kind_of_record_holds_up_no_other():
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2") as engines:
        server.zone = {(NAME, "A"): ["127.0.0.1"]}
        server.moods["AAAA"] = Mood.SERVFAIL
        async with by_dns(server, f"{NAME}:{engines[0].port}") as served:
            await served.until(lambda: ups(served) == {engines[0].url})
            assert "AAAA can't be looked up" in await problem(served)
            server.zone = {(NAME, "A"): ["127.0.0.2"]}
            await served.until(lambda: ups(served) == {engines[1].url} == known(served))


async def test_a_name_without_an_address_is_waited_for(caplog):
    async with (DnsServer() as server, engines_at("127.0.0.1") as [engine],
                by_dns(server, f"{NAME}:{engine.port}") as served):
        await answered(server, 6)
        assert (await served.ask()).status == 503 and "no worker until it has one" in await problem(served)
        assert said(caplog, "has no address that an engine can have") == 1
        server.zone = {(NAME, "A"): ["127.0.0.1"]}
        await served.until(lambda: ups(served) == {engine.url})


async def test_with_no_address_left_the_workers_leave_after_the_grace(monkeypatch):
    monkeypatch.setattr(discovery, "EMPTY_GRACE_S", 0.5)
    async with DnsServer() as server, engines_at("127.0.0.1") as [engine]:
        server.zone = {(NAME, "A"): ["127.0.0.1"]}
        async with by_dns(server, f"{NAME}:{engine.port}") as served:
            await served.until(lambda: ups(served) == {engine.url})
            server.zone = {}
            await served.until(lambda: not known(served))


async def test_srv_records_have_the_ports_and_targets_stay_names():
    name = "_http._tcp.engines.test"
    async with DnsServer() as server, engines_at("127.0.0.1") as [one], engines_at("127.0.0.1") as [two]:
        server.zone = {(name, "SRV"): [f"0 1 {one.port} localhost.", f"9 1 {two.port} localhost.", "0 0 0 ."]}
        async with by_dns(server, f"srv:{name}") as served:
            urls = {f"http://localhost:{engine.port}" for engine in (one, two)}
            await served.until(lambda: ups(served) == urls)
            assert {(await served.ask()).json["from"] for _ in range(4)} == {one.port, two.port}
            assert {kind for _, kind in server.asked} == {"SRV"}
            server.zone = {(name, "SRV"): [f"0 1 {two.port} localhost."]}
            await served.until(lambda: known(served) == {f"http://localhost:{two.port}"})


async def test_a_long_answer_comes_over_tcp_and_has_a_bound(caplog):
    """As from a resolver that wants to fill the router."""
    async with DnsServer() as server, engines_at("127.0.0.1") as [engine]:
        server.zone = {(NAME, "A"): ["127.0.0.1", "0.0.0.0", "169.254.169.254", "224.0.0.1", "255.255.255.255"]}
        async with by_dns(server, f"{NAME}:{engine.port}") as served:
            await served.until(lambda: ups(served) == {engine.url})
            assert known(served) == {engine.url}
            server.zone[(NAME, "A")] = ["127.0.0.1", *(f"10.9.{number // 250}.{number % 250 + 1}"
                                                        for number in range(discovery.MAX_WORKERS_OF_SOURCE))]
            await served.until(lambda: said(caplog, "1025 records"))
            assert server.over_tcp and known(served) == {engine.url}


async def test_an_operator_removes_a_worker_that_dns_still_names():
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2") as engines:
        server.zone = {(NAME, "A"): ["127.0.0.1", "127.0.0.2"]}
        async with by_dns(server, f"{NAME}:{engines[0].port}") as served:
            await served.until(lambda: len(ups(served)) == 2)
            async with served.session.delete(served.url + "/workers", data=json.dumps({"url": engines[0].url}),
                                             headers={"Content-Type": "application/json"}) as response:
                assert response.status == 200
            await answered(server, 6)
            assert known(served) == {engines[1].url}
            server.zone[(NAME, "A")] = ["127.0.0.2"]
            await answered(server, 8)
            server.zone[(NAME, "A")] = ["127.0.0.1", "127.0.0.2"]
            await served.until(lambda: len(ups(served)) == 2)


async def test_an_engine_that_drains_or_prefills_by_the_registry_gets_no_requests():
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2", "127.0.0.3") as engines:
        server.zone = {(NAME, "A"): ["127.0.0.1", "127.0.0.2", "127.0.0.3"]}
        async with by_dns(server, f"{NAME}:{engines[0].port}") as served:
            await served.until(lambda: len(ups(served)) == 3)
            update = served.router._membership.update
            roles = (m.Role.BOTH, m.Role.PREFILL, m.Role.DECODE)
            members = [m.Member(f"e{number}", role, f"tcp://127.0.0.1:{number + 1}", FINGERPRINT, http=engine.url + "/",
                                draining=number == 0)
                       for number, (engine, role) in enumerate(zip(engines, roles, strict=True))]
            update(members, 0.0)
            await served.until(lambda: known(served) == {engines[2].url})
            await answered(server, 6)
            assert known(served) == {engines[2].url}
            again = msgspec.structs.replace(members[0], incarnation="again", draining=False)
            update([again, *members], 1.0)  # its last life is still in the registry
            await served.until(lambda: ups(served) == {engines[0].url, engines[2].url})
            update([], 2.0)
            await served.until(lambda: len(ups(served)) == 3)


def replace(path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def has_problem(served: Served, words: str) -> bool:
    return any(words in found for found in served.router._discovery.as_json().values())


async def test_a_file_that_is_replaced(tmp_path, caplog):
    path = tmp_path / "workers"
    async with engines_at("127.0.0.1", "127.0.0.2", "::1") as engines:
        urls = [engine.url for engine in engines]
        path.write_text(f"# decode engines\n{urls[0]}/  # the first\n\n{urls[2]}\r\n{urls[0]}\n")
        async with serving(0, up=False, workers_file=str(path), **QUICK_DNS) as (served, _):
            await served.until(lambda: ups(served) == {urls[0], urls[2]})
            engines[0].gap_s = 0.3
            streams = [asyncio.create_task(served.ask(True)) for _ in range(2)]
            await served.until(lambda: engines[0].asked)
            replace(path, f"{urls[1]}\n")
            await served.until(lambda: ups(served) == {urls[1]} == known(served))
            assert {(await stream).events[-1] for stream in streams} == {"[DONE]"}
            for wrong, words in ((f"{urls[0]}\nhttp://\n", "line 2='http://'"), ("", "names no worker"),
                                 (f"{urls[0]}\nftp://h:1\n", "line 2='ftp://h:1'"), ("# nobody\n", "names no worker")):
                replace(path, wrong)
                await served.until(partial(has_problem, served, words))
                await asyncio.sleep(0.2)
                assert known(served) == {urls[1]} and "(its workers stay)" in await problem(served)
            assert said(caplog, "line 2='http://' can't be used: write it like") == 1
            assert said(caplog, "line 2='ftp://h:1'") == 1 and said(caplog, "names no worker") == 2
            path.unlink()
            await served.until(lambda: said(caplog, "there is no such file"))
            assert known(served) == {urls[1]}
            path.write_text(f"{urls[0]}\n{urls[1]}\n")
            await served.until(lambda: ups(served) == set(urls[:2]))
            assert await problem(served) == "ok"


async def test_a_file_behind_a_link_as_kubernetes_mounts_it(tmp_path):
    async with engines_at("127.0.0.1", "127.0.0.2") as engines:
        for number, engine in enumerate(engines):
            (tmp_path / f"..{number}").mkdir()
            (tmp_path / f"..{number}" / "workers").write_text(engine.url)
        (tmp_path / "..data").symlink_to("..0")
        (tmp_path / "workers").symlink_to("..data/workers")
        async with serving(0, up=False, workers_file=str(tmp_path / "workers"), **QUICK_DNS) as (served, _):
            await served.until(lambda: ups(served) == {engines[0].url})
            (tmp_path / "..tmp").symlink_to("..1")
            os.replace(tmp_path / "..tmp", tmp_path / "..data")
            await served.until(lambda: ups(served) == {engines[1].url} == known(served))


def test_a_half_written_file_is_read_when_it_is_whole(tmp_path):
    """Written in place: the port is cut off at first."""
    path = tmp_path / "workers"
    path.write_text("http://a:8000\n")
    watched = WatchedFile(str(path))
    assert watched.read() == ("http://a:8000", ) and watched.look() is watched.look() is None
    for part in ("http://a:80", "00\nhttp:", "//b:80"):
        with path.open("w" if part.startswith("http://a") else "a") as file:
            file.write(part)
        assert watched.look() is None
    assert watched.look() == ("http://a:8000", "http://b:80") and watched.look() is None
    path.write_text("nonsense")
    assert watched.look() is None
    with pytest.raises(ConfigError):
        watched.look()
    assert watched.look() is None, "once is enough"


async def test_a_file_that_is_missing_at_the_start_is_waited_for(tmp_path, caplog):
    path = tmp_path / "workers"
    async with (engines_at("127.0.0.1") as [engine],
                serving(0, up=False, workers_file=str(path), **QUICK_DNS) as (served, _)):
        await asyncio.sleep(0.3)
        assert said(caplog, "there is no such file: write it (it has no worker yet)") == 1
        path.write_text(engine.url)
        await served.until(lambda: ups(served) == {engine.url})


def test_a_file_that_can_t_be_used_is_refused_at_the_start(tmp_path):
    path = tmp_path / "workers"

    def refused(path) -> str:
        with pytest.raises(ConfigError) as error:
            RouterApp(RouterOptions(workers_file=str(path)), RoutingPolicyConfig())
        return str(error.value)

    assert "no regular file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused(tmp_path / "pipe")
    path.write_bytes(b"http://a:1\n\xff\n")
    assert "line 2=b'\\xff'" in refused(path) and "no UTF-8" in refused(path)
    path.write_text("http://u:p@h:1\n")
    assert "line 1='***'" in refused(path)
    path.write_text("".join(f"http://a:{port}\n" for port in range(1, discovery.MAX_WORKERS_OF_SOURCE + 2)))
    assert "it names 1025 workers: write 1024 at most" in refused(path)
    path.write_text("#" * (discovery.MAX_FILE_BYTES + 1))
    assert "longer than" in refused(path)


async def test_all_sources_together(tmp_path):
    """A worker that several name is there once, and stays while one of them names it."""
    path = tmp_path / "workers"
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2", "::1") as engines:
        urls = [engine.url for engine in engines]
        server.zone = {(NAME, "A"): ["127.0.0.1", "127.0.0.2"]}
        path.write_text(f"{urls[1]}\n{urls[2]}\n")
        async with by_dns(server, f"{NAME}:{engines[0].port}", workers=(urls[0], ), workers_file=str(path)) as served:
            await served.until(lambda: ups(served) == set(urls))
            assert [worker.url for worker in served.router.workers] == [urls[0], urls[1], urls[2]]
            server.zone = {(NAME, "A"): ["127.0.0.9"]}
            await answered(server, 10)
            assert known(served) >= set(urls), "the first is given, the second is in the file"
            replace(path, f"{urls[2]}\n")
            await served.until(lambda: urls[1] not in known(served))
