#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What clients and streams that misbehave do to a router: `python scripts/bench_edge.py --router NAME=COMMAND ...`.

Each router stands before one dummy worker of this script. Meanwhile `/health` is asked 20 times a second, each time on
a connection of its own, and the router's memory is read. Cases:

- header: one connection sends a header that does not end, up to `--megabytes`.
- silent: 1,000 connections that send nothing, for `--silent-s`.
- broken: 12 streams of the only worker break after their first token, one after the other; then 30 plain requests in
  1.5 s. What asks the worker for its health waits a second, as for an engine that is busy.
"""
import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time

import psutil

from vllm_pd.bench.servers import HOST, RouterCommand
from vllm_pd.ports import take_free

PIECE = b"a" * 65536
SILENT, INNOCENT, BREAKS = 1000, 30, 12


class BreakingWorker:
    """Answers everything with one token; breaks the stream of a prompt that says so."""

    def __init__(self) -> None:
        self.port = take_free(HOST)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                if b"get /health" in head:
                    await asyncio.sleep(1.0)
                if b"break" in body:
                    event = b'data: {"choices": [{"index": 0, "text": " t0"}]}\n\n'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
                                 b"\r\n%x\r\n%b\r\n" % (len(event), event))
                    await writer.drain()
                    await asyncio.sleep(0.1)
                    break
                card = {"id": "dummy", "object": "model", "root": "dummy", "max_model_len": 1024}
                answer = json.dumps({"object": "list", "data": [card], "model_path": "dummy", "is_generation": True,
                                     "choices": [{"index": 0, "text": " t0", "finish_reason": "length"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                             % (len(answer), answer))
        writer.transport.abort()


class WatchedRouter:
    """A router's process, and what is measured of it."""

    def __init__(self, launch: RouterCommand, worker: BreakingWorker, log: object) -> None:
        self.port = take_free(HOST)
        command = launch.arguments(self.port, [f"http://{HOST}:{worker.port}"])
        self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.health_s: list[float] = []
        self.peak = 0

    def memory(self) -> int:
        try:
            own = psutil.Process(self._process.pid)
            return sum(one.memory_info().rss for one in (own, *own.children(recursive=True)))
        except psutil.Error:
            return 0

    async def ask(self, path: str, body: dict | None = None) -> int:
        """The status; 0 where there is none within a minute."""
        data = b"" if body is None else json.dumps(body).encode()
        request = (f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n"
                   f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n").encode() + data
        writer = None
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection(HOST, self.port)
                writer.write(request)
                answer = await reader.read()
            return int(answer.split(b" ", 2)[1]) if answer else 0
        except (OSError, TimeoutError, ValueError, IndexError):
            return 0
        finally:
            if writer is not None:
                writer.transport.abort()

    async def ready(self) -> None:
        async with asyncio.timeout(60):
            while await self.ask("/v1/completions", {"model": "dummy", "prompt": "a"}) != 200:
                await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def watched(self):
        """Measures until its end."""
        async def watch() -> None:
            while True:
                began_s = time.monotonic()
                await self.ask("/health")
                self.health_s.append(time.monotonic() - began_s)
                self.peak = max(self.peak, self.memory())
                await asyncio.sleep(0.05)

        self.before, self.peak, self.health_s = self.memory(), 0, []
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            await asyncio.sleep(0.2)
            over = time.monotonic() + 60
            count = len(self.health_s)
            while len(self.health_s) == count and time.monotonic() < over:  # the answer that is under way counts
                await asyncio.sleep(0.05)
            watching.cancel()

    def shown(self) -> str:
        return (f"/health at most {1000 * max(self.health_s):.0f} ms of {len(self.health_s)}, memory "
                f"+{(self.peak - self.before) / 1e6:.0f} MB")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


async def header(router: WatchedRouter, megabytes: int) -> str:
    sent = 0
    async with router.watched():
        reader, writer = await asyncio.open_connection(HOST, router.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nx: ")
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(60):
                while sent < megabytes << 20:
                    if reader.at_eof() or reader._buffer:
                        break
                    writer.write(PIECE)
                    await writer.drain()
                    sent += len(PIECE)
        writer.transport.abort()
    return f"took {sent / 1e6:.1f} MB; {router.shown()}"


async def silent(router: WatchedRouter, silent_s: float) -> str:
    async with router.watched():
        began_s, ends = time.monotonic(), []

        async def hold(number: int) -> None:
            await asyncio.sleep(number / 500)  # not all at once: the measuring process is one of the clients
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(HOST, router.port)
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
    return f"{sum(status != 200 for status in found)} of {INNOCENT} plain requests afterwards failed: {set(found)}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=ARGS")
    parser.add_argument("--case", action="append", choices=["header", "silent", "broken"])
    parser.add_argument("--megabytes", type=int, default=150)
    parser.add_argument("--silent-s", type=float, default=20.0)
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1], ) * 2)
    cases = {"header": (header, asked.megabytes), "silent": (silent, asked.silent_s), "broken": (broken, 0)}
    for launch in (*map(RouterCommand.ours, asked.ours), *map(RouterCommand.parse, asked.router)):
        for case in asked.case or cases:
            worker = BreakingWorker()
            await worker.start()
            router = WatchedRouter(launch, worker, subprocess.DEVNULL)
            try:
                await router.ready()
                run, value = cases[case]
                print(f"{launch.name}: {case}: {await run(router, value)}", flush=True)
            finally:
                router.stop()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
