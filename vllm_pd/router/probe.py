# SPDX-License-Identifier: Apache-2.0
"""Finding out whether a worker generates: one token through the path that requests take.

A worker that answers requests needs no probe; one that has been silent for `probe_interval_s` gets one, idle or not. A
probe waits its turn in the engine. As long as requests there get tokens, or its events and load show that it computes,
one without a token after `probe_timeout_s` says nothing and waits on, up to `PATIENCE` times that long. A probe that
fails takes the worker out, and with it every request there that has heard nothing for `probe_timeout_s`, for a wedged
engine keeps its connections open; but for one that only says that it takes nothing new. One that is out is
probed at once, because a single request may have been the reason, then after a pause that doubles from probe to probe.
One that is doubted is probed at once too, and goes on meanwhile.
One that passes its probes and fails requests again and again has to wait longer each time as well.
"""
import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from vllm_pd.router import descriptors
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.subscriptions import WorkerProgress
from vllm_pd.router.workers import RouterWorker, WorkerFailure, WorkerState

logger = logging.getLogger("vllm_pd.router")

GENERATE_PATH = "/health_generate"
MAX_BODY_BYTES = 1 << 20
MAX_STRIKE_S = 2.0
LEARN_S = 30.0  # between questions for the models of a worker that needs no probes
LEARN_TIMEOUT_S = 2.0
PATIENCE = 4
_ONE_TOKEN = {"prompt": "a", "max_tokens": 1, "temperature": 0}


class ProbeFailed(Exception):
    """What is wrong with a worker. `refused`: it only takes nothing new, as when it drains."""

    def __init__(self, problem: str, refused: bool = False) -> None:
        super().__init__(problem)
        self.refused = refused


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


class _Completion(msgspec.Struct):
    choices: list[dict[str, Any]]


_cards = msgspec.json.Decoder(_Cards)
_completion = msgspec.json.Decoder(_Completion)


