# SPDX-License-Identifier: Apache-2.0
"""The engines behind a router, and which of them may get a request.

Life of a worker: NEW until its first probe passes; then UP, the only state in which it gets requests. A failure makes
it DOWN at once, until a probe passes again. A worker that leaves gets no new requests, finishes its open ones, is
probed as before, and is forgotten when the last open request has ended. An `InFlightTry` is one open request at one
worker.
"""
import asyncio
import collections
import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator
from enum import Enum, StrEnum

from vllm_pd.router.metrics import RouterMetrics

logger = logging.getLogger("vllm.pd.router")

MAX_WORKERS = 4096
STRIKE_S = 30.0
EXTRA_PROBE_S = 1.0  # between two probes caused by requests, and between two such readings of the models


class WorkerState(Enum):
    """Whether a worker gets requests."""
    NEW = "new"
    UP = "up"
    DOWN = "down"


class WorkerSource(Enum):
    """How the router knows a worker."""
    STATIC = "static"  # the command line
    REGISTRY = "registry"
    OPERATOR = "operator"  # POST /workers
    DNS = "dns"
    FILE = "file"
_REQUEST_ERROR = re.compile(rb'"message":\s*"Internal server error"')


class WorkerFailure(StrEnum):
    """Why a worker was taken out, or a try at it failed; the label of counters."""
    CONNECT = "connect"
    BROKEN = "broken"  # the connection ended before the answer began
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"  # status 500 or above, or a stream that begins with an error
    NOT_LOADED = "not_loaded"  # the same, to a request with P's parameters; the worker gets it once more, without
    EMPTY = "empty"  # status 200 without a body
    PROBE = "probe"
    NO_MODEL = "no_model"  # status 404; the worker is not taken out
    ROUTER = "router"  # the router lacks descriptors, memory or ports; the worker is not taken out
    DECLINED = "declined"  # an error of this request alone, by an engine that goes on; the worker is not taken out
    BUSY = "busy"  # status 429 or 503; the worker is not taken out
    REFUSED = "refused"  # another answer in place of the rest of a broken stream; the worker is not taken out

    @classmethod
    def of_error(cls, body: bytes | bytearray) -> "WorkerFailure":
        """What an error of an engine's server says of it: nothing, where vLLM has ended this request alone, because its
        KV could not be loaded, or may not be computed there (the key `fallback`)."""
        return cls.DECLINED if _REQUEST_ERROR.search(body, 0, 1000) else cls.SERVER_ERROR


class TryOutcome(Enum):
    """How a try ended, if not with a `WorkerFailure`; the label of a counter."""
    ANSWERED = "answered"
    STALE = "stale"  # the worker had closed the idle connection
    BROKEN_LATER = "broken_later"  # the answer broke after its first byte
    CLIENT_GONE = "client_gone"
    CUT = "cut"  # the router is shutting down
    PASSED_OVER = "passed_over"  # picked for a gateway, which has sent the request to another worker


class Interruption(Enum):
    """Why a request stops waiting for a worker."""
    CLIENT_GONE = "client_gone"
    WORKER_DOWN = "worker_down"
    SILENT = "silent"  # nothing came for too long in the middle of an answer


class InFlightTry:
    """One try of one request at one worker, run by the current task, which `interrupt` cancels."""

    def __init__(self, worker: "RouterWorker") -> None:
        self.worker = worker
        self.heard_s = self.began_s = worker.now()
        self.interruption: Interruption | None = None
        self._settled = False
        self._task = asyncio.current_task()

    def heard(self, generated: bool) -> None:
        """Bytes came from the worker. `generated`: its engine made them; other answers come from its front end and
        don't show that the engine works."""
        self.heard_s = self.worker.now()
        if generated:
            self.worker.heard_s = self.heard_s

    def interrupt(self, why: Interruption) -> None:
        """Cancel the task. `interruption` has the reason; only the first one counts."""
        if self.interruption is None and not self._settled:
            self.interruption = why
            self._task.cancel()

    def settle(self) -> None:
        """The answer has broken, and its client is told so: from now on `interrupt` does nothing."""
        self._settled = True

    def take_interruption(self) -> bool:
        """Call it at a CancelledError. Returns whether `interrupt` caused it; then the cancellation is undone."""
        if self.interruption is None:
            return False
        self._task.uncancel()
        return True


