# SPDX-License-Identifier: Apache-2.0
"""A proxy before one server, which records when requests begin and end there."""
import json

import aiohttp
from aiohttp import web

from tests.fakes.metaserver_proxy import LoopThread
from vllm_pd.rpc.ports import take_free

METASERVER = "/v1/metaserver"
RECORDED = ("/v1/completions", "/v1/chat/completions", METASERVER)
_NOT_PASSED = ("host", "content-length", "transfer-encoding", "connection")


class RecordingProxy:
    """Passes everything on to `target`, which may be set later, and puts (`name`, "begins" or "ends") into
    `record[request id]` for completions with such an id and for posts. Where the target is gone it breaks the
    connection."""

    def __init__(self, loop: LoopThread, record: dict[str, list[tuple[str, str]]], name: str, target: str = "") -> None:
        self.port = take_free("127.0.0.1")
        self.base = f"http://127.0.0.1:{self.port}"
        self.name, self.target = name, target
        self._loop, self._record = loop, record
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        loop.run(self._start())

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), auto_decompress=False,
                                              connector=aiohttp.TCPConnector(limit=0))
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    def _note(self, request: web.Request, body: bytes, what: str) -> None:
        if request.method != "POST" or request.path not in RECORDED:
            return
        name = request.headers.get("x-request-id")
        if request.path == METASERVER:
            name = json.loads(body)["request_id"].removeprefix("chatcmpl-").removeprefix("cmpl-").removesuffix("-0")
        if name:
            self._record.setdefault(name, []).append((self.name, what))

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED}
        self._note(request, body, "begins")
        try:
            async with self._session.request(request.method, self.target + request.path_qs, data=body, headers=headers,
                                             allow_redirects=False) as answer:
                passed = web.StreamResponse(status=answer.status, headers={
                    name: value for name, value in answer.headers.items() if name.lower() not in _NOT_PASSED})
                await passed.prepare(request)
                async for chunk in answer.content.iter_any():
                    await passed.write(chunk)
                self._note(request, body, "ends")
                await passed.write_eof()
                return passed
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            raise

    def close(self) -> None:
        async def end() -> None:
            await self._runner.cleanup()
            await self._session.close()
        self._loop.run(end())
