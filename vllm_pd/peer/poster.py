# SPDX-License-Identifier: Apache-2.0
"""The thread that posts a decode engine's jobs to metaservers.

A proxy answers such a post when its prefill engine has answered, so posts take as long as prefills, and many are open
at a time: they are tasks of one event loop. The answer brings nothing. A post that fails, or is answered while nobody
has claimed the job, has its attempt end, and the request goes on as after any failed attempt.
"""
from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Collection

import msgspec

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import PostJob, StopPost
from vllm_pd.protocol.metaserver import post_params

logger = logging.getLogger("vllm.pd")

MAX_POSTS = 1024  # open at a time
TRIES = 3
PAUSE_S = 0.2  # before the second try, twice that before the third
CONNECT_S = 5.0
CLAIM_S = 0.5  # for a claim that was sent before the metaserver's answer, and is not read yet
CLOSE_S = 2.0
ENDED = "the thread that posts jobs has ended"
ANSWERED = "the metaserver has answered, and no prefill engine has claimed it"


class MetaserverPoster:
    """Posts to `urls` only. `unclaimable` is called with an attempt and the reason, `CLAIM_S` after a post was answered
    or as soon as it has failed; it has no effect on one that was claimed. `died` is called where the thread ends by an
    error, which `error` is then. `start`ed once, `close`d once; `carry_out` may be called in any thread,
    also after the end."""

    def __init__(self, urls: Collection[str], fingerprint: m.Fingerprint,
                 unclaimable: Callable[[m.Attempt, str], None], died: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._urls = frozenset(urls)
        self._fingerprint = fingerprint
        self._unclaimable = unclaimable
        self._died = died
        self._handed: collections.deque[PostJob | StopPost] = collections.deque()
        self._tasks: dict[m.Attempt, asyncio.Task] = {}
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="vllm-pd-poster", daemon=True)

    def start(self) -> None:
        """Run until `close`."""
        self._thread.start()

    def carry_out(self, action: PostJob | StopPost) -> None:
        """Begin this post, or end it."""
        self._handed.append(action)
        try:
            self._loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop is closed
            self._refuse_handed()

    def close(self) -> None:
        """End all posts and the thread, and wait for that. Idempotent."""
        if self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._ended.set)
            except RuntimeError:
                return
            self._thread.join(CLOSE_S)

    def count(self) -> int:
        """Open posts, for tests."""
        return len(self._tasks)

    # The thread.

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            logger.exception("the thread that posts jobs to metaservers ended; from now on all go through the broker")
            self.error = error
            self._died()
        finally:
            self._loop.close()
            self._refuse_handed()  # what came after its last turn

    async def _serve(self) -> None:
        """Keep the HTTP session open until `close` or the end of the thread. Then cancel the open posts; their attempts
        can't be claimed any more."""
        import aiohttp
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)  # the look-up of the name included
        # No proxy of the environment: a URL is what the operator has listed.
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False,
                                         connector=aiohttp.TCPConnector(limit=MAX_POSTS)) as self._session:
            try:
                await self._ended.wait()
            finally:
                self._ended.set()
                open_posts = dict(self._tasks)
                for attempt, task in open_posts.items():
                    task.cancel()
                    self._unclaimable(attempt, ENDED)
                await asyncio.gather(*open_posts.values(), return_exceptions=True)

    def _refuse_handed(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                action = self._handed.popleft()
                if isinstance(action, PostJob):
                    self._unclaimable(action.job.attempt, ENDED)

    def _take(self) -> None:
        action = self._handed.popleft()
        if isinstance(action, StopPost):
            self._stop(action)
        elif self._ended.is_set():
            self._unclaimable(action.job.attempt, ENDED)
        else:
            self._begin(action)

    def _begin(self, action: PostJob) -> None:
        attempt = action.job.attempt
        if action.url not in self._urls or len(self._tasks) >= MAX_POSTS:
            self._unclaimable(attempt, f"more than {MAX_POSTS} posts are open" if action.url in self._urls
                              else f"metaserver {action.url!r} is not listed")
            return
        self._tasks[attempt] = task = self._loop.create_task(self._post(action))
        task.add_done_callback(lambda _: self._tasks.pop(attempt, None))  # also of one that was cancelled before it ran

    def _stop(self, action: StopPost) -> None:
        task = self._tasks.get(action.attempt)
        if task is not None and action.after_s:
            self._loop.call_later(action.after_s, task.cancel)
        elif task is not None:
            task.cancel()

    async def _post(self, action: PostJob) -> None:
        """One post, with its tries."""
        attempt = action.job.attempt
        try:
            async with asyncio.timeout(action.job.deadline_s):
                problem = await self._deliver(action)
        except TimeoutError:
            problem = "the metaserver has not answered in time"
        except Exception as error:
            logger.exception("unexpected error in a post to %s", action.url)
            problem = f"it could not be posted: {error!r}"
        if not problem:
            await asyncio.sleep(CLAIM_S)
        self._unclaimable(attempt, problem or ANSWERED)

    async def _deliver(self, action: PostJob) -> str:
        """Post until it is answered, or nobody has answered the last try. Returns what is wrong; empty after a good
        answer. An answer is the last word: no other try brings more, and the broker knows which engines are there."""
        import aiohttp
        body = msgspec.json.encode(post_params(action.job, action.request_id, self._fingerprint))
        for number in range(TRIES):
            try:
                status = await self._try(action.url, body)
            except (aiohttp.ClientError, OSError) as error:
                problem = f"it can't be reached: {error}"
            else:
                return "" if 200 <= status < 300 else f"the metaserver {action.url}: it has answered {status}"
            if number < TRIES - 1:
                await asyncio.sleep(PAUSE_S * 2**number)
        return f"the metaserver {action.url}: {problem}"

    async def _try(self, url: str, body: bytes) -> int:
        """The status of the answer."""
        async with self._session.post(url, data=body, headers={"Content-Type": "application/json"},
                                      allow_redirects=False) as answer:
            return answer.status