class RouterWorker:
    """One engine. `prefills`: it gets prompts before a decode engine gets the request, and no client's requests. `wake`
    is set when it should be probed or asked for its models at once. Belongs to the router's event loop."""

    def __init__(self, url: str, source: WorkerSource, incarnation: str | None, metrics: RouterMetrics,
                 prefills: bool = False) -> None:
        self.url = url
        self.source = source
        self.prefills = prefills
        self.incarnation = incarnation
        self.state = WorkerState.NEW
        self.leaving = False
        self.problem = "not probed yet"
        self.models: frozenset[str] = frozenset()  # names of its models and adapters; empty while unknown
        self.base_models: frozenset[str] = frozenset()
        self.models_asked_s = -math.inf  # when it was last asked for them
        self.root: str | None = None  # its model's folder or name
        self.max_model_len: int | None = None  # the most tokens of a prompt and its answer
        self.version = ""  # of its vLLM; empty while unknown
        self.in_flight: set[InFlightTry] = set()
        self.failures = 0  # failed probes in a row
        self.strikes = 0  # how often it was taken out again within STRIKE_S
        self.probe_due = False  # it is probed although it has answered requests lately
        self.paused_until_s = 0.0
        self._out_s = -math.inf  # when it was last taken out
        self._probe_due_s = -math.inf
        self._failure_count = 0
        self._before_out = (0, -math.inf)  # `strikes` and `_out_s` before it was last taken out
        self._revocable = False  # whether all failures since it was last taken out are SERVER_ERROR
        self.now = asyncio.get_running_loop().time
        self.heard_s = self.up_since_s = self.now()
        self.wake = asyncio.Event()
        self._metrics = metrics
        self._up = metrics.of(url, metrics.worker_up)
        self._open = metrics.of(url, metrics.in_flight)
        self._open.set_function(lambda: len(self.in_flight))
        self.tries = functools.cache(lambda outcome: metrics.of(url, metrics.tries, outcome))
        self._update_metric()

    def probe_passed(self) -> None:
        """A probe has passed: the worker is UP."""
        self.failures = 0
        self.problem = ""
        self.heard_s = self.now()
        if self.state is not WorkerState.UP:
            self.up_since_s = self.heard_s
        self.state = WorkerState.UP
        self._update_metric()

    def fail(self, kind: WorkerFailure, detail: str) -> int:
        """Take the worker out and have it probed. Returns the failure's number, for `revoke_failure`."""
        self.problem = f"{kind.value}: {detail}"[:500]
        self._metrics.of(self.url, self._metrics.failures, kind.value).inc()
        self._failure_count += 1
        if self.state is not WorkerState.DOWN:
            logger.warning("worker %s is out: %s", self.url, self.problem)
            self.failures = 0
            self._before_out = (self.strikes, self._out_s)
            self._revocable = True
            self.strikes = self.strikes + 1 if self.now() < self._out_s + STRIKE_S else 0
            self._out_s = self.now()
            self.wake.set()
        self._revocable = self._revocable and kind is WorkerFailure.SERVER_ERROR
        self.state = WorkerState.DOWN
        self._update_metric()
        return self._failure_count

    def revoke_failure(self, failure: int) -> None:
        """Another worker has failed the same request, so the request itself may be the reason. Unless the worker has
        failed since, or otherwise, it is UP again as before, and is probed."""
        if failure != self._failure_count or not self._revocable:
            return
        self.strikes, self._out_s = self._before_out
        if self.state is WorkerState.DOWN:
            logger.info("worker %s is up again: another one failed the same request", self.url)
            self.problem = ""
            self.state = WorkerState.UP
            self._update_metric()
        self.probe_soon()

    def probe_soon(self) -> None:
        """Have it probed at once, but not more often than every EXTRA_PROBE_S."""
        if self.now() >= self._probe_due_s + EXTRA_PROBE_S:
            self._probe_due_s = self.now()
            self.probe_due = True
            self.wake.set()

    def ask_models_soon(self) -> None:
        """Have it asked for its models at once, but not more often than every EXTRA_PROBE_S."""
        if self.now() >= self.models_asked_s + EXTRA_PROBE_S:
            self.models_asked_s = -math.inf
            self.wake.set()

    def pause(self, seconds: float) -> None:
        """It refused a request that another worker took. For so long it gets requests only if no other can take
        them."""
        self.paused_until_s = max(self.paused_until_s, self.now() + seconds)

    def interrupt_silent(self, since_s: float) -> None:
        """Interrupt all tries to which nothing has come since `since_s`."""
        for one in list(self.in_flight):
            if one.heard_s <= since_s:
                one.interrupt(Interruption.WORKER_DOWN)

    def leave(self) -> None:
        """It gets no new requests from now on."""
        self.leaving = True
        self._up.set(False)

    def as_json(self) -> dict[str, object]:
        """Its entry in /workers."""
        return {"url": self.url, "state": self.state.value, "source": self.source.value, "problem": self.problem,
                "prefills": self.prefills, "in_flight": len(self.in_flight), "models": sorted(self.models),
                "incarnation": self.incarnation, "failures": self.failures, "strikes": self.strikes,
                "busy_s": max(0.0, round(self.paused_until_s - self.now(), 3))}

    def _update_metric(self) -> None:
        if not self.leaving:  # the figure is that of its successor at this URL
            self._up.set(self.state is WorkerState.UP)


