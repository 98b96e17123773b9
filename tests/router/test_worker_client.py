# SPDX-License-Identifier: Apache-2.0
"""The client of the workers: connections used again, answers of every framing, and whatever else may come (B81)."""
import asyncio
import contextlib
import random
import socket
import ssl

import pytest
import uvloop

from vllm_pd.router import worker_client
from vllm_pd.router.fatal_requests import _refuses_connections
from vllm_pd.router.worker_client import MAX_BUFFERED_BYTES, TryFailed, WorkerClient, WorkerResponseBroken
from vllm_pd.router.workers import WorkerFailure

BODY = b'{"choices": []}'
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\nX-A: 1\r\nX-A: 2\r\n\r\n" + BODY
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\n{\"choic\r\n8\r\nes\": []}\r\n0\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + BODY
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


@contextlib.asynccontextmanager
async def answering(*answers, end=False, pause_s=0.0):
    """(client, URL, what came): a server that gives these answers in turn, in two pieces each, then the last again."""
    came, left = [], list(answers)

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                came.append((writer.get_extra_info("peername")[1], head, await reader.readexactly(int(length or 0))))
                answer = left.pop(0) if len(left) > 1 else left[0]
                half = len(answer) // 2
                writer.write(answer[:half])
                await writer.drain()
                await asyncio.sleep(pause_s)
                writer.write(answer[half:])
                await writer.drain()
                if end:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = WorkerClient(1.0, ssl.create_default_context())
    try:
        yield client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", came
    finally:
        client.close()
        server.close()


async def get(client, url, body=b"", method=b"GET"):
    reply = await client.send(method, url, b"/x?y", [(b"a", b"b")], body)
    found = bytearray()
    while part := await reply.chunk():
        found += part
    return reply, bytes(found)


@pytest.mark.parametrize("answer", [SIZED, CHUNKED, TO_THE_END, CONTINUED], ids=["sized", "chunked", "end", "continue"])
async def test_every_framing_gives_the_same_body(answer):
    async with answering(answer, end=answer is TO_THE_END, pause_s=0.01) as (client, url, came):
        for _ in range(3):
            reply, body = await get(client, url, b"hello", b"POST")
            assert (reply.status, body) == (200, BODY)
        assert came[0][1].startswith(b"POST /x?y HTTP/1.1\r\nhost: 127.0.0.1:") and b"\r\na: b\r\n" in came[0][1]
        assert came[0][2] == b"hello"
        assert len({port for port, _, _ in came}) == (3 if answer is TO_THE_END else 1), "a connection is used again"


async def test_headers_keep_their_order_and_number():
    async with answering(SIZED) as (client, url, _):
        reply, _ = await get(client, url)
        assert [pair for pair in reply.headers if pair[0] == b"x-a"] == [(b"x-a", b"1"), (b"x-a", b"2")]


async def test_requests_side_by_side_have_connections_of_their_own():
    async with answering(SIZED, pause_s=0.05) as (client, url, came):
        await asyncio.gather(*(get(client, url) for _ in range(10)))
        assert len({port for port, _, _ in came}) == 10
        await asyncio.gather(*(get(client, url) for _ in range(10)))
        assert len({port for port, _, _ in came}) == 10


async def test_an_old_connection_is_not_used_again(monkeypatch):
    async with answering(SIZED) as (client, url, came):
        await get(client, url)
        monkeypatch.setattr(worker_client, "KEEP_ALIVE_S", 0.0)
        await get(client, url)
        assert len({port for port, _, _ in came}) == 2


async def test_a_reply_that_is_closed_early_takes_its_connection_along():
    long = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + bytes(1000)
    async with answering(long, SIZED, pause_s=0.2) as (client, url, came):
        reply = await client.send(b"GET", url, b"/", [], b"")
        reply.close()
        await get(client, url)
        assert len({port for port, _, _ in came}) == 2


async def test_a_worker_has_to_wait_for_a_slow_reader():
    size = 64 << 20
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)) as (client, url, _):
        reply = await client.send(b"GET", url, b"/", [], b"")
        await asyncio.sleep(0.2)
        assert reply._size < MAX_BUFFERED_BYTES + (4 << 20)
        total = 0
        while part := await reply.chunk():
            total += len(part)
        assert total == size


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_address_of_a_name_that_drops_packets_holds_up_no_other(loop_factory):
    async def reach():
        loop = asyncio.get_running_loop()
        look_up = loop.getaddrinfo

        async def named(host, port, **given):
            hosts = ("127.0.0.2", "127.0.0.1") if host == "worker" else (host, )
            return [found for one in hosts for found in await look_up(one, port, **given)]

        loop.getaddrinfo = named
        async with answering(SIZED) as (client, url, came), contextlib.AsyncExitStack() as stack:
            port = int(url.rpartition(":")[2])
            deaf = stack.enter_context(socket.socket())
            deaf.bind(("127.0.0.2", port))
            deaf.listen(0)
            for _ in range(4):  # its queue is full
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.2", port))
            reply, body = await get(client, f"http://worker:{port}")
            assert body == BODY and b"host: worker:" in came[0][1]
            deaf.close()
            assert not await _refuses_connections(f"http://worker:{port}")
        assert await _refuses_connections(f"http://worker:{port}")

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(reach())


