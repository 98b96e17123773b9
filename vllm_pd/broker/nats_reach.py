# SPDX-License-Identifier: Apache-2.0
"""How a cluster of NATS servers is reached while one of them goes: which server is tried first, and requests whose
answer may never come. A stream without a leader answers nobody, and the leader that is elected later knows nothing of
what was asked before."""
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import nats.errors
import nats.js.errors

AGAIN_S = 0.5
CONNECT_S = 0.5  # at first: a server that is gone may take a connection, and say nothing

_NO_ANSWER = (nats.errors.TimeoutError, nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError,
              nats.js.errors.NoStreamResponseError)

T = TypeVar("T")


class NatsServers:
    """The servers of one cluster in the order in which a new connection tries them, at first a random one. It tries
    each for `connect_s`: `CONNECT_S` at first, twice as long after each failure, `most_s` at most; a single server for
    `most_s`."""

    def __init__(self, urls: Iterable[str], most_s: float) -> None:
        self.urls = list(urls)
        self._most_s = most_s
        self._first_s = self.connect_s = min(CONNECT_S, most_s) if len(self.urls) > 1 else most_s
        random.shuffle(self.urls)

    def connect_failed(self) -> None:
        """Which server it was is not known: the one that was tried first comes last. They may be slow, all of them."""
        self.urls.append(self.urls.pop(0))
        self.connect_s = min(2 * self.connect_s, self._most_s)

    def connection_ended(self, address: str) -> None:
        """The one to the server at `address` (HOST:PORT) was of no use any more: that server comes last. It may answer
        still: it may be the one that the others have lost."""
        self.urls.sort(key=lambda url: url.endswith(f"/{address}"))
        self.connect_s = self._first_s


async def insist(ask: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """The first answer to a request that is idempotent: it is sent anew each `AGAIN_S` while none comes. The earlier
    ones are waited for meanwhile: a server that is slow answers the first of them. After `timeout_s` it raises what the
    last one raised, or TimeoutError; at once any error that is an answer."""
    asked: set[asyncio.Future[T]] = set()
    failure: BaseException = TimeoutError()
    due_s = time.monotonic()
    until_s = due_s + timeout_s
    try:
        while (now := time.monotonic()) < until_s:
            if now >= due_s:
                asked.add(asyncio.ensure_future(ask()))
                due_s = now + AGAIN_S
            left_s = min(due_s, until_s) - now
            if not asked:
                await asyncio.sleep(left_s)
                continue
            done, asked = await asyncio.wait(asked, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            errors = {task: nats.errors.TimeoutError() if task.cancelled() else task.exception() for task in done}
            answers = [task for task, error in errors.items() if not isinstance(error, _NO_ANSWER)]
            if answers:
                return min(answers, key=lambda task: errors[task] is not None).result()  # if possible, no error
            failure = next(reversed(errors.values()), failure)
        raise failure
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
