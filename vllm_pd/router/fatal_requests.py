# SPDX-License-Identifier: Apache-2.0
"""Requests that may crash engines: after two engines, such a request is not sent to a third.

A request is suspected of a crash where its connection breaks and nothing listens at the engine's port any more. That
may be chance, so the request is tried once on another engine. After a crash of the second one it is answered with an
error, and equal requests are refused for `REMEMBERED_S`, because clients repeat what has failed. Each life of an engine
counts once, however many equal requests were open there.

In the order prefill-first a request may crash the prefill engines and not the decode engines, which then answer it. An
answer forgets the crashes, but not those of prefill engines: after two of them equal requests go to no prefill engine
for `PREFILL_REMEMBERED_S`. That is longer, because the client gets its answer all the same.
"""
import asyncio
import collections

from xxhash import xxh3_128_intdigest

from vllm_pd.router.worker_client import Origin, connect
from vllm_pd.router.workers import RouterWorker

MAX_CRASHES = 2
REMEMBERED_S = 60.0
PREFILL_REMEMBERED_S = 600.0
MAX_REMEMBERED = 1000
CONNECT_TIMEOUT_S = 1.0

_Life = tuple[str, float]  # of an engine: its URL, and when it came up
_Crashes = collections.OrderedDict[int, tuple[frozenset[_Life], float]]  # of each request, and until when they count


class FatalRequests:
    """Remembers such requests by a hash of path and body. Belongs to the router's event loop."""

    def __init__(self) -> None:
        self._crashes: _Crashes = collections.OrderedDict()  # since the last answer
        self._prefill_crashes: _Crashes = collections.OrderedDict()  # of prefill engines, since the last one's answer
        self._checks: set[asyncio.Task] = set()
        self._now = asyncio.get_running_loop().time

    def is_known(self, path: str, body: bytes) -> bool:
        """Whether an equal request has crashed `MAX_CRASHES` engines lately."""
        return self._has_crashed(self._crashes, path, body)

    def is_known_at_prefill(self, path: str, body: bytes) -> bool:
        """Whether an equal request has crashed `MAX_CRASHES` prefill engines lately."""
        return self._has_crashed(self._prefill_crashes, path, body)

    async def connection_broke(self, worker: RouterWorker, path: str, body: bytes, at_prefill: bool = False) -> bool:
        """Record that the worker's connection broke during this request. `at_prefill`: the worker was to compute the
        prompt only. Returns whether to give the request up."""
        life = worker.url, worker.up_since_s
        if not await _refuses_connections(worker.url):
            return False
        key = _hash(path, body)
        if at_prefill:
            self._add(self._prefill_crashes, key, life, PREFILL_REMEMBERED_S)
        return self._add(self._crashes, key, life, REMEMBERED_S) >= MAX_CRASHES

    def stream_broke(self, worker: RouterWorker, path: str, body: bytes) -> None:
        """As `connection_broke`, in the background: after the first byte the request is not tried again anyway."""
        task = asyncio.get_running_loop().create_task(self.connection_broke(worker, path, body))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    def answered(self, path: str, body: bytes) -> None:
        """Forget this request: an engine has answered it. At prefill engines it may be fatal all the same."""
        if self._crashes:
            self._crashes.pop(_hash(path, body), None)

    def prefilled(self, path: str, body: bytes) -> None:
        """Forget the prefill engines that this request has crashed: one has computed it."""
        if self._prefill_crashes:
            self._prefill_crashes.pop(_hash(path, body), None)

    def _has_crashed(self, crashes: _Crashes, path: str, body: bytes) -> bool:
        if not crashes:
            return False
        lives, until_s = crashes.get(_hash(path, body), (frozenset(), 0.0))
        return len(lives) >= MAX_CRASHES and self._now() < until_s

    def _add(self, crashes: _Crashes, key: int, life: _Life, remembered_s: float) -> int:
        """Add the crash of this engine. Returns how many engines that request has crashed."""
        now_s = self._now()
        lives, until_s = crashes.pop(key, (frozenset(), 0.0))
        lives = lives | {life} if now_s < until_s else frozenset({life})
        crashes[key] = lives, now_s + remembered_s
        while len(crashes) > MAX_REMEMBERED:
            crashes.popitem(last=False)
        return len(lives)


def _hash(path: str, body: bytes) -> int:
    return xxh3_128_intdigest(body, xxh3_128_intdigest(path.encode()) & (1 << 64) - 1)


async def _refuses_connections(url: str) -> bool:
    """Whether nothing listens at this URL's port."""
    origin = Origin.of(url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            transport, _ = await connect(asyncio.Protocol, origin)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    transport.abort()
    return False
