# SPDX-License-Identifier: Apache-2.0
"""The engines behind a router, and which of them may get a request.

Life of a worker: NEW until its first probe has gone well; then UP, the only state in which it gets requests. Any
failure makes it DOWN at once, until a probe goes well again. One that leaves gets nothing new, keeps what is open, is
probed as before, and is forgotten with the last of that. What one request has open at one worker is a `InFlightTry`.
"""
import asyncio
import collections
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator
from enum import Enum, StrEnum

from vllm_pd.router.metrics import RouterMetrics

logger = logging.getLogger("vllm_pd.router")

MAX_WORKERS = 4096
STRIKE_S = 30.0
DOUBT_S = 1.0  # between probes that requests are the reason of, and between questions for models likewise


class WorkerState(Enum):
    """Whether a worker gets requests."""
    NEW = "new"
    UP = "up"
    DOWN = "down"


class WorkerSource(Enum):
    """From where a worker is known."""
    STATIC = "static"  # the command line
    REGISTRY = "registry"
    OPERATOR = "operator"  # POST /workers


class WorkerFailure(StrEnum):
    """Why a worker was taken out, or a try at it given up; the label of the counters."""
    CONNECT = "connect"
    BROKEN = "broken"  # the connection ended before an answer had begun
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"  # a status of 500 and above, or an error where tokens should begin
    EMPTY = "empty"  # success without a body
    PROBE = "probe"
    NO_MODEL = "no_model"  # 404; it is not taken out
    ROUTER = "router"  # the router itself is short of descriptors or the like; it says nothing of the worker
    BUSY = "busy"  # 429 or 503: it takes nothing now, or not this request; it is not taken out


class Interruption(Enum):
    """Why a request stops waiting for a worker."""
    CLIENT_GONE = "client_gone"
    WORKER_DOWN = "worker_down"
    SILENT = "silent"  # nothing has come for too long, in the middle of an answer


class InFlightTry:
    """One try of one request at one worker, run by the present task. `interrupt` makes that task's wait end."""

    def __init__(self, worker: "RouterWorker") -> None:
        self.worker = worker
        self.heard_s = self.began_s = worker.now()
        self.interruption: Interruption | None = None
        self._task = asyncio.current_task()

    def heard(self, generated: bool) -> None:
        """Something came from the worker; that it still generates is shown by what it has `generated` only, for its
        front end answers much by itself."""
        self.heard_s = self.worker.now()
        if generated:
            self.worker.heard_s = self.heard_s

    def interrupt(self, why: Interruption) -> None:
        """End the wait. The task sees a CancelledError, the reason is in `interruption`; only the first counts."""
        if self.interruption is None:
            self.interruption = why
            self._task.cancel()

    def landed(self) -> bool:
        """After a CancelledError: whether it was ours, which then is undone."""
        if self.interruption is None:
            return False
        self._task.uncancel()
        return True


class RouterWorker:
    """One engine. Belongs to the router's event loop. `wake` is set when it is to be probed before its time."""

    def __init__(self, url: str, source: WorkerSource, incarnation: str | None, metrics: RouterMetrics) -> None:
        self.url = url
        self.source = source
        self.incarnation = incarnation
        self.state = WorkerState.NEW
        self.leaving = False
        self.problem = "not probed yet"
        self.models: frozenset[str] = frozenset()  # the names that it serves; empty where unknown
        self.base_models: frozenset[str] = frozenset()
        self.learned_s = -math.inf  # when it was asked for them
        self.root: str | None = None  # its model's folder or name, as it says
        self.flights: set[InFlightTry] = set()
        self.failures = 0  # of probes, in a row
        self.strikes = 0  # how often it was taken out soon after it had been before
        self.doubted = False  # it is to be probed whatever it has answered
        self._out_s = -math.inf  # when it was taken out last
        self._doubted_s = -math.inf
        self._fails = 0
        self._record = (0, -math.inf)  # strikes and _out_s before it was taken out last
        self._excusable = False  # whether it is out for no more than answers of 500
        self.busy_until_s = 0.0
        self.now = asyncio.get_running_loop().time
        self.heard_s = self.up_since_s = self.now()
        self.wake = asyncio.Event()
        self._metrics = metrics
        self._up = metrics.of(url, metrics.worker_up)
        self._open = metrics.of(url, metrics.in_flight)
        self._open.set_function(lambda: len(self.flights))
        self.tries = functools.cache(lambda outcome: metrics.of(url, metrics.tries, outcome))
        self._show()

    def good(self) -> None:
        """A probe went well."""
        self.failures = 0
        self.problem = ""
        self.heard_s = self.now()
        if self.state is not WorkerState.UP:
            self.up_since_s = self.heard_s
        self.state = WorkerState.UP
        self._show()

    def fail(self, kind: WorkerFailure, detail: str) -> int:
        """Out at once; it is probed soon. Returns what `acquit` takes."""
        self.problem = f"{kind.value}: {detail}"[:500]
        self._metrics.of(self.url, self._metrics.failures, kind.value).inc()
        self._fails += 1
        if self.state is not WorkerState.DOWN:
            logger.warning("worker %s is out: %s", self.url, self.problem)
            self.failures = 0
            self._record = (self.strikes, self._out_s)
            self._excusable = True
            self.strikes = self.strikes + 1 if self.now() < self._out_s + STRIKE_S else 0
            self._out_s = self.now()
            self.wake.set()
        self._excusable = self._excusable and kind is WorkerFailure.SERVER_ERROR
        self.state = WorkerState.DOWN
        self._show()
        return self._fails

    def acquit(self, failure: int) -> None:
        """That failure was the request's own, which others could not answer either. Unless something else speaks
        against the worker it is back, as if nothing had been, but for a probe."""
        if failure != self._fails or not self._excusable:
            return
        self.strikes, self._out_s = self._record
        if self.state is WorkerState.DOWN:
            logger.info("worker %s is back: others have no answer to that request either", self.url)
            self.problem = ""
            self.state = WorkerState.UP
            self._show()
        self.doubt()

    def doubt(self) -> None:
        """Have it probed at once, though not time and again."""
        if self.now() >= self._doubted_s + DOUBT_S:
            self._doubted_s = self.now()
            self.doubted = True
            self.wake.set()

    def lacks_model(self) -> None:
        """It does not serve what it was asked for: have it asked what it does serve."""
        if self.now() >= self.learned_s + DOUBT_S:
            self.learned_s = -math.inf
            self.wake.set()

    def busy(self, seconds: float) -> None:
        """It has refused a request that another one had room for. It gets none for so long if others can take them."""
        self.busy_until_s = max(self.busy_until_s, self.now() + seconds)

    def strand(self, since_s: float) -> None:
        """Give up all flights that have heard nothing since then."""
        for flight in list(self.flights):
            if flight.heard_s <= since_s:
                flight.interrupt(Interruption.WORKER_DOWN)

    def leave(self) -> None:
        """Nothing new for it."""
        self.leaving = True
        self._show()

    def shown(self) -> dict[str, object]:
        """As /workers shows it."""
        return {"url": self.url, "state": self.state.value, "source": self.source.value, "problem": self.problem,
                "in_flight": len(self.flights), "models": sorted(self.models), "incarnation": self.incarnation,
                "failures": self.failures, "strikes": self.strikes,
                "busy_s": max(0.0, round(self.busy_until_s - self.now(), 3))}

    def _show(self) -> None:
        self._up.set(self.state is WorkerState.UP and not self.leaving)


