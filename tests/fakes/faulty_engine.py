# SPDX-License-Identifier: Apache-2.0
"""Engines that misbehave, each an HTTP server of its own in the test's loop, and a router before them."""
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum, auto

import aiohttp

from vllm_pd.router.app import RouterApp
from vllm_pd.router.options import RequestOrder, RouterOptions
from vllm_pd.router.policy import Policy, RoutingPolicyConfig
from vllm_pd.router.server import RouterServer
from vllm_pd.router.workers import WorkerState
from vllm_pd.rpc.addresses import url_of
from vllm_pd.rpc.ports import take_free

QUICK = {"probe_interval_s": 30.0, "probe_timeout_s": 0.4, "probe_backoff_s": (0.05, 0.2), "connect_timeout_s": 0.5,
         "tokenizer": "none", "unready_s": 0.0, "grace_s": 1.0}
TOKENS = 5


class Fault(Enum):
    """What a worker does to requests."""
    NONE = auto()
    HANG = auto()  # accepts and says nothing
    HANG_UP = auto()  # closes the connection without a word
    DIE_LATER = auto()  # the same after 0.6 s
    ERROR = auto()  # 500
    NOISE = auto()  # an answer that is not HTTP
    EMPTY = auto()  # 200 and no body, in one piece
    EMPTY_STREAM = auto()  # 200, chunked, and no chunk
    ERROR_EVENT = auto()  # 200, and the first event is an error
    SHORT = auto()  # less of a body than its length says
    BUSY = auto()  # 503 with Retry-After
    FULL = auto()  # 429
    BREAK = auto()  # the connection ends after the first token
    CUT = auto()  # in the middle of an event
    LONG = auto()  # a long answer: events of 4 KiB, or 32 MiB in one piece
    STALL = auto()  # nothing more after the first token
    REFUSE = auto()  # 400: the client's own fault


