# SPDX-License-Identifier: Apache-2.0
"""Workers that come and go by DNS and by a file, with a name server and engines on the loopback."""
import asyncio
import contextlib
import itertools
import json
import logging
import os
import threading
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
from vllm_pd.router.options import MAX_SHOWN_CHARS, RouterOptions, parse_dns
from vllm_pd.router.policy import RoutingPolicyConfig
from vllm_pd.router.workers import WorkerState
from vllm_pd.rpc.addresses import url_of
from vllm_pd.rpc.ports import take_free

NAME = "engines.test"
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "m", "float32", "float32", 16, 2, 2, 64, "hnd")
QUICK_DNS = {"dns_period_s": 0.1, "dns_timeout_s": 0.6, "file_period_s": 0.05}


@pytest.fixture(autouse=True)
def _absent_for_a_short_time(monkeypatch):
    monkeypatch.setattr(discovery, "ABSENT_S", 0.3)


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
    settings = {**QUICK_DNS, "dns_server": server.address, **options}
    async with serving(0, up=False, worker_dns=names, **settings) as (served, _):
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


async def test_addresses_join_and_leave():
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2") as engines:
        server.zone = {(NAME, "A"): ["127.0.0.1", "127.0.0.2"]}
        async with by_dns(server, f"{NAME}:{engines[0].port}") as served:
            await served.until(lambda: ups(served) == {engine.url for engine in engines})
            assert all(engine.probes for engine in engines), "nobody gets requests before a probe"
            assert (await served.ask()).status == 200
            assert {worker.source.value for worker in served.router.workers} == {"dns"}
            assert await problem(served) == "ok"
            server.zone[(NAME, "A")] = ["127.0.0.2"]
            await served.until(lambda: known(served) == {engines[1].url})
            server.zone[(NAME, "A")] = ["127.0.0.1", "127.0.0.2"]
            await served.until(lambda: engines[0].url in ups(served))


async def test_of_an_engine_with_both_addresses_one_is_a_worker(monkeypatch):
    """It would count twice otherwise: as many open requests, and two subscriptions to its events."""
    async with DnsServer() as server, engines_at("127.0.0.1", "::1") as (four, six):
        server.zone = {(NAME, "A"): ["127.0.0.1"], (NAME, "AAAA"): ["::1"]}
        async with by_dns(server, f"{NAME}:{four.port}") as served:
            await served.until(lambda: ups(served) == {four.url})
            await answered(server, 6)
            assert known(served) == {four.url} and {kind for _, kind in server.asked} == {"A"}
            monkeypatch.setattr(served.router._discovery._dns[0].views["A"], "_absent_s", 1000.0)
            server.zone[(NAME, "A")] = []
            await answered(server, 6)
            assert known(served) == {four.url}, "it may be named again"
            monkeypatch.undo()
            served.router._discovery._dns[0].views["A"]._absent_s = 0.0
            await served.until(lambda: ups(served) == {six.url} == known(served))
            assert await problem(served) == "ok"
            server.moods["A"] = Mood.SERVFAIL
            await served.until(partial(has_problem, served, "A can't be looked up"))
            assert known(served) == {six.url}
            server.moods.clear()
            server.zone[(NAME, "A")] = ["127.0.0.1"]
            await served.until(lambda: ups(served) == {four.url} == known(served))


@pytest.mark.parametrize("mood, found", [(Mood.ANSWER, 60), (Mood.NO_EDNS, 3)])
async def test_a_server_that_names_a_few_names_all_where_there_is_room(mood, found):
    async with DnsServer() as server:
        server.zone = {(NAME, "A"): [f"10.9.0.{number}" for number in range(60)]}
        server.few, server.mood = 3, mood
        options = RouterOptions(dns_server=server.address)
        urls = await asyncio.to_thread(discovery.look_up, options, parse_dns("key", f"{NAME}:80"), "A")
        assert len(urls) == found and not server.over_tcp


async def test_names_whose_servers_are_silent_hold_up_no_other():
    async with DnsServer() as server:
        lame = [f"lame{number}.test" for number in range(8)]
        server.moods = dict.fromkeys(lame, Mood.SILENT)
        server.zone = {(NAME, "A"): ["127.0.0.1"]}
        async with by_dns(server, *(f"{name}:80" for name in lame), f"{NAME}:80", dns_timeout_s=5.0) as served:
            await served.until(lambda: known(served))
            assert sum(found.endswith("is not read yet") for found in served.router._discovery.as_json().values()) == 8


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
            first.go_on = asyncio.Event()
            stream = asyncio.create_task(served.ask(True))
            await served.until(lambda: first.asked)
            server.zone = {(NAME, "A"): ["127.0.0.2"]}
            await served.until(lambda: ups(served) == {second.url} and known(served) == {second.url})
            assert not stream.done()
            assert (await served.ask()).json["from"] == second.port and second.asked
            assert not stream.done()
            first.go_on.set()
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


