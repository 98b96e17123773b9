# SPDX-License-Identifier: Apache-2.0
"""Workers whose answers are made to do harm: heads without an end, and headers that come too late (B120, B81)."""
import asyncio
import contextlib
import ssl

import aiohttp
import pytest

from tests.fakes.faulty_engine import FaultyEngine, gone, serving
from vllm_pd.router import worker_client
from vllm_pd.router.policy import Policy
from vllm_pd.router.worker_session import WorkerSession
from vllm_pd.router.workers import WorkerState

MOST_SENT = 8 << 20  # by a hostile worker, if nothing ends it
MOST_READ = 2 * worker_client.MAX_HEAD_BYTES + (1 << 18)  # what uvloop and asyncio read at once included
PIECE = b"a" * 16384
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
BEGUN = CHUNKED + b"\r\n9\r\ndata: 1\n\n\r\n"
EARLY = {  # what comes first, what then comes again and again: before the first byte of a body
    "name": (b"HTTP/1.1 200 OK\r\nx", PIECE),
    "value": (b"HTTP/1.1 200 OK\r\nx: ", PIECE),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 1000),
    "reason": (b"HTTP/1.1 200 ", PIECE),
    "interim": (b"", b"HTTP/1.1 100\r\n\r\n" * 1000),
    "interim headers": (b"", b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" * 500),
    "first extension": (CHUNKED + b"\r\n8;", PIECE),
    "size": (CHUNKED + b"\r\n", b"0" * 16384),
    "lines": (b"", b"\r\n" * 8192)}
LATE = {
    "extension": (BEGUN + b"8;", PIECE),
    "trailer name": (BEGUN + b"0\r\nx", PIECE),
    "trailer": (BEGUN + b"0\r\nx: ", PIECE),
    "trailers": (BEGUN + b"0\r\n", b"x: y\r\n" * 1000)}


