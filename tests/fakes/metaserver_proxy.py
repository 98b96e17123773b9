# SPDX-License-Identifier: Apache-2.0
"""A proxy of the metaserver form: D gets each request first, posts what P needs, and P gets the prompt with that."""
import asyncio
import threading
import uuid

import aiohttp
from aiohttp import web

from vllm_pd.rpc.ports import take_free

WAIT_S = 60.0
TRIES = 3
BODY = {"model": "tiny", "prompt": "words", "max_tokens": 8}  # of a request that did not come through the proxy


class LoopThread:
    """An event loop on a thread, for the servers of a test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


class MetaserverProxy:
    """It gives requests to `decodes` in turn, and keeps each body by the id that D will have for it. When D has posted,
    it sends the body to all of `producers`, and then answers the post. `key`: that of the engines, if they have one.
    `answer`: the status of the metaserver, in place of that. `change` is applied to what P gets, `handle` may take the
    place of the metaserver. `posts` and `answers` are what Ds posted and Ps answered."""

    def __init__(self, loop: LoopThread, key: str = "") -> None:
        self.port = take_free("127.0.0.1")
        self.base = f"http://127.0.0.1:{self.port}"
        self.url = self.base + "/v1/metaserver"
        self.decodes = []
        self.posts, self.answers, self.answer, self.producers = [], [], None, []
        self.change = lambda params: params
        self.handle = self._metaserver
        self.strayed = 0
        self._bodies = {}
        self._turns = 0
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._loop = loop
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/metaserver", lambda request: self.handle(request))
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_route("*", "/elsewhere", self._elsewhere)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        loop.run(self._start())

    async def _start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _elsewhere(self, request: web.Request) -> web.Response:
        self.strayed += 1
        return web.Response()

    async def _complete(self, request: web.Request) -> web.Response:
        body, drawn = await request.json(), str(uuid.uuid4())
        self._bodies[f"chatcmpl-{drawn}" if "messages" in body else f"cmpl-{drawn}-0"] = request.path, dict(body)
        body["kv_transfer_params"] = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": self.url}
        decode = self.decodes[self._turns % len(self.decodes)]
        self._turns += 1
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session, session.post(
                decode + request.path, json=body, headers={"X-Request-Id": drawn, **self._headers}) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    async def _metaserver(self, request: web.Request) -> web.Response:
        params = await request.json()
        self.posts.append(params)
        if self.answer is not None:
            return web.Response(status=self.answer, headers={"Location": "/elsewhere"})
        path, kept = self._bodies.get(params["request_id"], ("/v1/completions", BODY))
        body = {**kept, "max_tokens": 1, "min_tokens": 1, "stream": False,
                "kv_transfer_params": self.change(params)}
        body.pop("stream_options", None)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
            self.answers += await asyncio.gather(*(self._ask(session, url + path, body) for url in self.producers))
        return web.json_response(None)

    async def _ask(self, session: aiohttp.ClientSession, url: str, body: dict) -> tuple[int, dict]:
        """P's answer; that of the last try where P is gone."""
        for _ in range(TRIES):
            try:
                async with session.post(url, json=body, headers=self._headers) as answer:
                    return answer.status, await answer.json()
            except aiohttp.ClientError as error:
                gone = str(error)
        return 0, {"message": gone}

    def close(self) -> None:
        self._loop.run(self._runner.cleanup())
