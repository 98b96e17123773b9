# SPDX-License-Identifier: Apache-2.0
"""Requests over which engines are lost: such a one is not sent to a third.

An engine is lost over a request where the connection breaks and nobody listens at its port any more. That may be
chance, so the request is tried once more elsewhere. With the second engine it is given up, and refused for
`REMEMBERED_S` where it comes again, for clients repeat what has failed. An engine counts once each time it has come up,
however many equal requests it had open.
"""
import asyncio
import collections
from contextlib import suppress

from xxhash import xxh3_128_intdigest

from vllm_pd.router.worker_client import Origin
from vllm_pd.router.workers import RouterWorker

MOST_LOST = 2
REMEMBERED_S = 60.0
MAX_REMEMBERED = 1000
LOOK_S = 1.0  # for a connection

_Life = tuple[str, float]  # URL, since when it was up


class FatalRequests:
    """Belongs to the router's event loop."""

    def __init__(self) -> None:
        self._lost: collections.OrderedDict[int, tuple[frozenset[_Life], float]] = collections.OrderedDict()  # until
        self._looking: set[asyncio.Task] = set()
        self._now = asyncio.get_running_loop().time

    def is_known(self, path: str, body: bytes) -> bool:
        """Whether as many engines were lost over such a request as may be."""
        if not self._lost:
            return False
        lives, until_s = self._lost.get(_name(path, body), (frozenset(), 0.0))
        return len(lives) >= MOST_LOST and self._now() < until_s

    async def broke(self, worker: RouterWorker, path: str, body: bytes) -> bool:
        """The worker's connection broke with this request. Whether it is to be given up."""
        life = worker.url, worker.up_since_s
        if not await _is_gone(worker.url):
            return False
        name, now_s = _name(path, body), self._now()
        lives, until_s = self._lost.pop(name, (frozenset(), 0.0))
        lives = lives | {life} if now_s < until_s else frozenset({life})
        self._lost[name] = lives, now_s + REMEMBERED_S
        while len(self._lost) > MAX_REMEMBERED:
            self._lost.popitem(last=False)
        return len(lives) >= MOST_LOST

    def broke_later(self, worker: RouterWorker, path: str, body: bytes) -> None:
        """The same, in the middle of an answer: it is not sent elsewhere, and nobody is to wait."""
        task = asyncio.get_running_loop().create_task(self.broke(worker, path, body))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    def answered(self, path: str, body: bytes) -> None:
        """It is none of these."""
        if self._lost:
            self._lost.pop(_name(path, body), None)


def _name(path: str, body: bytes) -> int:
    return xxh3_128_intdigest(body, xxh3_128_intdigest(path.encode()) & (1 << 64) - 1)


async def _is_gone(url: str) -> bool:
    """Whether its machine says that nobody listens there."""
    origin = Origin.of(url)
    try:
        async with asyncio.timeout(LOOK_S):
            _, writer = await asyncio.open_connection(origin.host, origin.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return False