async def test_a_failure_at_the_second_kind_of_record_is_one_of_the_name():
    async with DnsServer() as server, engines_at("::1") as [engine]:
        server.zone = {(NAME, "AAAA"): ["::1"]}
        server.moods["AAAA"] = Mood.SERVFAIL
        async with by_dns(server, f"{NAME}:{engine.port}") as served:
            await served.until(partial(has_problem, served, "AAAA can't be looked up"))
            server.moods.clear()
            await served.until(lambda: ups(served) == {engine.url})
            server.moods["AAAA"] = Mood.SERVFAIL
            await answered(server, 12)
            assert ups(served) == {engine.url} and "its workers stay" in await problem(served)


async def test_a_name_without_an_address_is_waited_for(caplog):
    async with (DnsServer() as server, engines_at("127.0.0.1") as [engine],
                by_dns(server, f"{NAME}:{engine.port}") as served):
        await answered(server, 6)
        assert (await served.ask()).status == 503 and "no worker until it has one" in await problem(served)
        assert said(caplog, "has no address that an engine can have") == 1
        server.zone = {(NAME, "A"): ["127.0.0.1"]}
        await served.until(lambda: ups(served) == {engine.url})


async def test_with_no_address_left_the_workers_leave():
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
        async with by_dns(server, f"{NAME}:{engine.port}", dns_timeout_s=10) as served:
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


async def test_a_worker_that_an_operator_has_removed_stays_away_from_partial_answers():
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2") as engines:
        server.turns[NAME, "A"] = itertools.cycle([["127.0.0.1"], ["127.0.0.2"]])
        async with by_dns(server, f"{NAME}:{engines[0].port}") as served:
            await served.until(lambda: len(ups(served)) == 2)
            await answered(server, 4)
            async with served.session.delete(served.url + "/workers", data=json.dumps({"url": engines[0].url}),
                                             headers={"Content-Type": "application/json"}) as response:
                assert response.status == 200
            server.turns[NAME, "A"] = itertools.cycle([*[["127.0.0.2"]] * 6, ["127.0.0.1", "127.0.0.2"]])
            await answered(server, 18)
            assert known(served) == {engines[1].url}


async def test_the_registry_is_heard_while_a_source_is_silent(tmp_path):
    path = tmp_path / "workers"
    async with DnsServer() as server, engines_at("127.0.0.1", "127.0.0.2") as (one, two):
        server.zone = {(NAME, "A"): ["127.0.0.1"]}
        path.write_text(two.url)
        async with by_dns(server, f"{NAME}:{one.port}", workers_file=str(path), dns_timeout_s=5.0) as served:
            await served.until(lambda: ups(served) == {one.url, two.url})
            server.mood = Mood.SILENT
            path.unlink()
            await answered(server, 1)
            await served.until(partial(has_problem, served, "there is no such file"))
            members = [m.Member(f"e{number}", role, f"tcp://127.0.0.1:{number + 1}", FINGERPRINT, http=engine.url,
                                draining=number == 0)
                       for number, (engine, role) in enumerate(((one, m.Role.BOTH), (two, m.Role.PREFILL)))]
            served.router._membership.update(members, 0.0)
            assert not known(served)
            served.router._membership.update([], 1.0)
            assert known(served) == {one.url, two.url}


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


def test_a_file_that_changes_within_its_time_and_size(tmp_path):
    path = tmp_path / "workers"
    path.write_text("http://a:8000\n")
    before = path.stat()
    watched = WatchedFile(str(path))
    assert watched.read() == ("http://a:8000", )
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_text("http://b:8000\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert watched.look() is None and watched.look() == ("http://b:8000", )


async def test_a_file_system_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "FILE_TIMEOUT_S", 0.2)
    path, free, looks, look = tmp_path / "workers", threading.Event(), [], WatchedFile.look
    path.write_text("http://127.0.0.1:9")

    def wait_and_look(self):
        looks.append(self)
        assert free.wait(60)
        return look(self)

    monkeypatch.setattr(WatchedFile, "look", wait_and_look)
    try:
        async with serving(0, up=False, workers_file=str(path), **QUICK_DNS) as (served, _):
            await served.until(partial(has_problem, served, "does not answer in 0.2 s"))
            await asyncio.sleep(0.6)
            assert len(looks) == 1 and known(served) == {"http://127.0.0.1:9"}
            free.set()
            path.write_text("http://127.0.0.1:10")
            await served.until(lambda: known(served) == {"http://127.0.0.1:10"})
            assert await problem(served) == "ok"
            free.clear()
            await served.until(partial(has_problem, served, "does not answer in 0.2 s"))
        assert not free.is_set(), "the router has ended"
    finally:
        free.set()


async def test_a_long_line_leaves_the_cure_to_be_read(tmp_path, caplog):
    path = tmp_path / "workers"
    path.write_text("http://127.0.0.1:9")
    async with serving(0, up=False, workers_file=str(path), **QUICK_DNS) as (served, _):
        replace(path, "x" * 1_000_000)
        await served.until(partial(has_problem, served, "characters: write it like http://127.0.0.1:8001"))
        assert len(await problem(served)) < len(str(path)) + 2 * MAX_SHOWN_CHARS + 200


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
