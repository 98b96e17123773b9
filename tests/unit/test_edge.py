# SPDX-License-Identifier: Apache-2.0
"""B66 at an engine's own server: headers have bounds whichever parser uvicorn uses; bodies are upstream's affair."""
import asyncio
import contextlib

import pytest
import uvicorn

from vllm_pd import edge
from vllm_pd.ports import take_free

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
async def connected(http, shared=None):
    """(reader, writer) of a connection to such a server. `shared` stands in for the server's own Edge."""
    config = uvicorn.Config(application, host="127.0.0.1", port=take_free("127.0.0.1"), http=http, lifespan="off",
                            log_level="critical", timeout_graceful_shutdown=1)
    config.load()
    server = uvicorn.Server(config)
    if shared is None:
        edge.bound_headers(config)
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


async def test_a_websocket_is_not_kept_as_a_connection_that_sends_nothing():
    shared = edge.Edge(edge.EdgeLimits(head_s=0.3))
    async with connected("httptools", shared) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
                     b"sec-websocket-version: 13\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n")
        assert b" 101 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        assert len(shared) == 0
        await asyncio.sleep(1.0)  # well over the limit for a header
        writer.write(b"\x81\x82\x00\x00\x00\x00hi")  # a text, masked with zeros
        assert await asyncio.wait_for(reader.readexactly(4), WITHIN_S) == b"\x81\x02hi"
