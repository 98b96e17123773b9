# SPDX-License-Identifier: Apache-2.0
"""Generation probes: whether a worker generates, tested with one token through the path that requests take.

When: a worker that answers requests is not probed. One from which nothing has come for `probe_interval_s` is, idle or
not. A worker that is out is probed at once, because a single request may have been the reason, then after a pause that
doubles from probe to probe. A worker that passes its probes but fails requests again and again also waits longer each
time. `RouterWorker.probe_soon` has a worker probed at once that stays up meanwhile.

Timeout: a probe waits in the engine's queue. Without a token after `probe_timeout_s` it fails, unless the worker's
requests, events, load or /metrics show that it computes; then it waits on, at most `MAX_PERIODS` times as long.

Failure: the worker is taken out. Requests to which nothing has come for `probe_timeout_s` are interrupted, because a
hung engine keeps its connections open. They are not where the worker has only refused the probe (status 429 or 503),
where it computed until the end, or where it tells nothing of itself: then its queue may only be long, and another
engine would not be faster. `timeout_s` and `stream_timeout_s` end these requests if it hangs all the same.
"""
import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Any

import msgspec

from vllm_pd.router import descriptors
from vllm_pd.router.events.subscriber import read_whole
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.outline import UNREADABLE
from vllm_pd.router.subscriptions import WorkerProgress
from vllm_pd.router.worker_session import WorkerSession
from vllm_pd.router.workers import RouterWorker, WorkerFailure, WorkerState

logger = logging.getLogger("vllm.pd.router")

GENERATE_PATH = "/health_generate"
MAX_BODY_BYTES = 1 << 20  # of a page: models and adapters, metrics
MAX_ANSWER_BYTES = 1 << 16  # of an answer of one token; to decode a worse one takes the loop 20 ms
MAX_STRIKE_S = 2.0
MODELS_PERIOD_S = 30.0  # between two readings of the models of a worker that is not probed
MODELS_TIMEOUT_S = 2.0
MAX_PERIODS = 4
MAX_VERSION_CHARS = 100
COUNTERS = (b"vllm:generation_tokens_total", b"vllm:prompt_tokens_total", b"vllm:kv_cache_usage_perc",
            b"vllm:gpu_cache_usage_perc")  # of /metrics: they change while an engine computes, and only then
_ONE_TOKEN = {"prompt": "a", "max_tokens": 1, "temperature": 0}


class ProbeFailed(Exception):
    """A failed probe. `refused`: the worker only takes nothing new, as when it drains."""

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
    choices: list[msgspec.Raw]


class _Version(msgspec.Struct):
    version: str


_counters = re.compile(rb"^(?:%b).*" % b"|".join(map(re.escape, COUNTERS)), re.MULTILINE)
_version = msgspec.json.Decoder(_Version)
_cards = msgspec.json.Decoder(_Cards)
_completion = msgspec.json.Decoder(_Completion)


