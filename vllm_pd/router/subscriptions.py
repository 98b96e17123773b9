# SPDX-License-Identifier: Apache-2.0
"""The subscriptions to the workers' KV events and loads: one subscriber for each data-parallel rank of each worker.

The subscribers feed the indexes of the workers' families (`vllm_pd.router.families`). Of a worker without events the
router knows only what it has sent there.

An engine that restarts may have another block size or another number of ranks, for which its subscribers were not made.
So a worker is asked again when it comes up again, and when one of its subscribers gets another answer; if its answer
differs, the subscribers are replaced.
"""
from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections import Counter
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

import msgspec

from vllm_pd.events.messages import EngineLoad
from vllm_pd.events.notice import EventsNotice
from vllm_pd.router.events.subscriber import Subscriber, SubscriberState, read_whole, shared_context
from vllm_pd.router.families import UnsizedIndex
from vllm_pd.router.options import RouterOptions, parse_events
from vllm_pd.router.outline import UNREADABLE
from vllm_pd.router.placing import Placer
from vllm_pd.router.worker_session import WorkerSession
from vllm_pd.router.workers import RouterWorker

logger = logging.getLogger("vllm.pd.router")

EVENTS_PATH = "/pd/events"
ASK_TIMEOUT_S = 5.0
RETRY_S = (5.0, 60.0)  # first pause, longest
SWEEP_S = 0.05
MAX_ANSWER_BYTES = 65536
MAX_RANKS = 1024  # data-parallel ranks of one engine


class _EventsAnswer(msgspec.Struct, frozen=True):
    """The fields of the answer to GET /pd/events that are needed here; the subscriber reads the others. With other
    values a worker needs other subscribers."""
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1


class WorkerProgress(NamedTuple):
    """A snapshot of numbers that change while an engine computes."""
    batches: int = 0  # of events
    work: tuple[int, ...] | None = None  # numbers of its load that change from step to step; None where unknown

    def differs(self, later: WorkerProgress) -> bool:
        """Whether the engine has computed between this snapshot and the `later` one."""
        return later.batches != self.batches or (self.work is not None and later.work is not None
                                                 and later.work != self.work)


class _Question(NamedTuple):
    """A worker that is being asked where its events are."""
    task: asyncio.Task
    again: asyncio.Event  # ask it now, whatever the pause


