# SPDX-License-Identifier: Apache-2.0
"""How a cluster of NATS servers is reached while one of them goes: which server is tried first, and requests whose
answer may never come. A stream without a leader answers nobody, and the leader that is elected later knows nothing of
what was asked before."""
import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import nats.errors
import nats.js.errors

AGAIN_S = 0.5

_NO_ANSWER = (nats.errors.TimeoutError, nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError,
              nats.js.errors.NoStreamResponseError)

T = TypeVar("T")


class Servers:
    """The servers of one cluster in the order in which a new connection tries them, at first a random one."""

    def __init__(self, urls: Iterable[str]) -> None:
        self.urls = list(urls)
        random.shuffle(self.urls)

    def left(self, address: str, answers: bool) -> None:
        """The connection to the one at `address` (HOST:PORT) is of no use any more. The next one tries it first if it
        `answers` still, so that no other one is tried that is gone; else last."""
        self.urls.sort(key=lambda url: url.endswith(f"/{address}"), reverse=answers)


async def insist(ask: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """The first answer. Asks anew each `AGAIN_S` while none comes, so what is asked must be the same when it is done
    twice. The earlier ones are waited for meanwhile: a server that is slow answers the first of them. After `timeout_s`
    it raises what the last one raised, or TimeoutError; at once any error that is an answer."""
    failures: list[Exception] = []
    try:
        return await asyncio.wait_for(_first_answer(ask, failures), timeout_s)
    except TimeoutError:
        raise (failures or [TimeoutError()])[-1] from None


async def _first_answer(ask: Callable[[], Awaitable[T]], failures: list[Exception]) -> T:
    asked: set[asyncio.Future[T]] = set()
    try:
        while True:
            asked.add(asyncio.ensure_future(ask()))
            done, asked = await asyncio.wait(asked, timeout=AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not isinstance(task.exception(), _NO_ANSWER):
                    return task.result()
                failures[:] = [task.exception()]
            if done:
                await asyncio.sleep(AGAIN_S)
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