class GenerationProbes:
    """One task for each worker, from `watch` to `forget`. `on_up` is called with each worker that has come up, `count`
    with a worker's URL and the outcome of each probe. `progress_of` returns the present progress of a worker. `via`: as
    in `RouterProxy`."""

    def __init__(self, options: RouterOptions, session: WorkerSession, on_up: Callable[[RouterWorker], None],
                 count: Callable[[str, str], None], progress_of: Callable[[str], WorkerProgress],
                 via: bytes) -> None:
        self._options = options
        self._session = session
        self._on_up = on_up
        self._count = count
        self._progress_of = progress_of
        self._tasks: dict[RouterWorker, asyncio.Task] = {}
        key = options.key_for_workers
        self._headers = {"Via": via.decode()} | ({} if key is None else {"Authorization": f"Bearer {key}"})

    def watch(self, worker: RouterWorker) -> None:
        """Begin to probe this worker."""
        task = asyncio.get_running_loop().create_task(self._watch(worker), name=f"probe {worker.url}")
        self._tasks[worker] = task
        task.add_done_callback(_ended)

    def forget(self, worker: RouterWorker) -> None:
        """Stop probing this worker."""
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop all probes."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, worker: RouterWorker) -> None:
        """The task of one worker: probes it when the module says so, and in between reads the models of one that is up,
        every MODELS_PERIOD_S. `wake` of the worker ends a wait."""
        while True:
            if worker.state is WorkerState.UP:
                worker.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, min(self._probe_due_in_s(worker), _models_due_in_s(worker)))):
                        await worker.wake.wait()
                if worker.state is not WorkerState.UP:
                    continue
                if self._probe_due_in_s(worker) > 0:
                    if _models_due_in_s(worker) <= 0:
                        await self._refresh_models(worker)
                    continue
            else:
                await asyncio.sleep(self._pause_s(worker))
            try:
                await self._probe(worker)
            except Exception:  # an error of our own must not end the probes of this worker
                self._count(worker.url, "error")
                logger.exception("unexpected error while probing %s", worker.url)
                await asyncio.sleep(self._options.probe_backoff_s[0])

    def _pause_s(self, worker: RouterWorker) -> float:
        """The pause before the next probe of a worker that is not up."""
        first_s, most_s = self._options.probe_backoff_s
        if worker.failures:
            pause_s = min(most_s, first_s * 2**min(worker.failures - 1, 16))
        else:
            pause_s = min(MAX_STRIKE_S, first_s * 2**min(worker.strikes - 1, 16)) if worker.strikes else 0.0
        return pause_s * random.uniform(0.8, 1.2)

    def _probe_due_in_s(self, worker: RouterWorker) -> float:
        """The time until a worker that is up is probed if nothing comes from it."""
        return 0.0 if worker.probe_due else worker.heard_s + self._options.probe_interval_s - worker.now()

    async def _probe(self, worker: RouterWorker) -> None:
        """Probe a worker once. It is up then, or taken out as the module says. Nothing changes where that shows
        nothing: the worker has answered meanwhile, or this machine lacks descriptors, memory or ports."""
        began_s, spares = worker.now(), False
        worker.probe_due = False
        try:
            async with asyncio.timeout(MAX_PERIODS * self._options.probe_timeout_s) as limit:
                deadline = _ProbeDeadline(worker, limit, self._options.probe_timeout_s, self._progress_of,
                                          self._read_counters, self._count)
                try:
                    await self._ask(worker)
                finally:
                    deadline.cancel()
            problem = None
        except ProbeFailed as error:
            problem, spares = str(error), error.refused
        except TimeoutError:
            if worker.heard_s > worker.now() - self._options.probe_timeout_s:
                self._count(worker.url, "inconclusive")
                return
            problem = f"no token in {worker.now() - began_s:.3g} s"
            spares = deadline.shown is not _Shown.STANDSTILL
        except OSError as error:
            if descriptors.is_shortage(error):
                self._count(worker.url, "inconclusive")
                await asyncio.sleep(self._options.probe_backoff_s[0])
                return
            problem = repr(error)
        except Exception as error:  # whatever goes wrong with its answer, the worker does not work
            problem = repr(error)
        if problem is None:
            was_up = worker.state is WorkerState.UP
            self._passed(worker)
            if was_up:
                await self._refresh_models(worker)
        else:
            self._failed(worker, problem)
            if not spares:
                worker.interrupt_silent(worker.now() - self._options.probe_timeout_s)

    def _passed(self, worker: RouterWorker) -> None:
        self._count(worker.url, "passed")
        came_up = worker.state is not WorkerState.UP
        worker.probe_passed()
        if came_up and not worker.leaving:
            logger.info("worker %s is up", worker.url)
            self._on_up(worker)

    def _failed(self, worker: RouterWorker, problem: str) -> None:
        self._count(worker.url, "failed")
        worker.fail(WorkerFailure.PROBE, problem)
        worker.failures += 1

    async def _ask(self, worker: RouterWorker) -> None:
        """Have the worker generate one token. Raises ProbeFailed, or whatever the HTTP client raises, if it does
        not."""
        if not worker.models or worker.state is not WorkerState.UP:
            await self._read_models(worker)
            await self._read_version(worker)
        status, body = await self._fetch("GET", worker.url + GENERATE_PATH, most_bytes=MAX_ANSWER_BYTES)
        if status in (404, 405):
            await self._complete(worker)
        else:
            _require_token(GENERATE_PATH, status, body)

    async def _complete(self, worker: RouterWorker) -> None:
        """As `_ask`, for an engine without the route /health_generate."""
        model = min(worker.base_models or worker.models)
        status, body = await self._fetch("POST", f"{worker.url}/v1/completions", {"model": model, **_ONE_TOKEN},
                                         MAX_ANSWER_BYTES)
        if status in (400, 404, 405, 422):  # its model does not complete, as with embeddings
            status, body = await self._fetch("GET", f"{worker.url}/health")
            if status != 200:
                raise ProbeFailed(f"/health: {_brief(status, body)}")
        else:
            _require_token("/v1/completions", status, body)

    async def _refresh_models(self, worker: RouterWorker) -> None:
        """Read the models of a worker that is up again, as adapters may have changed. A failure changes nothing."""
        worker.models_asked_s = worker.now()
        try:
            async with asyncio.timeout(MODELS_TIMEOUT_S):
                await self._read_models(worker)
        except (ProbeFailed, OSError, ValueError) as error:
            logger.debug("the models of %s could not be read: %r", worker.url, error)

    async def _read_models(self, worker: RouterWorker) -> None:
        """Read which models and adapters the worker serves. Raises ProbeFailed, or whatever the HTTP client raises."""
        worker.models_asked_s = worker.now()
        status, body = await self._fetch("GET", f"{worker.url}/v1/models")
        if status == 401:
            raise ProbeFailed("/v1/models: 401: give the workers' key with --worker-api-key")
        try:
            cards = _cards.decode(body).data if status == 200 else []
        except UNREADABLE as error:
            raise ProbeFailed(f"/v1/models: {error}") from error
        if not cards:
            raise ProbeFailed(f"/v1/models: {_brief(status, body)}")
        base = [card for card in cards if card.parent is None]
        # vLLM's prompt adapters have neither a parent nor a length
        base = [card for card in base if card.max_model_len is not None] or base
        worker.models = frozenset(card.id for card in cards)
        worker.base_models = frozenset(card.id for card in base)
        worker.root = next((card.root for card in base if card.root), None)
        worker.max_model_len = next((card.max_model_len for card in base if card.max_model_len), None)

    async def _read_version(self, worker: RouterWorker) -> None:
        """Read the version of its vLLM. A failure changes nothing."""
        try:
            async with asyncio.timeout(MODELS_TIMEOUT_S):
                status, body = await self._fetch("GET", f"{worker.url}/version", most_bytes=MAX_ANSWER_BYTES)
            if status == 200:
                worker.version = _version.decode(body).version[:MAX_VERSION_CHARS]
        except (OSError, ValueError, *UNREADABLE) as error:
            logger.debug("the version of %s could not be read: %r", worker.url, error)

    async def _read_counters(self, worker: RouterWorker, within_s: float) -> list[bytes] | None:
        """The lines of its /metrics that have COUNTERS; none where it has no such lines, None where its server does not
        answer."""
        try:
            async with asyncio.timeout(within_s):
                status, body = await self._fetch("GET", f"{worker.url}/metrics")
        except OSError as error:
            return [] if descriptors.is_shortage(error) else None
        return _counters.findall(body) if status == 200 else []

    async def _fetch(self, method: str, url: str, value: Any = None,
                     most_bytes: int = MAX_BODY_BYTES) -> tuple[int, bytes]:
        body = None if value is None else msgspec.json.encode(value)
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        async with self._session.request(method, url, body, headers) as response:
            return response.status, await read_whole(response.content, most_bytes)


