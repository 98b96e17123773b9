# SPDX-License-Identifier: Apache-2.0
"""Requests that may crash engines: after two engines, such a request is not sent to a third.

A request is suspected of a crash where its connection breaks and nothing listens at the engine's port any more. That
may be chance, so the request is tried once on another engine. After a crash of the second one it is answered with an
error, and equal requests are refused for `REMEMBERED_S`, because clients repeat what has failed. Each life of an engine
counts once, however many equal requests were open there.
"""
import asyncio
import collections
from contextlib import suppress

from xxhash import xxh3_128_intdigest

from vllm_pd.router.worker_client import Origin
from vllm_pd.router.workers import RouterWorker

MAX_CRASHES = 2
REMEMBERED_S = 60.0
MAX_REMEMBERED = 1000
CONNECT_TIMEOUT_S = 1.0

_Life = tuple[str, float]  # of an engine: its URL, and when it came up


class FatalRequests:
    """Remembers such requests by a hash of path and body. Belongs to the router's event loop."""

    def __init__(self) -> None:
        # the crashed engines of each request, and until when they are remembered
        self._crashes: collections.OrderedDict[int, tuple[frozenset[_Life], float]] = collections.OrderedDict()
        self._checks: set[asyncio.Task] = set()
        self._now = asyncio.get_running_loop().time

    def is_known(self, path: str, body: bytes) -> bool:
        """Whether an equal request has crashed `MAX_CRASHES` engines lately."""
        if not self._crashes:
            return False
        lives, until_s = self._crashes.get(_hash(path, body), (frozenset(), 0.0))
        return len(lives) >= MAX_CRASHES and self._now() < until_s

    async def connection_broke(self, worker: RouterWorker, path: str, body: bytes) -> bool:
        """Record that the worker's connection broke during this request. Returns whether to give the request up."""
        life = worker.url, worker.up_since_s
        if not await _refuses_connections(worker.url):
            return False
        key, now_s = _hash(path, body), self._now()
        lives, until_s = self._crashes.pop(key, (frozenset(), 0.0))
        lives = lives | {life} if now_s < until_s else frozenset({life})
        self._crashes[key] = lives, now_s + REMEMBERED_S
        while len(self._crashes) > MAX_REMEMBERED:
            self._crashes.popitem(last=False)
        return len(lives) >= MAX_CRASHES

    def stream_broke(self, worker: RouterWorker, path: str, body: bytes) -> None:
        """As `connection_broke`, in the background: after the first byte the request is not tried again anyway."""
        task = asyncio.get_running_loop().create_task(self.connection_broke(worker, path, body))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    def answered(self, path: str, body: bytes) -> None:
        """Forget this request: an engine has answered it."""
        if self._crashes:
            self._crashes.pop(_hash(path, body), None)


def _hash(path: str, body: bytes) -> int:
    return xxh3_128_intdigest(body, xxh3_128_intdigest(path.encode()) & (1 << 64) - 1)


async def _refuses_connections(url: str) -> bool:
    """Whether nothing listens at this URL's port."""
    origin = Origin.of(url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(origin.host, origin.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return False