class Workers:
    """All of them, by URL. `on_join` is told of each that comes, `on_leave` when it is to get nothing new, `on_end`
    when nothing is open there any more."""

    def __init__(self, metrics: RouterMetrics, max_in_flight: int) -> None:
        self.on_join: list[Callable[[RouterWorker], None]] = []
        self.on_leave: list[Callable[[RouterWorker], None]] = []
        self.on_end: list[Callable[[RouterWorker], None]] = []
        self.max_in_flight = max_in_flight
        self._metrics = metrics
        self._workers: dict[str, RouterWorker] = {}
        self._leaving: set[RouterWorker] = set()

    def __iter__(self) -> Iterator[RouterWorker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, url: str) -> RouterWorker | None:
        """The worker of that URL, unless it leaves."""
        return self._workers.get(url)

    def add(self, url: str, source: WorkerSource, incarnation: str | None = None) -> RouterWorker | None:
        """A new one; the one that is there already, where it is; None where there are too many."""
        worker = self._workers.get(url)
        if worker is not None or len(self._workers) >= MAX_WORKERS:
            return worker
        worker = self._workers[url] = RouterWorker(url, source, incarnation, self._metrics)
        for told in self.on_join:
            told(worker)
        return worker

    def remove(self, url: str) -> bool:
        """Let it leave. Whether it was there."""
        worker = self._workers.pop(url, None)
        if worker is None:
            return False
        worker.leave()
        for told in self.on_leave:
            told(worker)
        self._leaving.add(worker)
        self._forget()
        return True

    def landed(self, flight: InFlightTry) -> None:
        """A flight has ended."""
        flight.worker.flights.discard(flight)
        if self._leaving:
            self._forget()

    def candidates(self, model: str | None, tried: Collection[RouterWorker] = ()) -> list[RouterWorker]:
        """Those that may get a request for that model; where nobody is known to have it, those that may get any, so
        that one of them can say so. Those that are busy only if there are no others."""
        most = self.max_in_flight
        able = [worker for worker in self._workers.values()
                if worker.state is WorkerState.UP and len(worker.flights) < most]
        if tried:
            able = [worker for worker in able if worker not in tried]
        if self._is_known(model):
            able = [worker for worker in able if model in worker.models or not worker.models]
        now_s = asyncio.get_running_loop().time()
        return [worker for worker in able if worker.busy_until_s <= now_s] or able

    def counts(self) -> dict[str, int]:
        """How many there are by state."""
        return dict(collections.Counter(worker.state.value for worker in self._workers.values()))

    def any_up(self, model: str | None = None) -> bool:
        """Whether any worker works at all, full or not; of those that may get a request for that model, if one is
        given."""
        known = self._is_known(model)
        return any(worker.state is WorkerState.UP and (not known or self._may_have(worker, model))
                   for worker in self._workers.values())

    def another_up(self, worker: RouterWorker) -> bool:
        """Whether any other worker works that may have one of its models."""
        return any(one is not worker and one.state is WorkerState.UP
                   and (not worker.models or not one.models or not worker.models.isdisjoint(one.models))
                   for one in self._workers.values())

    def _is_known(self, model: str | None) -> bool:
        """Whether anybody is known to have it."""
        return model is not None and any(model in worker.models for worker in self._workers.values())

    @staticmethod
    def _may_have(worker: RouterWorker, model: str) -> bool:
        return model in worker.models or not worker.models

    def _forget(self) -> None:
        for worker in [one for one in self._leaving if not one.flights]:
            self._leaving.discard(worker)
            for told in self.on_end:
                told(worker)
            if worker.url not in self._workers:
                self._metrics.forget(worker.url)