class EventSubscriptions:
    """All subscribers, by worker URL. Belongs to the router's event loop."""

    def __init__(self, placer: Placer, session: WorkerSession, options: RouterOptions) -> None:
        self._placer = placer
        self._session = session
        self._keys = options.access.load_keys()
        key = options.key_for_workers
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._block_size = options.block_size
        self._configured: dict[str, list[tuple[str, str | None]]] = {}  # by URL, for each rank: events, replay
        for url, events, replay in (parse_events("--worker-events", value) for value in options.events):
            self._configured.setdefault(url, []).append((events, replay))
        self._subscribers: dict[str, list[Subscriber]] = {}  # one for each data-parallel rank
        self._answers: dict[str, _EventsAnswer] = {}  # for which the subscribers were made; not of configured workers
        self._asking: dict[str, _Question] = {}
        self._closing: set[asyncio.Task] = set()  # of subscribers that were replaced or left
        self._sweeper: asyncio.Task | None = None
        self._context = contextlib.ExitStack()
        self._context.enter_context(shared_context())  # no subscriber makes another one

    def load_of(self, url: str) -> tuple[EngineLoad | None, float]:
        """The worker's last load report, that of all its ranks together, None where there is none, and its age in
        seconds."""
        return load_of(self._subscribers.get(url, []))

    def progress_of(self, url: str) -> WorkerProgress:
        """The worker's present progress."""
        subscribers = self._subscribers.get(url)
        if subscribers is None:
            return WorkerProgress()
        load, _ = load_of(subscribers)
        return WorkerProgress(sum(one.counters["batches"] for one in subscribers), None if load is None else (
            load.running, load.used_blocks, load.queued_prefill_tokens))

    def subscribe(self, worker: RouterWorker) -> None:
        """Subscribe to the worker's events if it has any. Where that was done before, ask whether it still fits."""
        if worker.url in self._configured:
            if worker.url not in self._subscribers:
                self._subscribe(worker, self._block_size, [{"configured": EventsNotice(events, 0, replay)}
                                                           for events, replay in self._configured[worker.url]])
        elif worker.url in self._asking:
            self._asking[worker.url].again.set()
        else:
            again = asyncio.Event()
            task = asyncio.get_running_loop().create_task(self._ask(worker, again),
                                                          name=f"{EVENTS_PATH} of {worker.url}")
            self._asking[worker.url] = _Question(task, again)
            task.add_done_callback(functools.partial(self._ask_ended, worker.url))

    def unsubscribe(self, worker: RouterWorker) -> None:
        """End the worker's subscribers and forget what it holds."""
        if (asking := self._asking.pop(worker.url, None)) is not None:
            asking.task.cancel()
        self._end_subscribers(worker.url)
        self._placer.forget(worker.url)

    async def close(self) -> None:
        """End all subscribers and tasks."""
        tasks = [asking.task for asking in self._asking.values()]
        if self._sweeper is not None:
            tasks.append(self._sweeper)
        for task in tasks:
            task.cancel()
        for url in list(self._subscribers):
            self._end_subscribers(url)
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        self._context.close()

    def as_json(self) -> dict[str, dict[str, object]]:
        """The `events` entries of /workers, by worker URL."""
        return {url: _ranks_as_json(ranks) for url, ranks in self._subscribers.items()}

    def _end_subscribers(self, url: str) -> set[asyncio.Task]:
        """End the worker's subscribers. Returns the tasks that do it; until they have ended, the index may still lose
        what it has of the worker."""
        self._answers.pop(url, None)
        self._placer.ranks.pop(url, None)
        loop = asyncio.get_running_loop()
        closing = {loop.create_task(one.close()) for one in self._subscribers.pop(url, [])}
        self._closing |= closing
        for task in closing:
            task.add_done_callback(self._closing.discard)
        return closing

    def _on_notice(self, worker: RouterWorker, notice: EventsNotice) -> None:
        """A subscriber has found the worker, perhaps another life of it."""
        known = self._answers.get(worker.url)
        if known is not None and known != _EventsAnswer(notice.block_size, notice.ranks) and not worker.leaving:
            self.subscribe(worker)

    def _ask_ended(self, url: str, task: asyncio.Task) -> None:
        asking = self._asking.get(url)
        if asking is not None and asking.task is task:
            del self._asking[url]
        if not task.cancelled() and task.exception() is not None:
            logger.error("unexpected error while asking for %s; it is asked again when it comes up again",
                         task.get_name(), exc_info=task.exception())

    async def _ask(self, worker: RouterWorker, again: asyncio.Event) -> None:
        """Ask the worker where its events are, until it answers that or 404, and subscribe to them, unless that was
        done with the same answer. `again` ends a pause."""
        pause_s, longest_s = RETRY_S
        while not worker.leaving:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S), self._session.get(
                        worker.url + EVENTS_PATH, headers=self._headers, allow_redirects=False) as response:
                    if response.status == HTTPStatus.NOT_FOUND:
                        return
                    body = await read_whole(response.content, MAX_ANSWER_BYTES)
                if response.status == HTTPStatus.OK:
                    await self._follow(worker, msgspec.json.decode(body, type=_EventsAnswer))
                    return
                problem = str(response.status)
            except (OSError, ValueError, *UNREADABLE) as error:
                problem = repr(error)
            logger.warning("%s%s: %s; asked again in %g s", worker.url, EVENTS_PATH, problem, pause_s)
            try:
                async with asyncio.timeout(pause_s):
                    await again.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, longest_s)
            else:
                again.clear()
                pause_s, _ = RETRY_S

    async def _follow(self, worker: RouterWorker, answer: _EventsAnswer) -> None:
        """Subscribe to a worker that has given this answer, unless that was done with the same answer."""
        known = self._answers.get(worker.url)
        if answer == known:
            return
        if known is not None:
            logger.info("%s has restarted with block size %d and %d ranks, before %d and %d: its events are read anew",
                        worker.url, answer.block_size, answer.ranks, known.block_size, known.ranks)
        if closing := self._end_subscribers(worker.url):
            await asyncio.wait(closing)
        if not worker.leaving:
            self._answers[worker.url] = answer
            on_notice = functools.partial(self._on_notice, worker)
            self._subscribe(worker, answer.block_size, [{"rank": rank, "on_notice": on_notice}
                                                        for rank in range(answer.ranks)])

    def _subscribe(self, worker: RouterWorker, block_size: int | None, ranks: list[dict[str, Any]]) -> None:
        """`ranks` has, for each data-parallel rank, the `Subscriber` arguments that say where its events are."""
        family = self._placer.families.join(worker)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="sweep")
        names = [worker.url, *(f"{worker.url}#{rank}" for rank in range(1, len(ranks)))]
        self._subscribers[worker.url] = [
            Subscriber(worker.url, UnsizedIndex(family) if block_size is None else family.index(block_size),
                       self._session, self._headers, keys=self._keys, worker=name, **rank)
            for name, rank in zip(names, ranks, strict=True)]
        if len(ranks) > 1:
            self._placer.ranks[worker.url] = names
        for subscriber in self._subscribers[worker.url]:
            subscriber.start()

    async def _sweep(self) -> None:
        logged = False
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                for index in self._placer.families.indexes():
                    index.sweep()
            except Exception:  # go on: if nothing swept the index any more, its memory would grow without end
                if not logged:
                    logger.exception("unexpected error while sweeping an index; it is tried again, and logged once")
                logged = True


def _ranks_as_json(ranks: list[Subscriber]) -> dict[str, object]:
    """One worker's entry: the sums over its ranks, and the state of the rank of which least is known."""
    counters, unread, states = Counter(), Counter(), list(SubscriberState)
    load, _ = load_of(ranks)
    for one in ranks:
        counters += one.counters
        unread += one.unread
    return {"state": min((one.state for one in ranks), key=states.index).name.lower(), "ranks": len(ranks),
            "counters": dict(counters), "unread": dict(unread),
            "load": None if load is None else msgspec.structs.asdict(load)}


def load_of(ranks: list[Subscriber]) -> tuple[EngineLoad | None, float]:
    """The sum of the ranks' loads and the age of the oldest; (None, infinite) where one is unknown."""
    loads = [one.load for one in ranks]
    if not loads or None in loads:
        return None, math.inf
    return (EngineLoad(*map(sum, zip(*map(msgspec.structs.astuple, loads), strict=True))),
            max(one.load_age_s for one in ranks))