class GenerationProbes:
    """One task per worker, from `watch` to `forget`. `on_good` is told of each worker that has come up."""

    def __init__(self, options: RouterOptions, session: aiohttp.ClientSession, on_good: Callable[[RouterWorker], None],
                 count: Callable[[str, str], None], progress_of: Callable[[str], WorkerProgress]) -> None:
        self._options = options
        self._session = session
        self._on_good = on_good
        self._count = count
        self._progress_of = progress_of
        self._tasks: dict[RouterWorker, asyncio.Task] = {}
        key = options.key_for_workers
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def watch(self, worker: RouterWorker) -> None:
        """Begin."""
        task = asyncio.get_running_loop().create_task(self._watch(worker), name=f"probe {worker.url}")
        self._tasks[worker] = task
        task.add_done_callback(_ended)

    def forget(self, worker: RouterWorker) -> None:
        """End."""
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """End all."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, worker: RouterWorker) -> None:
        while True:
            if worker.state is WorkerState.UP:
                worker.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, min(self._silence_left_s(worker), _knows_for_s(worker)))):
                        await worker.wake.wait()
                if worker.state is not WorkerState.UP:
                    continue
                if self._silence_left_s(worker) > 0:
                    if _knows_for_s(worker) <= 0:
                        await self._learn_more(worker)
                    continue
            else:
                await asyncio.sleep(self._pause_s(worker))
            try:
                await self._probe(worker)
            except Exception:  # of ours: the worker is to be probed on
                self._count(worker.url, "stumbled")
                logger.exception("probing %s stumbled", worker.url)
                await asyncio.sleep(self._options.probe_backoff_s[0])

    def _pause_s(self, worker: RouterWorker) -> float:
        """Before one that is not up is probed."""
        first_s, most_s = self._options.probe_backoff_s
        if worker.failures:
            pause_s = min(most_s, first_s * 2**min(worker.failures - 1, 16))
        else:
            pause_s = min(MAX_STRIKE_S, first_s * 2**min(worker.strikes - 1, 16)) if worker.strikes else 0.0
        return pause_s * random.uniform(0.8, 1.2)

    def _silence_left_s(self, worker: RouterWorker) -> float:
        """How much longer it may be silent before it is probed."""
        return 0.0 if worker.doubted else worker.heard_s + self._options.probe_interval_s - worker.now()

    async def _probe(self, worker: RouterWorker) -> None:
        began_s, refused = worker.now(), False
        worker.doubted = False
        try:
            async with asyncio.timeout(PATIENCE * self._options.probe_timeout_s) as limit:
                watch = _ProbePatience(worker, limit, self._options.probe_timeout_s, self._progress_of, self._count)
                try:
                    await self._ask(worker)
                finally:
                    watch.end()
            problem = None
        except ProbeFailed as error:
            problem, refused = str(error), error.refused
        except TimeoutError:
            if worker.heard_s > worker.now() - self._options.probe_timeout_s:
                self._count(worker.url, "inconclusive")
                return
            problem = f"no token in {worker.now() - began_s:.3g} s"
        except OSError as error:
            if descriptors.are_short(error):
                self._count(worker.url, "inconclusive")
                await asyncio.sleep(self._options.probe_backoff_s[0])
                return
            problem = repr(error)
        except Exception as error:  # whatever a worker's answer does to us, it is one that does not work
            problem = repr(error)
        if problem is None:
            was_up = worker.state is WorkerState.UP
            self._passed(worker)
            if was_up:
                await self._learn_more(worker)
        else:
            self._failed(worker, problem)
            if not refused:
                worker.strand(worker.now() - self._options.probe_timeout_s)

    def _passed(self, worker: RouterWorker) -> None:
        self._count(worker.url, "passed")
        came_up = worker.state is not WorkerState.UP
        worker.good()
        if came_up and not worker.leaving:
            logger.info("worker %s is up", worker.url)
            self._on_good(worker)

    def _failed(self, worker: RouterWorker, problem: str) -> None:
        self._count(worker.url, "failed")
        worker.fail(WorkerFailure.PROBE, problem)
        worker.failures += 1

    async def _ask(self, worker: RouterWorker) -> None:
        """Raises ProbeFailed, or what the client does, where it does not generate."""
        if not worker.models or worker.state is not WorkerState.UP:
            await self._learn(worker)
        status, body = await self._fetch("GET", worker.url + GENERATE_PATH)
        if status in (404, 405):
            await self._complete(worker)
        else:
            _require_token(GENERATE_PATH, status, body)

    async def _complete(self, worker: RouterWorker) -> None:
        """For an engine without that route."""
        model = min(worker.base_models or worker.models)
        status, body = await self._fetch("POST", f"{worker.url}/v1/completions", {"model": model, **_ONE_TOKEN})
        if status in (400, 404, 405, 422):  # a model that does not complete, as one for embeddings
            status, body = await self._fetch("GET", f"{worker.url}/health")
            if status != 200:
                raise ProbeFailed(f"/health: {_brief(status, body)}")
        else:
            _require_token("/v1/completions", status, body)

    async def _learn_more(self, worker: RouterWorker) -> None:
        """Adapters come and go. Of one that works; that it does not say so in time changes nothing."""
        worker.learned_s = worker.now()
        try:
            async with asyncio.timeout(LEARN_TIMEOUT_S):
                await self._learn(worker)
        except (ProbeFailed, TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            logger.debug("%s does not say which models it serves: %r", worker.url, error)

    async def _learn(self, worker: RouterWorker) -> None:
        """Which models it serves."""
        worker.learned_s = worker.now()
        status, body = await self._fetch("GET", f"{worker.url}/v1/models")
        if status == 401:
            raise ProbeFailed("/v1/models: 401: give the workers' key with --worker-api-key")
        try:
            cards = _cards.decode(body).data if status == 200 else []
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProbeFailed(f"/v1/models: {error}") from error
        if not cards:
            raise ProbeFailed(f"/v1/models: {_brief(status, body)}")
        base = [card for card in cards if card.parent is None]
        # vLLM's prompt adapters have no parent, but no length either
        base = [card for card in base if card.max_model_len is not None] or base
        worker.models = frozenset(card.id for card in cards)
        worker.base_models = frozenset(card.id for card in base)
        worker.root = next((card.root for card in base if card.root), None)

    async def _fetch(self, method: str, url: str, value: Any = None) -> tuple[int, bytes]:
        body = None if value is None else msgspec.json.encode(value)
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        async with self._session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            found = bytearray()
            while len(found) < MAX_BODY_BYTES and (chunk := await response.content.readany()):
                found += chunk
            return response.status, bytes(found)


def _knows_for_s(worker: RouterWorker) -> float:
    """How much longer what is known of its models is good enough."""
    return worker.learned_s + LEARN_S - worker.now()


class _ProbePatience:
    """Of a probe that waits: gives it up by `limit` when the worker has shown nothing for so long."""

    def __init__(self, worker: RouterWorker, limit: asyncio.Timeout, period_s: float,
                 progress_of: Callable[[str], WorkerProgress], count: Callable[[str, str], None]) -> None:
        self._worker = worker
        self._limit = limit
        self._period_s = period_s
        self._progress_of = progress_of
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._begin()

    def end(self) -> None:
        """The probe has ended."""
        self._timer.cancel()

    def _begin(self) -> None:
        self._began_s = self._worker.now()
        self._progress = self._progress_of(self._worker.url)
        self._timer = self._loop.call_later(self._period_s, self._look)

    def _look(self) -> None:
        if self._worker.heard_s > self._began_s or self._progress.differs(self._progress_of(self._worker.url)):
            self._count(self._worker.url, "inconclusive")
            self._begin()
        elif not self._limit.expired():  # at the same moment
            self._limit.reschedule(self._loop.time())


def _require_token(path: str, status: int, body: bytes) -> None:
    try:
        has_token = status == 200 and bool(_completion.decode(body).choices)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        has_token = False
    if not has_token:
        raise ProbeFailed(f"{path}: {_brief(status, body)}", refused=status in (429, 503))


def _brief(status: int, body: bytes) -> str:
    return f"{status} {body[:200].decode(errors='replace')}".strip()


def _ended(task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("%s has ended; its worker is not probed any more", task.get_name(), exc_info=task.exception())
