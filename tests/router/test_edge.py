# SPDX-License-Identifier: Apache-2.0
"""B66: clients that send too much, too slowly or nothing, or do not read: what they hold is bounded, and no worker is
blamed for it."""
import asyncio
import contextlib
import errno
import json
import logging
import resource
import shlex
import socket
import sys
from types import SimpleNamespace

import aiohttp
import pytest

from tests.fakes.faulty_engine import Fault, FaultyEngine, serving
from vllm_pd.frontend import edge, sparing_log
from vllm_pd.router import descriptors
from vllm_pd.rpc.ports import take_free

WITHIN_S = 60


@contextlib.asynccontextmanager
async def connected(served):
    """(reader, writer) of a connection to the router."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def said(reader) -> bytes:
    """All that comes until the router hangs up."""
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(WITHIN_S):
            while part := await reader.read(65536):
                found += part
    return bytes(found)


def request(body: bytes, *headers: str, length: int | None = None, path: str = "/v1/completions") -> bytes:
    more = "".join(f"{header}\r\n" for header in headers)
    return (f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body) if length is None else length}\r\n{more}"
            "\r\n").encode() + body


BODY = json.dumps({"model": "m", "prompt": "Hello"}).encode()
STREAM = json.dumps({"model": "m", "prompt": "Hello", "stream": True}).encode()


def assert_nobody_is_blamed(served, engines):
    assert served.router.workers.counts() == {"up": len(engines)}
    for engine in engines:
        for kind in ("connect", "broken", "timeout", "probe"):
            assert served.count("vllm:pd_router_worker_failures_total", worker=engine.url, kind=kind) == 0


def cut(served, reason):
    return served.count("vllm:pd_router_clients_cut_total", reason=reason)


@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nx: ", b"\r\n",
                                   b"GET / HTTP/1.1\r\nx",
                                   b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "],
                         ids=["target", "fields", "value", "nothing", "name", "trailer"])
async def test_b66_an_endless_header_is_refused_after_64_kib(begin):
    pieces = {b"GET / HTTP/1.1\r\n": b"x: y\r\n" * 1000, b"\r\n": b"\r\n" * 4000}
    piece = pieces.get(begin, b"a" * 8192)
    async with serving(1) as (served, engines):
        async with connected(served) as (reader, writer):
            writer.write(begin)
            sent, answer = 0, asyncio.create_task(said(reader))
            with contextlib.suppress(ConnectionError):
                while not answer.done() and sent < 32 << 20:
                    writer.write(piece)
                    sent += len(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            assert sent < 8 << 20, "the kernel's own buffers included"
            status = (await answer).split(b" ")[1:2]
            assert status in ([], [b"431"], [b"414"], [b"405"])  # none: the client sent on, and was reset
        await served.until(lambda: not served.count("vllm:pd_router_connections") and cut(served, "header_size") == 1)
        assert (await served.ask()).status == 200
        assert_nobody_is_blamed(served, engines)


async def test_b66_many_malformed_requests_are_one_line_in_the_log_and_are_counted(caplog, monkeypatch):
    sparing_log.malformed._next_s = 0.0  # as if it were the first one of this process
    async with serving(1) as (served, engines):
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
        for _ in range(20):
            async with connected(served) as (reader, writer):
                writer.write(b"no HTTP at all\r\n\r\n")
                assert b" 400 " in await said(reader)
        assert len([one for one in caplog.records if sparing_log.MALFORMED in one.getMessage()]) == 1
        assert cut(served, "malformed") == 20
        assert_nobody_is_blamed(served, engines)


def test_b66_the_next_line_says_how_many_were_left_out():
    now_s = [0.0]
    sparing = sparing_log.OncePerPeriod("a", lambda: now_s[0])
    records = [logging.LogRecord("x", logging.WARNING, "", 0, text, None, None) for text in ("a", "a", "b", "a", "a")]
    passed = [sparing.filter(one) for one in records[:4]]
    now_s[0] = sparing_log.PERIOD_S
    assert [*passed, sparing.filter(records[4])] == [True, False, True, False, True]
    assert records[4].getMessage() == "a (2 more since the last such line)"


@pytest.mark.parametrize("head, status", [
    (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    (b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 101 + b"\r\n", 431),
    (b"GET /health?" + b"a" * 9000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 414),
    (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 60_000 + b"\r\n\r\n", 200),
    (b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 90 + b"\r\n", 200),
    (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400)], ids=["bytes", "fields", "target", "long", "many", "wrong"])
async def test_b66_a_header_that_is_too_large_is_refused_and_said_to_be(head, status):
    async with serving(1) as (served, _), connected(served) as (reader, writer):
        writer.write(head)
        line, _, rest = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)).partition(b"\r\n")
        assert int(line.split(b" ")[1]) == status
        if status != 200:
            assert b"connection: close" in rest
            assert json.loads(await asyncio.wait_for(reader.read(), WITHIN_S))["code"] == status


@pytest.mark.parametrize("sent, status", [(b"", b""), (b"GET /health HTT", b"408"),
                                          (request(BODY[:5], length=50), b"408")], ids=["silent", "header", "body"])
async def test_b66_what_does_not_come_in_time_is_given_up(sent, status):
    async with serving(1, header_timeout_s=0.3, body_timeout_s=0.3) as (served, engines):
        async with connected(served) as (reader, writer):
            writer.write(sent)
            answer = await said(reader)
            assert answer.split(b" ")[1:2] == ([status] if status else [])
        await served.until(lambda: not served.count("vllm:pd_router_connections"))
        assert cut(served, "body_time" if sent.startswith(b"POST") else "head_time") == 1
        assert not engines[0].asked and served.count("vllm:pd_router_body_bytes") == 0
        assert_nobody_is_blamed(served, engines)


@pytest.mark.parametrize("sent", [b"GET /health HTTP/1.1\r\nx: ", request(b"", length=5000)], ids=["header", "body"])
async def test_b66_a_byte_now_and_then_buys_no_time(sent):
    options = {"header_timeout_s": 0.4, "body_timeout_s": 0.4}
    async with serving(1, **options) as (served, _), connected(served) as (reader, writer):
        writer.write(sent)
        answer = asyncio.create_task(said(reader))
        async with asyncio.timeout(WITHIN_S):
            while not answer.done():
                writer.write(b"a")
                await asyncio.sleep(0.05)
        assert (await answer).split(b" ")[1:2] in ([b"408"], [])


async def test_b66_a_refused_body_is_not_read_for_ever():
    async with serving(1, api_key="k", body_timeout_s=0.4) as (served, _), connected(served) as (reader, writer):
        writer.write(request(b"a" * 1000, length=1 << 40))
        answer = await said(reader)
        assert b" 401 " in answer and answer.count(b"HTTP/1.1") == 1


async def test_b66_an_idle_connection_is_closed_and_a_busy_one_is_not():
    async with serving(1, idle_timeout_s=0.3, header_timeout_s=0.3, body_timeout_s=0.3) as (served, [engine]):
        engine.gap_s = 1.0
        async with connected(served) as (reader, writer):
            writer.write(request(BODY))
            answer = await said(reader)
            assert b" 200 " in answer and answer.endswith(b'"text": "all"}]}')


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_b66_a_client_that_does_not_read_loses_its_place(stream):
    async with serving(1, write_timeout_s=0.5) as (served, [engine]):
        engine.fault, engine.chunks = Fault.LONG, 1 << 14
        async with connected(served) as (reader, writer):
            writer.transport.pause_reading()
            writer.write(request(STREAM if stream else BODY))
            await served.until(lambda: engine.asked)
            await served.until(lambda: not served.worker(engine).in_flight)
            await served.until(lambda: not served.count("vllm:pd_router_connections"))
        assert cut(served, "write_time") == 1
        assert_nobody_is_blamed(served, [engine])


async def test_b66_silent_connections_make_room_for_those_that_ask():
    async with serving(1, max_connections=40) as (served, engines), contextlib.AsyncExitStack() as stack:
        for number in range(300):
            _, writer = await stack.enter_async_context(connected(served))
            writer.write((b"", b"GET /h", request(b"", length=10))[number % 3])
        async with asyncio.timeout(WITHIN_S):
            for _ in range(20):
                assert (await served.ask(path="/health", method="GET", headers={"connection": "close"})).status == 200
                assert (await served.ask(headers={"connection": "close"})).status == 200
        assert served.count("vllm:pd_router_connections") <= 40 and cut(served, "room") >= 250
        assert_nobody_is_blamed(served, engines)


async def test_b66_where_all_connections_work_others_are_refused_and_health_is_not():
    async with serving(1, max_connections=4) as (served, [engine]), contextlib.AsyncExitStack() as stack:
        engine.fault = Fault.HANG
        for _ in range(4):
            _, writer = await stack.enter_async_context(connected(served))
            writer.write(request(BODY))
        await served.until(lambda: len(engine.asked) == 4)
        answer = await served.ask(headers={"connection": "close"})
        assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (503, 503, "1")
        assert (await served.ask(path="/health", method="GET")).status == 200
        assert len(engine.asked) == 4 and cut(served, "full") == 1
        held = [await stack.enter_async_context(connected(served)) for _ in range(edge.SPARE * 2)]
        await served.until(lambda: served.count("vllm:pd_router_connections") <= 4 + edge.SPARE)
        assert held


async def test_b66_all_bodies_together_have_a_bound():
    async with serving(1, max_bodies_bytes=10_000) as (served, [engine]), contextlib.AsyncExitStack() as stack:
        writers = []
        for _ in range(2):
            reader, writer = await stack.enter_async_context(connected(served))
            writer.write(request(b" " * 4000, length=4000 + len(BODY)))
            writers.append((reader, writer))
        await served.until(lambda: served.count("vllm:pd_router_body_bytes") == 8000)
        answer = await served.ask(prompt="x" * 3000)
        assert answer.status == 503 and "10000" in answer.json["message"] and answer.headers["retry-after"] == "1"
        assert (await served.ask(prompt="x" * 1000)).status == 200
        for reader, writer in writers:
            writer.write(BODY)
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        await served.until(lambda: served.count("vllm:pd_router_body_bytes") == 0)
        assert len(engine.asked) == 3


async def test_b66_a_body_that_says_it_is_too_long_is_refused_before_it_comes():
    async with serving(1, max_body_bytes=1000) as (served, [engine]), connected(served) as (reader, writer):
        writer.write(request(b"", length=1 << 40))
        assert b" 413 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        assert not engine.asked


async def test_b66_b82_options_without_a_key_bring_no_more_than_a_small_body():
    async with serving(1, api_key="k") as (served, [engine]), connected(served) as (reader, writer):
        options = request(b"", length=5000).replace(b"POST", b"OPTIONS")
        writer.write(options)
        assert b" 413 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        async with connected(served) as (again, more):
            more.write(options.replace(b"content-length: 5000", b"transfer-encoding: chunked")
                       + b"1388\r\n" + b" " * 5000 + b"\r\n0\r\n\r\n")
            assert b" 413 " in await asyncio.wait_for(again.readuntil(b"\r\n\r\n"), WITHIN_S)
        assert not engine.asked
        async with connected(served) as (again, more):
            more.write(request(b" " * 1000, length=2000).replace(b"POST", b"OPTIONS"))
            await served.until(lambda: served.router._open)
            await asyncio.sleep(0.1)
            assert served.count("vllm:pd_router_body_bytes") == 0
            more.write(b" " * 998 + b"{}")
            assert b" 200 " in await asyncio.wait_for(again.readuntil(b"\r\n\r\n"), WITHIN_S)


async def test_b66_requests_that_wait_for_the_one_before_them_are_bounded():
    async with serving(1) as (served, [engine]):
        engine.gap_s = 0.5
        async with connected(served) as (reader, writer):
            writer.write(request(BODY) * 3)
            for _ in range(3):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                assert b"all" in await reader.readexactly(length)
        engine.fault = Fault.HANG
        async with connected(served) as (reader, writer):
            writer.write(request(BODY) * 30)
            assert await said(reader) == b""
        await served.until(lambda: not served.worker(engine).in_flight)
        assert cut(served, "pipelined") == 1
        assert_nobody_is_blamed(served, [engine])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
async def test_b66_without_descriptors_no_worker_is_blamed(monkeypatch, number):
    loop = asyncio.get_running_loop()
    async with serving(2) as (served, engines):
        async def nothing_left(*_, **__):
            raise OSError(number, "none left")

        await served.ask(path="/health", method="GET")  # the client has its connection
        with monkeypatch.context() as patch:
            patch.setattr(loop, "create_connection", nothing_left)
            answers = [await served.ask(headers={"x-vllm-pd-explain": "1"}) for _ in range(4)]
        assert {answer.status for answer in answers} == {503}
        assert answers[0].headers["retry-after"] == "1" and '"router"' in answers[0].headers["x-vllm-pd-explain"]
        assert_nobody_is_blamed(served, engines)
        assert (await served.ask()).status == 200


async def test_b66_a_probe_without_descriptors_says_nothing(monkeypatch):
    async with serving(1, probe_interval_s=0.1) as (served, engines):
        async def nothing_left(*_, **__):
            raise OSError(errno.EMFILE, "none left")

        monkeypatch.setattr(served.router.probes, "_fetch", nothing_left)
        await served.until(lambda: served.count("vllm:pd_router_probes_total", worker=engines[0].url,
                                                outcome="inconclusive") >= 3)
        assert_nobody_is_blamed(served, engines)


async def test_b63_workers_whose_probes_hang_hold_up_no_other_ones_probe():
    async with serving(1, probe_timeout_s=60.0) as (served, [engine]), contextlib.AsyncExitStack() as stack:
        hanging = [FaultyEngine() for _ in range(120)]
        for one in hanging:
            one.sick = Fault.HANG
            await one.start()
            stack.push_async_callback(one.stop)
            served.router._membership.add(one.url)
        await served.until(lambda: all(one.probes for one in hanging))
        assert (await served.ask()).status == 200


def test_b66_an_error_is_ours_where_nothing_can_be_opened():
    assert descriptors.is_shortage(OSError(errno.EMFILE, ""))
    assert not descriptors.is_shortage(ConnectionRefusedError(errno.ECONNREFUSED, ""))
    assert not descriptors.is_shortage(ValueError())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # those that are open stay
    try:
        assert descriptors.is_shortage(socket.gaierror(-3, "Temporary failure in name resolution"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_b66_the_last_descriptor_of_an_idle_connection_is_taken_over(monkeypatch):
    loop = asyncio.get_running_loop()
    connect = loop.create_connection
    async with serving(2) as (served, engines):
        upstream = served.router.worker_client

        async def one_left(*given, **named):
            if upstream.connections:
                raise OSError(errno.EMFILE, "none left")
            return await connect(*given, **named)

        await served.ask()
        await served.ask()
        assert upstream.connections == 2
        upstream._drop_idle()
        await served.until(lambda: upstream.connections == 1)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "create_connection", one_left)
            assert [(await served.ask()).status for _ in range(6)] == [200] * 6
        assert_nobody_is_blamed(served, engines)


async def test_connections_to_workers_have_a_bound_that_only_idle_ones_feel():
    async with serving(3, max_connections=20) as (served, engines):
        upstream = served.router.worker_client
        for _ in range(3):
            answers = await asyncio.gather(*(served.ask() for _ in range(18)))
            assert {answer.status for answer in answers} == {200}
            assert upstream.connections <= 20
        upstream.max_connections = 2
        answers = await asyncio.gather(*(served.ask() for _ in range(18)))
        assert {answer.status for answer in answers} == {200}
        await served.until(lambda: upstream.connections <= 3)


async def test_b66_a_stream_that_is_silent_in_the_middle_ends_with_an_error():
    async with serving(1, stream_timeout_s=0.5) as (served, [engine]):
        engine.fault = Fault.STALL
        probes = engine.probes
        answer = await asyncio.wait_for(served.ask(True), WITHIN_S)
        assert len(answer.events) == 2 and answer.events[-1]["error"]["code"] == 504
        await served.until(lambda: engine.probes > probes)
        assert_nobody_is_blamed(served, [engine])
        engine.fault, engine.gap_s, engine.chunks = Fault.NONE, 0.2, 8  # slower than that in all, never silent
        answer = await served.ask(True)
        assert answer.events[-1] == "[DONE]" and len(answer.events) == 9


async def test_b66_a_slow_reader_is_no_silent_worker():
    async with serving(1, stream_timeout_s=0.4) as (served, [engine]):
        engine.fault, engine.chunks = Fault.LONG, 1 << 12
        async with connected(served) as (reader, writer):
            writer.write(request(STREAM))
            await served.until(lambda: engine.asked)
            writer.transport.pause_reading()
            await asyncio.sleep(1.5)
            assert served.worker(engine).in_flight
            writer.transport.resume_reading()
            found = bytearray()
            async with asyncio.timeout(WITHIN_S):
                while not found.endswith(b"0\r\n\r\n"):
                    part = await reader.read(1 << 20)
                    assert part, found[-200:]
                    found += part
            assert b"[DONE]" in found[-100:]


async def test_b66_a_thousand_silent_connections_and_256_descriptors():
    """A process of its own, with `ulimit -n 256`."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    engines = [FaultyEngine() for _ in range(3)]
    for engine in engines:
        await engine.start()
    port = take_free("127.0.0.1")
    command = (f"ulimit -n 256; exec {shlex.quote(sys.executable)} -m vllm_pd.cli router --port {port} "
               "--tokenizer none --policy round-robin " + " ".join(f"--worker {engine.url}" for engine in engines))
    process = await asyncio.create_subprocess_shell(command)
    try:
        async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
            async def ask(path, **options):
                try:
                    async with session.request("POST" if options else "GET", f"http://127.0.0.1:{port}{path}",
                                               headers={"connection": "close"}, **options) as response:
                        return response.status, await response.read()
                except aiohttp.ClientError as error:
                    return 0, repr(error)

            async with asyncio.timeout(100):
                while (await ask("/health"))[0] != 200:
                    await asyncio.sleep(0.1)
                served = SimpleNamespace(url=f"http://127.0.0.1:{port}")
                for _ in range(1000):
                    await stack.enter_async_context(connected(served))
            for _ in range(10):
                assert (await ask("/health"))[0] == 200
                answers = await asyncio.gather(*(ask("/v1/completions", data=BODY) for _ in range(20)))
                assert {status for status, _ in answers} == {200}
            shown = json.loads((await ask("/workers"))[1])["workers"]
            assert [(one["state"], one["problem"]) for one in shown] == [("up", "")] * 3
            page = (await ask("/metrics"))[1].decode()
            assert "worker_failures_total{" not in page
            assert float(page.partition("\nvllm:pd_router_connections ")[2].partition("\n")[0]) <= 96
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        process.kill()
        await process.wait()
        for engine in engines:
            await engine.stop()