class FaultyEngine:
    """`fault` is what requests get, `sick` what probes get; either may be changed at any time. Counts both. A request
    with "poison" in it gets a 500 whatever they are."""

    def __init__(self, model: str = "m", host: str = "127.0.0.1") -> None:
        self.fault = self.sick = Fault.NONE
        self.model = model
        self.generate_route = True
        self.cards: list[dict] = []  # of /v1/models; else one of `model`
        self.strict = False  # whether other models than its own get a 404
        self.raw: tuple[bytes, bool] | None = None  # the answer to a request, and whether the connection then goes on
        self.survives = False  # what kills others
        self.params: object = None  # `kv_transfer_params` of its whole answers, if it is a prefill engine
        self.refuses = Fault.NONE  # what a request with "refuse me" in it gets
        self.page: str | None = None  # of /metrics, in place of what `generated` has
        self.metrics_read = 0
        self.generated: Iterator[int] | None = None  # on /metrics; at its end 404; None: silent if `sick` is HANG
        self.notices: list[tuple[int, dict]] = []  # answers to GET /pd/events, the last for ever; else 404
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.heard = 0  # requests of any kind
        self.probes = 0
        self.version = "0.9.2"
        self.cancelled = 0
        self.gap_s = 0.0
        self.go_on: asyncio.Event | None = None  # a stream waits for it after each token
        self.chunks = TOKENS
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task] = set()
        self.host, self.port = host, take_free(host)
        self.url = url_of(host, self.port, "http")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)

    async def stop(self) -> None:
        """As a process that is killed: nothing listens, every connection is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._open.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *lines = head.decode("latin-1").split("\r\n")[:-2]
                method, target, _ = line.split(" ")
                self.heard += 1
                headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(method, target, headers, body, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _answer(self, method, target, headers, body, reader, writer) -> bool:
        """Whether the connection goes on."""
        probe = target == "/health_generate" or b'"prompt":"a"' in body
        if target == "/v1/models":
            return whole(writer, 200, {"data": self.cards or [{"id": self.model, "root": "none", "parent": None}]})
        if target == "/version":
            return whole(writer, 200 if self.version else 404, {"version": self.version})
        if target == "/metrics":
            return await self._metrics(reader, writer)
        if target == "/pd/events" and self.notices:
            return whole(writer, *(self.notices.pop(0) if len(self.notices) > 1 else self.notices[0]))
        if target == "/health_generate" and not self.generate_route or target.startswith("/pd/"):
            return whole(writer, 404, {"detail": "Not Found"})
        self.probes += probe
        if not probe:
            self.asked.append((target, headers, body))
        if self.raw is not None and not probe:
            writer.write(self.raw[0])
            await writer.drain()
            return self.raw[1]
        fault = self.sick if probe else Fault.ERROR if b"poison" in body else self.fault
        if b"refuse me" in body:
            fault = self.refuses
        if b"kill" in body and not self.survives:
            self._server.close()
            for task in self._open - {asyncio.current_task()}:  # a process that is gone has no connections
                task.cancel()
            return False
        if not probe and self.strict and json.loads(body)["model"] != self.model:
            return whole(writer, 404, {"object": "error", "message": "The model does not exist.", "code": 404})
        return await self._do(fault, json.loads(body or b"{}"), reader, writer)

    async def _do(self, fault: Fault, asked: dict, reader, writer) -> bool:
        match fault:
            case Fault.HANG:
                return await self._stay_silent(reader)
            case Fault.HANG_UP:
                return False
            case Fault.DIE_LATER:
                await asyncio.sleep(0.6)
                return False
            case Fault.NOISE:
                writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
                await writer.drain()
                return False
            case Fault.ERROR:
                return whole(writer, 500, {"object": "error", "message": f"broken {self.port}"})
            case Fault.REFUSE:
                return whole(writer, 400, {"object": "error", "message": "no such thing"})
            case Fault.BUSY:
                return whole(writer, 503, {"message": "draining"}, "retry-after: 7\r\n")
            case Fault.FULL:
                return whole(writer, 429, {"message": "full"})
            case Fault.EMPTY:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                return True
            case Fault.SHORT:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{}")
                await writer.drain()
                return False
        if asked.get("stream") or fault in (Fault.EMPTY_STREAM, Fault.ERROR_EVENT):
            return await self._stream(fault, reader, writer)
        if fault is Fault.LONG:
            return whole(writer, 200, {"choices": [{"index": 0, "text": "a" * (32 << 20)}]})
        if self.gap_s and asked.get("prompt") and await gone(reader, self.gap_s):  # no probe
            self.cancelled += 1
            return False
        handed = {} if self.params is None else {"kv_transfer_params": self.params}
        return whole(writer, 200, {"id": "x", "from": self.port, "choices": [{"index": 0, "text": "all"}], **handed})

    async def _stream(self, fault: Fault, reader, writer) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-from: " +
                     str(self.port).encode() + b"\r\ntransfer-encoding: chunked\r\n\r\n")
        if fault is Fault.EMPTY_STREAM:
            writer.write(b"0\r\n\r\n")
            return True
        if fault is Fault.ERROR_EVENT:
            chunk(writer, b'data: {"error": {"message": "the engine is dead", "code": 500}}\n\n')
            return chunk(writer, b"")
        for number in range(self.chunks):
            text = f" t{number}" + " " * (4096 * (fault is Fault.LONG))
            event = b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"
            chunk(writer, event[:12] if fault is Fault.CUT and number else event)
            await writer.drain()
            if fault is Fault.STALL:
                return await self._stay_silent(reader)
            if fault is Fault.BREAK or fault is Fault.CUT and number:
                await asyncio.sleep(0.05)
                return False
            if self.go_on is not None:
                await self.go_on.wait()
            if self.gap_s and await gone(reader, self.gap_s):
                self.cancelled += 1
                return False
        chunk(writer, b"data: [DONE]\n\n")
        return chunk(writer, b"")

    async def _metrics(self, reader, writer) -> bool:
        self.metrics_read += 1
        if self.page is not None:
            writer.write(f"HTTP/1.1 200 X\r\ncontent-length: {len(self.page.encode())}\r\n\r\n{self.page}".encode())
            return True
        if self.generated is None and self.sick is Fault.HANG:
            return await self._stay_silent(reader)
        tokens = next(self.generated or iter(()), None)
        if tokens is None:
            return whole(writer, 404, {})
        body = f'vllm:generation_tokens_total{{engine="0"}} {tokens}.0\n'
        writer.write(f"HTTP/1.1 200 X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        return True

    async def _stay_silent(self, reader) -> bool:
        await gone(reader, 60)
        self.cancelled += 1
        return False


def whole(writer, status: int, value: dict, more: str = "") -> bool:
    body = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}content-length: {len(body)}\r\n\r\n"
                 .encode() + body)
    return True


def chunk(writer, data: bytes) -> bool:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


async def gone(reader: asyncio.StreamReader, within_s: float) -> bool:
    """Whether the other end hangs up within that time."""
    try:
        return await asyncio.wait_for(reader.read(1), within_s) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


class Served:
    """A router that is reached by HTTP, and a client of it."""

    def __init__(self, router: RouterApp, url: str, session: aiohttp.ClientSession) -> None:
        self.router, self.url, self.session = router, url, session
        self.server: RouterServer | None = None

    async def ask(self, stream: bool = False, headers: dict | None = None, path: str = "/v1/completions",
                  method: str = "POST", **body) -> "Answered":
        data = json.dumps({"model": "m", "prompt": "Hello", "stream": stream, **body}) if method == "POST" else None
        async with self.session.request(method, self.url + path, data=data,
                                        headers={"content-type": "application/json", **(headers or {})}) as response:
            return Answered(response.status, dict(response.headers), await response.read())

    async def until(self, condition, within_s: float = 50.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)

    def worker(self, engine: FaultyEngine):
        return self.router.workers.get(engine.url)

    def count(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0


class Answered:

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, {k.lower(): v for k, v in headers.items()}, body

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def events(self) -> list[dict | str]:
        found = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in found]


@contextlib.asynccontextmanager
async def serving(count: int, policy: Policy = Policy.ROUND_ROBIN, up: bool = True,
                  events: tuple[str | list[str], ...] = (), prefills: int = 0,
                  make: Callable[[], FaultyEngine] = FaultyEngine, metaserver: bool = False,
                  **options) -> AsyncIterator[tuple[Served, list[FaultyEngine]]]:
    """A router over so many engines, all up unless told otherwise, the first of them with `events` at these endpoints,
    several for several ranks, and `prefills` more as prefill engines, the last ones, in the order prefill-first or for
    the `metaserver`; made by `make`; leak-checked in the end (B20)."""
    engines = [make() for _ in range(count + prefills)]
    for engine in engines:
        await engine.start()
    port = take_free("127.0.0.1")
    if prefills:
        options["prefill_workers"] = tuple(one.url for one in engines[count:])
    if metaserver:
        options["metaserver"] = f"http://127.0.0.1:{port}/v1/metaserver"
    elif prefills:
        options["order"] = RequestOrder.PREFILL_FIRST
    settings = {**QUICK, "workers": tuple(engine.url for engine in engines[:count]),
                "events": tuple(f"{engine.url}={at}" for engine, told in zip(engines, events, strict=False)
                                 for at in ([told] if isinstance(told, str) else told)), **options}
    router = RouterApp(RouterOptions(port=port, **settings), RoutingPolicyConfig(policy=policy))
    server = RouterServer(router)
    serve = asyncio.create_task(server.serve())
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        served = Served(router, url_of(options.get("host", "127.0.0.1"), port, "http"), session)
        served.server = server
        try:
            await served.until(lambda: server.started)
            if up:
                ups = len(settings["workers"]) + prefills
                await served.until(lambda: sum(one.state is WorkerState.UP for one in router.workers) == ups)
            yield served, engines
            await served.until(lambda: not any(worker.in_flight for worker in router.workers))
        finally:
            server.should_exit = True
            await asyncio.wait_for(serve, 100)
            for engine in engines:
                await engine.stop()