class Workers:
    """All workers, by URL: decode engines, and prefill engines for the order prefill-first. The callbacks are called
    with a worker: `on_join` when it was added, `on_leave` when it was removed, `on_end` when its last open request has
    ended after that."""

    def __init__(self, metrics: RouterMetrics, max_in_flight: int) -> None:
        self.on_join: list[Callable[[RouterWorker], None]] = []
        self.on_leave: list[Callable[[RouterWorker], None]] = []
        self.on_end: list[Callable[[RouterWorker], None]] = []
        self.max_in_flight = max_in_flight
        self._metrics = metrics
        self._workers: dict[str, RouterWorker] = {}
        self._leaving: set[RouterWorker] = set()
        self._prefills = 0  # how many of them prefill

    def __iter__(self) -> Iterator[RouterWorker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, url: str) -> RouterWorker | None:
        """The worker with this URL; None where there is none or it leaves."""
        return self._workers.get(url)

    @property
    def leaving(self) -> list[RouterWorker]:
        """Those that were removed and still have open requests."""
        return list(self._leaving)

    @property
    def has_choice(self) -> bool:
        """Whether there are several decode engines, or several prefill engines."""
        return max(self._prefills, len(self._workers) - self._prefills) > 1

    def add(self, url: str, source: WorkerSource, incarnation: str | None = None,
            prefills: bool = False) -> RouterWorker | None:
        """Add a worker. Returns it, or the one that has this URL already; None where there are too many."""
        worker = self._workers.get(url)
        if worker is not None or len(self._workers) >= MAX_WORKERS:
            return worker
        worker = self._workers[url] = RouterWorker(url, source, incarnation, self._metrics, prefills)
        self._prefills += prefills
        for callback in self.on_join:
            callback(worker)
        return worker

    def remove(self, url: str) -> bool:
        """Remove the worker at this URL. Returns whether it was known."""
        worker = self._workers.pop(url, None)
        if worker is None:
            return False
        self._prefills -= worker.prefills
        worker.leave()
        for callback in self.on_leave:
            callback(worker)
        self._leaving.add(worker)
        self._forget_idle()
        return True

    def try_ended(self, ended: InFlightTry) -> None:
        """A try has ended. With its last one a leaving worker is forgotten."""
        ended.worker.in_flight.discard(ended)
        if self._leaving:
            self._forget_idle()

    def candidates(self, model: str | None, tried: Collection[RouterWorker] = (),
                   prefills: bool = False) -> list[RouterWorker]:
        """The decode engines, with `prefills` the prefill engines, that may get a request for this model, without those
        in `tried`. Where no decode engine is known to serve it, any may get the request: its answer will say so. Paused
        workers only where there are no others."""
        able = [worker for worker in self._workers.values() if worker.prefills is prefills
                and worker.state is WorkerState.UP and len(worker.in_flight) < self.max_in_flight]
        if tried:
            able = [worker for worker in able if worker not in tried]
        if model is not None and prefills or self.is_known(model):
            able = [worker for worker in able if self._may_have(worker, model)]
        now_s = asyncio.get_running_loop().time()
        return [worker for worker in able if worker.paused_until_s <= now_s] or able

    def counts(self) -> dict[str, int]:
        """The number of decode engines in each state."""
        return dict(collections.Counter(worker.state.value for worker in self._workers.values()
                                        if not worker.prefills))

    def any_up(self, model: str | None = None) -> bool:
        """Whether any decode engine is up, full or not; with a model that some worker serves, any that may get its
        requests."""
        return bool(self.up(model))

    def up(self, model: str | None = None) -> list[RouterWorker]:
        """The decode engines that are up, full or not; with a model that some worker serves, those that may get its
        requests."""
        known = self.is_known(model)
        return [worker for worker in self._workers.values() if worker.state is WorkerState.UP and not worker.prefills
                and (not known or self._may_have(worker, model))]

    def another_up(self, worker: RouterWorker) -> bool:
        """Whether another worker is up that may serve one of this worker's models, in its place."""
        return any(one is not worker and one.state is WorkerState.UP and one.prefills is worker.prefills
                   and (not worker.models or not one.models or not worker.models.isdisjoint(one.models))
                   for one in self._workers.values())

    def is_adapter(self, model: str | None) -> bool:
        """Whether the model is an adapter of some worker's model."""
        return model is not None and any(model in worker.models and model not in worker.base_models
                                         for worker in self._workers.values())

    def is_known(self, model: str | None) -> bool:
        """Whether any decode engine is known to serve the model."""
        return model is not None and any(model in worker.models for worker in self._workers.values()
                                         if not worker.prefills)

    @staticmethod
    def _may_have(worker: RouterWorker, model: str) -> bool:
        return model in worker.models or not worker.models

    def _forget_idle(self) -> None:
        for worker in [one for one in self._leaving if not one.in_flight]:
            self._leaving.discard(worker)
            for callback in self.on_end:
                callback(worker)
            if worker.url not in self._workers:
                self._metrics.forget(worker.url)