async def test_nobody_there():
    async with answering(SIZED) as (client, url, _):
        pass
    with pytest.raises(TryFailed) as caught:
        await client.send(b"GET", url, b"/", [], b"")
    assert caught.value.kind is WorkerFailure.CONNECT and not caught.value.stale


async def test_a_connection_that_ended_meanwhile_is_told_from_a_worker_that_hangs_up():
    async with answering(SIZED, b"") as (client, url, _):
        with pytest.raises(TryFailed) as caught:
            async with asyncio.timeout(50):
                await get(client, url)
                idle = next(iter(client._idle.values()))[0]
                idle._transport.pause_reading()  # so that its end is not seen yet
                send = asyncio.ensure_future(client.send(b"GET", url, b"/", [], b""))
                await asyncio.sleep(0.05)
                idle.connection_lost(ConnectionResetError())
                await send
        assert caught.value.kind is WorkerFailure.BROKEN and caught.value.stale


@pytest.mark.parametrize("when, stale", [("late", False), ("after a byte", False), ("at once", True)])
async def test_b64_only_an_early_end_without_a_byte_says_nothing_of_the_worker(monkeypatch, when, stale):
    if when == "late":
        monkeypatch.setattr(worker_client, "STALE_S", 0.02)
    async with answering(SIZED, b"HTTP" if when == "after a byte" else b"") as (client, url, _):
        await get(client, url)
        idle = next(iter(client._idle.values()))[0]
        send = asyncio.ensure_future(client.send(b"GET", url, b"/", [], b""))
        await asyncio.sleep(0.1)
        idle.connection_lost(ConnectionResetError())
        with pytest.raises(TryFailed) as caught:
            await asyncio.wait_for(send, 5)
        assert caught.value.stale is stale


async def test_b81_whatever_comes_is_an_answer_or_an_error():
    rng = random.Random(11)
    answers = [rng.randbytes(rng.randrange(1, 200)) for _ in range(40)]
    for good in (SIZED, CHUNKED, TO_THE_END, CONTINUED) * 40:
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(bad))
            match rng.randrange(4):
                case 0:
                    bad[place] = rng.randrange(256)
                case 1:
                    del bad[place:place + rng.randrange(1, 10)]
                case 2:
                    bad[place:place] = rng.randbytes(rng.randrange(1, 10))
                case 3:
                    bad[place:place] = good
        answers.append(bytes(bad))
    answers.append(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")
    answers.append(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
    ends = {"answer": 0, "error": 0}
    async with answering(*answers, end=True) as (client, url, _):
        for _ in answers:
            async with asyncio.timeout(50):
                try:
                    await get(client, url)
                    ends["answer"] += 1
                except (TryFailed, WorkerResponseBroken):
                    ends["error"] += 1
    assert min(ends.values()) > 20, ends
