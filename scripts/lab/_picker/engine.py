# SPDX-License-Identifier: Apache-2.0
"""An engine with a prefix cache and no model, so that the hits of a placement can be counted exactly.

It keeps the newest blocks of prompts and answers, as many as its pool has, publishes in vLLM's own KV events which it
stores and evicts, and answers each completion of token ids at once with what it is asked to say.
"""
import asyncio
import collections
import itertools
import time
from collections.abc import Sequence

import msgspec
import zmq
from aiohttp import web

from vllm_pd.bench.servers import HOST
from vllm_pd.events import messages as m
from vllm_pd.events import notice
from vllm_pd.events.notice import EventsNotice

MODEL = "cached"
MAX_BODY_BYTES = 64 << 20


class CachingEngine:
    """See the module. `hit_blocks` and `prompt_blocks` are of all completions. `open` is how many it has at present.
    `token_s`: how long it takes for each token of a stream. With `holds` set, an
    answer waits until `release` is called for it; the oldest comes first. Belongs to an event loop."""

    def __init__(self, block_size: int, pool_blocks: int) -> None:
        self.block_size, self.pool_blocks = block_size, pool_blocks
        self.hit_blocks = self.prompt_blocks = self.requests = self.cancelled = self.open = 0
        self.batches = 0
        self.token_s = 0.0
        self.holds = False
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._held: collections.OrderedDict[int, int] = collections.OrderedDict()  # hash -> how often it was used
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://{HOST}:*")
        self._numbers = itertools.count()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        """Listen, at the same port each time."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health_generate", self._probe)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get(notice.PATH, self._notice)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listen no more, and end all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def close(self) -> None:
        """Stop, and end the publisher."""
        await self.stop()
        self._socket.close()
        self._context.term()

    def empty(self) -> None:
        """Forget all blocks and counts."""
        self._held.clear()
        self._publish([m.AllBlocksCleared()])
        self.hit_blocks = self.prompt_blocks = self.requests = 0

    def release(self) -> None:
        """Give the answer that has waited longest."""
        self._waiting.popleft().set_result(None)

    def compute(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Count the hits of a prompt, and cache it with its answer, whose last token is never computed."""
        tokens = [*prompt, *answer[:-1]]
        names = self._names(tokens)
        whole = len(prompt) // self.block_size
        self.prompt_blocks += whole
        self.hit_blocks += sum(1 for _ in itertools.takewhile(self._held.__contains__, names[:whole]))
        new = [number for number, name in enumerate(names) if name not in self._held]
        for name in reversed(names):  # a block is older than those that it begins
            self._held[name] = 1
            self._held.move_to_end(name)
        events: list[m.KVEvent] = []
        if new:
            first, size = new[0], self.block_size
            events.append(m.BlockStored(names[first:], names[first - 1] if first else None,
                                        tokens[first * size:len(names) * size], size))
        gone = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self.pool_blocks)]
        if gone:
            events.append(m.BlockRemoved(gone))
        if events:
            self._publish(events)

    def _names(self, tokens: Sequence[int]) -> list[int]:
        names, parent = [], 0
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            parent = hash((parent, *tokens[start:start + self.block_size])) & ((1 << 62) - 1)
            names.append(parent)
        return names

    def _publish(self, events: list[m.KVEvent]) -> None:
        batch = msgspec.msgpack.encode(m.EventBatch(time.time(), events))
        self._socket.send_multipart([b"", next(self._numbers).to_bytes(8, "big"), batch])
        self.batches += 1

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.requests += 1
        self.open += 1
        try:
            said = asked.get("answer") or list(range(asked.get("max_tokens") or 1))
            self.compute(asked["prompt"], said)
            if not asked.get("stream"):
                if self.holds:
                    self._waiting.append(asyncio.get_running_loop().create_future())
                    await self._waiting[-1]
                return web.json_response({"id": "c", "model": MODEL, "choices": [{"index": 0, "text": "all"}]})
            answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await answer.prepare(request)
            for number in range(len(said)):
                await answer.write(b'data: {"choices": [{"index": 0, "text": " t%d"}]}\n\n' % number)
                await asyncio.sleep(self.token_s)
            await answer.write(b"data: [DONE]\n\n")
            return answer
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    async def _probe(self, request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"index": 0, "text": " t0"}]})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL,
                                                              "max_model_len": 131072}]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.33.0"})

    async def _notice(self, request: web.Request) -> web.Response:
        where = EventsNotice(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), self.block_size)
        return web.Response(body=msgspec.json.encode(where), content_type="application/json")