def _models_due_in_s(worker: RouterWorker) -> float:
    """The time until the worker's models are read again."""
    return worker.models_asked_s + MODELS_PERIOD_S - worker.now()


class _Shown(Enum):
    """What a worker has shown while a probe waited for its token."""
    PROGRESS = auto()  # it computes
    STANDSTILL = auto()  # what it tells of itself has not changed, or its server does not answer
    NOTHING = auto()  # it tells nothing of itself


class _ProbeDeadline:
    """Ends a waiting probe, by `limit`, after `period_s` in which nothing shows that the worker computes. `shown`: what
    the last whole period has shown. /metrics is read only if nothing else shows it in the first half of a period."""

    def __init__(self, worker: RouterWorker, limit: asyncio.Timeout, period_s: float,
                 progress_of: Callable[[str], WorkerProgress],
                 read_counters: Callable[[RouterWorker, float], Awaitable[list[bytes] | None]],
                 count: Callable[[str, str], None]) -> None:
        self.shown = _Shown.STANDSTILL
        self._worker = worker
        self._limit = limit
        self._period_s = period_s
        self._progress_of = progress_of
        self._read_counters = read_counters
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._watch(), name=f"deadline of the probe of {worker.url}")

    def cancel(self) -> None:
        """The probe has ended: stop watching."""
        self._task.cancel()

    async def _watch(self) -> None:
        while (shown := await self._period()) is _Shown.PROGRESS:
            self.shown = shown
            self._count(self._worker.url, "inconclusive")
        if not self._limit.expired():  # it may have expired at the same moment
            self.shown = shown
            self._limit.reschedule(self._loop.time())

    async def _period(self) -> _Shown:
        """Wait for a period, and return what it has shown."""
        worker, half_s = self._worker, self._period_s / 2
        began_s, before = worker.now(), self._progress_of(worker.url)

        def computes() -> bool:
            return worker.heard_s > began_s or before.differs(self._progress_of(worker.url))

        await asyncio.sleep(half_s)
        if computes():
            await asyncio.sleep(half_s)
            return _Shown.PROGRESS
        counters = await self._read_counters(worker, half_s)
        await asyncio.sleep(began_s + self._period_s - worker.now())
        if computes():
            return _Shown.PROGRESS
        if counters:
            later = await self._read_counters(worker, half_s)
            return _Shown.PROGRESS if later and later != counters else _Shown.STANDSTILL
        return _Shown.NOTHING if counters is not None and before == WorkerProgress() else _Shown.STANDSTILL


def _require_token(path: str, status: int, body: bytes) -> None:
    try:
        has_token = status == 200 and bool(_completion.decode(body).choices)
    except UNREADABLE:
        has_token = False
    if not has_token:
        raise ProbeFailed(f"{path}: {_brief(status, body)}", refused=status in (429, 503))


def _brief(status: int, body: bytes) -> str:
    return f"{status} {body[:200].decode(errors='replace')}".strip()


def _ended(task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("unexpected error: %s has ended, its worker is not probed any more", task.get_name(),
                        exc_info=task.exception())
