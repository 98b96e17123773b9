# SPDX-License-Identifier: Apache-2.0
"""B66 at an engine's own server: headers have bounds whichever parser uvicorn uses; bodies are upstream's affair."""
import asyncio
import contextlib
from types import SimpleNamespace

import pytest
import uvicorn

from vllm_pd.frontend import edge
from vllm_pd.rpc.ports import take_free

WITHIN_S = 60


async def application(scope, receive, send):
    """Answers a request with the size of its body. A WebSocket gets back what it says."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
        return
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
    await send({"type": "http.response.body", "body": b"%9d" % size})


@contextlib.asynccontextmanager
async def connected(http, shared=None, ws="auto"):
    """(reader, writer) of a connection to such a server. `shared` stands in for the server's own Edge."""
    config = uvicorn.Config(application, host="127.0.0.1", port=take_free("127.0.0.1"), http=http, ws=ws,
                            lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
    config.load()
    server = uvicorn.Server(config)
    if shared is None:
        edge.limit_headers(config)
    else:
        config.http_protocol_class = shared.connect
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(WITHIN_S):
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", config.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
            server.should_exit = True
            await serving


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_b66_an_endless_header_is_given_up(http):
    async with connected(http) as (reader, writer):
        sent, ended = 0, asyncio.create_task(reader.read())
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nx: ")
        with contextlib.suppress(ConnectionError):
            while not ended.done() and sent < 64 << 20:
                writer.write(b"a" * 65536)
                sent += 65536
                await writer.drain()
                await asyncio.sleep(0)
        assert sent < 16 << 20
        with contextlib.suppress(ConnectionError):
            assert (await ended)[9:12] in (b"431", b"400", b"")


async def test_b66_a_header_that_does_not_end_in_time_is_given_up(monkeypatch):
    limits = edge.EdgeLimits(head_s=0.3)
    monkeypatch.setattr(edge, "EdgeLimits", lambda: limits)
    async with connected("httptools") as (reader, writer):
        writer.write(b"GET / HT")
        assert (await reader.read())[9:12] == b"408"


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_large_slow_body_passes_as_before(http):
    async with connected(http) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3000000\r\n\r\n")
        for _ in range(30):
            writer.write(bytes(100_000))
            await writer.drain()
            await asyncio.sleep(0.02)
        assert (await reader.readuntil(b"  3000000")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("length", [b"", b"Content-Length: 0\r\n"])
async def test_a_websocket_is_not_kept_as_a_connection_that_sends_nothing(length):
    shared = edge.Edge(edge.EdgeLimits(head_s=0.3))
    async with connected("httptools", shared) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n" + length +
                     b"sec-websocket-version: 13\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n")
        assert b" 101 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        assert len(shared) == 0
        await asyncio.sleep(1.0)  # well over the limit for a header
        writer.write(b"\x81\x82\x00\x00\x00\x00hi")  # a text, masked with zeros
        assert await asyncio.wait_for(reader.readexactly(4), WITHIN_S) == b"\x81\x02hi"


OFFERED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"  # as the body of a request with an offer


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("pause_s", [None, 0.1])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("offer", [b"h2c", b"anything", b"websocket"])
async def test_b66_the_body_of_a_request_with_an_offer_is_no_further_request(kept, pause_s, sized, offer):
    head = (b"POST / HTTP/1.1\r\nHost: a\r\nConnection: %b, HTTP2-Settings, Upgrade\r\nUpgrade: %b\r\n%b\r\n\r\n" % (
        b"keep-alive" if kept else b"close", offer,
        b"Content-Length: %d" % len(OFFERED) if sized else b"Transfer-Encoding: chunked"))
    body = OFFERED if sized else b"%x\r\n%b\r\n0\r\n\r\n" % (len(OFFERED), OFFERED)
    async with connected("httptools", ws="none") as (reader, writer):
        writer.write(head)
        if pause_s is not None:
            await asyncio.sleep(pause_s)
        writer.write(body + (OFFERED if kept else b""))  # with another request behind it
        answers = b""
        async with asyncio.timeout(WITHIN_S):
            while answers.count(b"HTTP/1.1 ") < 1 + kept or len(answers.rpartition(b"\r\n\r\n")[2]) < 9:
                answers += (read := await reader.read(65536))
                assert read, answers
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                while read := await reader.read(65536):
                    answers += read
    assert answers.count(b" 200 ") == answers.count(b"HTTP/1.1 ") == 1 + kept
    assert answers.count(b"%9d" % len(OFFERED)) == 1 and answers.count(b"%9d" % 0) == int(kept)


@pytest.mark.parametrize("head, problem", [
    (b"GET / HTTP/1.1\r\nHost: b\r\nUpgrade: h2c", b"Host"),
    (b"CONNECT a:80 HTTP/1.1", b"CONNECT"),
    (b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nContent-Length: %d" % len(OFFERED), b"Content-Length"),
    (b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked", b"Transfer-Encoding"),
])
async def test_b66_offers_that_are_refused_end_the_connection(head, problem):
    async with connected("httptools") as (reader, writer):
        writer.write(head + b"\r\nHost: a\r\nConnection: Upgrade\r\n\r\n" + OFFERED)
        answer = await asyncio.wait_for(reader.read(), WITHIN_S)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1 and problem in answer


class Clock:
    """In place of a loop."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def time(self) -> float:
        return self.now_s

    def call_later(self, seconds, function, *given):
        return None


class Waiting:
    """A connection, as its edge sees it; `looks` counts the questions of all of them."""
    refused_s = None
    looks = 0

    def __init__(self, loop: Clock, waits) -> None:
        self.loop, self.waits, self.ended = loop, waits, False
        self.transport = SimpleNamespace(abort=lambda: setattr(self, "ended", True))

    def waiting(self):
        Waiting.looks += 1
        return self.waits


def test_b66_room_is_not_looked_for_again_at_once_where_there_was_little(monkeypatch):
    monkeypatch.setattr(Waiting, "looks", 0)
    loop, shared = Clock(), edge.Edge(edge.EdgeLimits(connections=320))
    for number in range(320):
        shared.opened(Waiting(loop, (edge._Wait.IDLE, 1.0) if number < 3 else None))
    assert Waiting.looks == 0
    new = [Waiting(loop, (edge._Wait.SILENT, 100.0)) for _ in range(20)]
    for one in new:
        shared.opened(one)
    assert len(shared) == 337 and Waiting.looks <= 321
    loop.now_s += edge.RESCAN_S
    shared.opened(Waiting(loop, None))
    assert sum(one.ended for one in new) >= 10


class Buffer:
    """A transport to a client."""

    def __init__(self) -> None:
        self.unread_bytes, self.aborted, self.closing = 0, False, False

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name):
        return None

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("closing", [False, True], ids=["open", "closing"])
@pytest.mark.parametrize("reads", [True, False], ids=["slow", "stuck"])
async def test_b66_a_client_that_reads_slowly_but_steadily_is_not_cut(reads, closing):
    counted, clock, transport = [], Clock(), Buffer()
    shared = edge.Edge(edge.EdgeLimits(write_s=10.0), counted.append)
    config = uvicorn.Config(application, lifespan="off")
    config.load()
    connection = shared.connect(config=config, server_state=uvicorn.server.ServerState(), app_state={}, _loop=clock)
    connection.connection_made(transport)
    transport.unread_bytes, transport.closing = 1 << 20, closing
    connection.pause_writing()
    for _ in range(40):
        clock.now_s += 1.0
        if reads:
            transport.unread_bytes -= 1 << 14
        if closing and transport.unread_bytes < 1 << 19:
            connection.resume_writing()
        shared._sweep(clock)
    assert transport.aborted is not reads and set(counted) == (set() if reads else {"write_time"})
    clock.now_s += 11.0
    shared._sweep(clock)
    assert transport.aborted, "it reads no more"