class HostileEngine(FaultyEngine):
    """Answers requests with `begin`, then with `piece` again and again, until its connection or MOST_SENT ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.piece, self.pause_s = b"", b"", 0.0
        self.path = ""  # the path on which it is hostile, else requests only
        self.ended = 0  # connections that the router has ended

    async def _answer(self, method, target, headers, body, reader, writer):
        if not self.piece or (target != self.path if self.path else method == "GET"):
            return await super()._answer(method, target, headers, body, reader, writer)
        self.asked.append((target, headers, body))
        writer.write(self.begin)
        with contextlib.suppress(ConnectionError):
            for _ in range(MOST_SENT // len(self.piece)):
                writer.write(self.piece)
                await writer.drain()
                if self.pause_s and await gone(reader, self.pause_s):
                    break
            else:
                return False
        self.ended += 1
        return False


def first_of(path, begin, piece):
    """Makes engines, the first one hostile on this path."""
    made = []

    def make():
        made.append(HostileEngine())
        if len(made) == 1:
            made[0].path, made[0].begin, made[0].piece = path, begin, piece
        return made[-1]

    return make


@pytest.fixture
def received(monkeypatch):
    """The bytes that came from workers, by connection."""
    counts = {}
    receive = worker_client._WorkerConnection.data_received

    def counting(connection, data):
        counts[connection] = counts.get(connection, 0) + len(data)
        receive(connection, data)

    monkeypatch.setattr(worker_client._WorkerConnection, "data_received", counting)
    return counts


def failures(served, engine, kind):
    return served.count("vllm:pd_router_worker_failures_total", worker=engine.url, kind=kind)


@pytest.mark.parametrize("kind", EARLY)
async def test_b120_a_head_without_an_end_is_read_for_64_kib_and_another_worker_answers(received, kind):
    async with serving(2, make=HostileEngine) as (served, engines):
        hostile = engines[0]
        hostile.begin, hostile.piece = EARLY[kind]
        while not hostile.asked:
            answer = await served.ask()
            assert answer.status == 200 and answer.json["from"] == engines[1].port
        assert max(received.values()) <= MOST_READ
        assert failures(served, hostile, "broken") == 1 and not failures(served, engines[1], "broken")
        await served.until(lambda: hostile.ended == 1)


@pytest.mark.parametrize("kind", LATE)
async def test_b120_what_follows_a_body_without_an_end_is_read_for_64_kib_and_the_stream_ends_with_an_error(
        received, kind):
    async with serving(2, make=HostileEngine) as (served, engines):
        hostile = engines[0]
        hostile.begin, hostile.piece = LATE[kind]
        while not hostile.asked:
            answer = await served.ask(stream=True)
        assert answer.status == 200 and answer.events[-1]["error"]["code"] == 502
        assert max(received.values()) <= MOST_READ
        assert failures(served, hostile, "broken") == 1
        await served.until(lambda: hostile.ended == 1)


@pytest.mark.parametrize("begin, piece", [
    (EARLY["name"][0], b"a"), (EARLY["value"][0], b"a"), (EARLY["headers"][0], b"x: y\r\n"),
    (b"", b"HTTP/1.1 100\r\n\r\n"), (EARLY["first extension"][0], b"a"), (LATE["trailer"][0], b"a"),
    (LATE["trailers"][0], b"x: y\r\n")],
    ids=["name", "value", "headers", "interim", "extension", "trailer", "trailers"])
async def test_b120_nothing_goes_on_after_the_client_has_left(begin, piece):
    async with serving(1, make=HostileEngine) as (served, [hostile]):
        hostile.begin, hostile.piece, hostile.pause_s = begin, piece, 0.02  # far from the bound
        ask = asyncio.ensure_future(served.ask(stream=True))
        await served.until(lambda: hostile.asked)
        await asyncio.sleep(0.1)
        ask.cancel()
        await served.until(lambda: hostile.ended == 1)
        await served.until(lambda: served.count("vllm:pd_router_clients_gone_total") == 1)
        assert not failures(served, hostile, "broken")


@pytest.mark.parametrize("path", ["/v1/models", "/health_generate", "/pd/events"])
@pytest.mark.parametrize("kind", EARLY)
async def test_b120_what_a_probe_reads_has_the_same_bound(received, kind, path):
    async with serving(2, Policy.KV, up=False, make=first_of(path, *EARLY[kind])) as (served, [hostile, good]):
        await served.until(lambda: hostile.ended and served.worker(good).state is WorkerState.UP)
        await served.until(lambda: path == "/pd/events" or served.count(
            "vllm:pd_router_probes_total", worker=hostile.url, outcome="failed"))
        assert max(received.values()) <= MOST_READ
        assert (await served.ask()).status == 200


async def test_b120_of_the_answer_to_a_probe_no_more_is_read_than_one_token_needs(received):
    begin = b"HTTP/1.1 200 X\r\n\r\n{\"choices\": [{\"text\": ["
    async with serving(1, up=False, make=first_of("/health_generate", begin, b"[]," * 8192)) as (served, [hostile]):
        await served.until(lambda: hostile.ended)
        assert max(received.values()) <= MOST_READ


@pytest.mark.parametrize("path", ["/v1/models", "/health_generate", "/pd/events"])
async def test_b110_no_worker_sends_the_routers_own_requests_elsewhere(path):
    other = FaultyEngine()
    await other.start()
    elsewhere = f"HTTP/1.1 302 X\r\nlocation: {other.url}{path}\r\ncontent-length: 0\r\n\r\n".encode()
    async with serving(1, Policy.KV, up=False, make=first_of(path, elsewhere, b"\r\n" * 8192)) as (served, [hostile]):
        await served.until(lambda: hostile.asked)
        await asyncio.sleep(0.3)
        await other.stop()
        assert not other.heard


class DeepEngine(FaultyEngine):
    """Answers with lists in lists on `path`, as long as it is set."""
    path = "/none"

    async def _answer(self, method, target, headers, body, reader, writer):
        if target != self.path:
            return await super()._answer(method, target, headers, body, reader, writer)
        self.asked.append((target, headers, body))
        page = b'{"x": ' + b"[" * 15_000 + b"]" * 15_000 + b"}"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page))
        return True


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/pd/events", "/health_generate"])
async def test_b120_a_page_of_lists_in_lists_ends_no_probe(path, monkeypatch):
    """B120: msgspec raises RecursionError for it. The worker is asked again."""
    monkeypatch.setattr("vllm_pd.router.subscriptions.RETRY_S", (0.1, 0.1))
    monkeypatch.setattr(DeepEngine, "path", path)
    async with serving(1, Policy.KV, up=False, make=DeepEngine) as (served, [deep]):
        asked = 1 if path == "/version" else 2  # which is asked again when the worker comes up again
        await served.until(lambda: sum(target == path for target, _, _ in deep.asked) >= asked)
        deep.path = "/none"
        await served.until(lambda: served.worker(deep).state is WorkerState.UP)
        assert (await served.ask()).status == 200


async def test_b120_the_routers_own_requests_leave_nothing_of_a_worker():
    async with serving(1) as (served, [engine]):
        session = WorkerSession(1.0, ssl.create_default_context())
        for url in (engine.url, "http://127.0.0.1:1"):
            with contextlib.suppress(ConnectionRefusedError):
                async with session.request("GET", url + "/v1/models", None, {}) as answer:
                    assert answer.status == 200 and await answer.readany()
        await served.until(lambda: not session._client.connections)
        assert not session._client._idle


async def test_b120_a_body_in_chunks_of_a_byte_waits_for_its_reader_too():
    async with serving(1, make=HostileEngine) as (served, [hostile]):
        hostile.begin, hostile.piece = CHUNKED + b"\r\n", b"1\r\na\r\n" * 10_000
        client = served.router.worker_client
        reply = await client.send(b"POST", hostile.url, b"/", [], b"")
        await served.until(lambda: not reply._connection._transport.is_reading())
        assert len(reply._parts) <= 2 * (1 << 18) // 6, "two reads at most"
        reply.close()


async def test_b120_a_long_stream_of_small_chunks_has_no_bound():
    async with serving(1) as (served, [engine]):
        engine.chunks = 20_000  # the framing alone has more than 64 KiB
        answer = await served.ask(stream=True)
        assert answer.events[-1] == "[DONE]" and len(answer.events) == engine.chunks + 1


SECOND = b"HTTP/1.1 200 OK\r\nset-cookie: b=1\r\naccess-control-allow-origin: *\r\ncontent-length: 2\r\n\r\n{}"
TRAILERS = b"Set-Cookie: a=1\r\nAccess-Control-Allow-Origin: *\r\nX-Last: 1\r\n"
CHUNKED_JSON = (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
                b"2\r\n{}\r\n0\r\n")
SIZED_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize("answer", [CHUNKED_JSON + TRAILERS + b"\r\n", CHUNKED_JSON + b"\r\n" + SECOND,
                                    SIZED_JSON + SECOND, CHUNKED_JSON + TRAILERS + b"\r\n" + SECOND],
                         ids=["trailers", "chunked, second", "sized, second", "both"])
async def test_b81_the_headers_of_an_answer_end_where_its_head_ends(answer):
    async with serving(1) as (served, [engine]):
        for raw in (answer, answer, CHUNKED_JSON + b"\r\n"):  # the last on a connection that has had trailers
            engine.raw = raw, True
            got = await served.ask()
            assert (got.status, got.body) == (200, b"{}")
            assert set(got.headers) <= {"content-type", "content-length", "transfer-encoding"}
        assert len(engine.asked) == 3 and not failures(served, engine, "broken")


async def test_b81_an_answer_with_another_length_in_its_trailers_is_broken():
    async with serving(1) as (served, [engine]):
        engine.raw = CHUNKED_JSON + b"Content-Length: 3\r\n\r\n", True
        async with served.session.post(served.url + "/v1/completions", data=b'{"model": "m"}') as answer:
            assert answer.status == 200 and "content-length" not in answer.headers
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()


async def test_b81_trailers_of_a_request_do_not_become_headers():
    async with serving(1) as (served, [engine]):
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for trailers in (b"X-Last: 1\r\nAuthorization: Bearer other\r\nX-Forwarded-For: 1.2.3.4\r\n", b""):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1e\r\n"
                         b'{"model": "m", "prompt": "Hi"}\r\n0\r\n' + trailers + b"\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 50)
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await asyncio.wait_for(reader.readexactly(length), 50)
            assert head.startswith(b"HTTP/1.1 200")
            assert set(engine.asked[-1][1]) == {"host", "via", "content-length"}
        writer.close()


@pytest.mark.parametrize("status", ["600", "700", "999", "099", "000"])
async def test_b81_a_status_that_http_does_not_have_is_no_answer(status):
    async with serving(2) as (served, engines):
        engines[0].raw = f"HTTP/1.1 {status} X\r\ncontent-length: 2\r\n\r\n{{}}".encode(), True
        while not engines[0].asked:
            answer = await served.ask()
            assert answer.status == 200 and answer.json["from"] == engines[1].port
        assert failures(served, engines[0], "broken") == 1


@pytest.mark.parametrize("explain", ["0", "1"])
async def test_b81_only_the_router_itself_explains(explain):
    async with serving(1) as (served, [engine]):
        lies = b"\r\nX-Vllm-Pd-Explain: lies\r\nX-Vllm-Pd-Worker: lies\r\n\r\n"
        engine.raw = SIZED_JSON.replace(b"\r\n\r\n", lies), True
        answer = await served.ask(headers={"x-vllm-pd-explain": explain})
        assert "lies" not in str(answer.headers) and ("x-vllm-pd-worker" in answer.headers) == (explain == "1")


async def test_b81_each_connection_header_names_headers_of_one_connection():
    async with serving(1) as (served, [engine]), aiohttp.ClientSession() as session:
        more = b"\r\nConnection: keep-alive\r\nConnection: x-a, X-B\r\nX-A: 1\r\nX-B: 2\r\nX-C: 3\r\n\r\n"
        engine.raw = SIZED_JSON.replace(b"\r\n\r\n", more), True
        headers = [("Connection", "keep-alive"), ("Connection", "x-d, X-E"), ("X-D", "1"), ("X-E", "2"), ("X-F", "3")]
        async with session.post(served.url + "/v1/completions", headers=headers, data=b'{"model": "m"}') as answer:
            assert answer.status == 200 and answer.headers["x-c"] == "3"
            assert not {"x-a", "x-b", "connection"} & {name.lower() for name in answer.headers}
        sent = engine.asked[-1][1]
        assert sent["x-f"] == "3" and not {"x-d", "x-e", "connection"} & set(sent)
