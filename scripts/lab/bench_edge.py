#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What clients and streams that misbehave do to a router: `python scripts/lab/bench_edge.py --router NAME=COMMAND ...`.

Each router stands in front of one dummy worker of this script. Meanwhile `/health` is asked 20 times a second, each
time over a new connection, and the router's memory is read. Cases:

- header: one connection sends a header that does not end, up to `--megabytes`.
- silent: 1,000 connections that send nothing, for `--silent-s`.
- broken: 12 streams of the only worker break after their first token, one after the other; then 30 plain requests in
  1.5 s. The worker's `/health` takes a second, as that of a busy engine may.
"""
import argparse
import asyncio
import contextlib
import json
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator

import psutil
from aiohttp import web

from vllm_pd.bench.connection import LoadConnection, LoadError
from vllm_pd.bench.servers import HOST, RouterCommand, Server, Servers
from vllm_pd.rpc.ports import take_free

PIECE = b"a" * 65536
SILENT, INNOCENT, BREAKS = 1000, 30, 12
ANSWER_S = 60.0
ANSWER = {"object": "list", "data": [{"id": "dummy", "object": "model", "root": "dummy", "max_model_len": 1024}],
          "model_path": "dummy", "is_generation": True,
          "choices": [{"index": 0, "text": " t0", "finish_reason": "length"}]}


async def work(request: web.Request) -> web.StreamResponse:
    """The worker: answers everything with one token, and breaks the stream of a prompt that says so."""
    if request.path == "/health":
        await asyncio.sleep(1.0)
    if b"break" not in await request.read():
        return web.json_response(ANSWER)
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    await answer.write(b'data: {"choices": [{"index": 0, "text": " t0"}]}\n\n')
    await asyncio.sleep(0.1)
    request.transport.abort()
    return answer


class WatchedRouter:
    """A router, how long its /health takes, and its memory."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.health_s: list[float] = []  # of the answers with status 200
        self.failed: Counter[int] = Counter()  # the other ones, by status
        self.before = self.peak = 0

    def memory(self) -> int:
        """Resident bytes; 0 where the router has ended."""
        try:
            return self._server.memory_bytes()
        except psutil.Error:
            return 0

    async def ask(self, path: str, body: dict | None = None) -> int:
        """The status of an answer over a new connection; 0 where none comes within ANSWER_S."""
        method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        try:
            async with asyncio.timeout(ANSWER_S):
                with await LoadConnection.open(self._server.url) as connection:
                    return (await connection.exchange(method, path, data, {"connection": "close"})).status
        except (OSError, TimeoutError, LoadError):
            return 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self._server.port)

    async def ready(self) -> None:
        """Waits until it passes requests on."""
        async with asyncio.timeout(ANSWER_S):
            while await self.ask("/v1/completions", {"model": "dummy", "prompt": "a"}) != 200:
                await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Measures until the block ends."""
        async def watch() -> None:
            while True:
                began_s = time.monotonic()
                status = await self.ask("/health")
                if status == 200:
                    self.health_s.append(time.monotonic() - began_s)
                else:
                    self.failed[status] += 1
                self.peak = max(self.peak, self.memory())
                await asyncio.sleep(0.05)

        self.before, self.peak, self.health_s, self.failed = self.memory(), 0, [], Counter()
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            await asyncio.sleep(0.2)
            over, count = time.monotonic() + ANSWER_S, self._asked()
            while self._asked() == count and time.monotonic() < over:  # the answer that is under way counts
                await asyncio.sleep(0.05)
            watching.cancel()

    def _asked(self) -> int:
        return len(self.health_s) + self.failed.total()

    def shown(self) -> str:
        slowest = f"at most {1000 * max(self.health_s):.0f} ms of {len(self.health_s)}" if self.health_s else "none"
        failed = "".join(f", {count} x {status or 'no answer'}" for status, count in sorted(self.failed.items()))
        memory = f"memory +{(self.peak - self.before) / 1e6:.0f} MB" if self.memory() else "the router has ended"
        return f"/health {slowest}{failed}, {memory}"


async def header(router: WatchedRouter, megabytes: float) -> str:
    sent = 0
    async with router.watched():
        reader, writer = await router.connect()
        answered = asyncio.create_task(reader.read(1))
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nx: ")
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while sent < megabytes * 2**20 and not answered.done():
                    writer.write(PIECE)
                    await writer.drain()
                    sent += len(PIECE)
        writer.transport.abort()
        await asyncio.wait([answered])
    return f"took {sent / 1e6:.1f} MB; {router.shown()}"


async def silent(router: WatchedRouter, silent_s: float) -> str:
    async with router.watched():
        began_s, ends = time.monotonic(), []

        async def hold(number: int) -> None:
            await asyncio.sleep(number / 500)  # not all at once: the measuring process is one of the clients
            with contextlib.suppress(OSError):
                reader, writer = await router.connect()
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(silent_s):
                        await reader.read()
                        ends.append(time.monotonic() - began_s)
                writer.transport.abort()

        await asyncio.gather(*(hold(number) for number in range(SILENT)))
    held = f"the last one closed after {max(ends):.1f} s" if ends else "none closed"
    return f"{len(ends)} of {SILENT} closed in {silent_s:g} s, {held}; {router.shown()}"


async def broken(router: WatchedRouter, _: float) -> str:
    for _ in range(BREAKS):
        await router.ask("/v1/completions", {"model": "dummy", "prompt": "break", "stream": True})
    found = []
    for _ in range(INNOCENT):
        found.append(await router.ask("/v1/completions", {"model": "dummy", "prompt": "b"}))
        await asyncio.sleep(0.05)
    ended = "" if router.memory() else "; the router has ended"
    return (f"{sum(status != 200 for status in found)} of {INNOCENT} plain requests afterwards failed: {set(found)}"
            + ended)


CASES = {"header": header, "silent": silent, "broken": broken}


async def measure(command: RouterCommand, case: str, value: float) -> str:
    """The figures of one router in one case; both the router and its worker are started and ended here."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", work)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    worker, port = take_free(HOST), take_free(HOST)
    await web.TCPSite(runner, HOST, worker).start()
    try:
        with Servers(lambda *_: None, stop_timeout_s=0.0) as servers:
            router = WatchedRouter(servers.start(command.name, port,
                                                 command.arguments(port, [f"http://{HOST}:{worker}"])))
            await router.ready()
            return await CASES[case](router, value)
    finally:
        await runner.cleanup()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=ARGS")
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--megabytes", type=int, default=150)
    parser.add_argument("--silent-s", type=float, default=20.0)
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1], ) * 2)
    values = {"header": asked.megabytes, "silent": asked.silent_s, "broken": 0}
    for command in (*map(RouterCommand.ours, asked.ours), *map(RouterCommand.parse, asked.router)):
        for case in asked.case or CASES:
            print(f"{command.name}: {case}: {await measure(command, case, values[case])}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
