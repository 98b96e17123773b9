# SPDX-License-Identifier: Apache-2.0
"""Picks the engine for one request of a gateway, by the router's judgement. Nothing of gRPC is here.

A `Pick` is one request at one worker, as a try of the router's is: from the pick to the end of the gateway's stream it
counts as open there, and its prompt as load until the worker's own report has it. It stops counting before that where
the worker is down and silent. The gateway sends the request, so it can't be cut, and nothing is tried again here. What
the answer's status shows of the worker is applied as in the router where one request is enough to know it: a worker
that answers tokens works, one that refuses pauses, and one that fails is probed, and is out when the probe fails.
"""
import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from vllm_pd.picker.endpoints import WorkerEndpoints
from vllm_pd.picker.options import PickerOptions
from vllm_pd.router import responses, routes
from vllm_pd.router.errors import RouterErrors
from vllm_pd.router.judgement import Judgement
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.responses import Headers, RouterResponse
from vllm_pd.router.workers import InFlightTry, Interruption, RouterWorker, TryOutcome, WorkerFailure, Workers

OTHER = "other"  # the label of all paths that are not forwarded: clients could make any number of them


@dataclass(frozen=True)
class PickRequest:
    """What is known of a request when its engine is picked. Names of headers are in lower case. `path` has no query.
    `subset`: the endpoints to pick from; None for any."""
    method: str
    path: str
    headers: Headers
    subset: frozenset[str] | None = None

    @property
    def generates(self) -> bool:
        """Whether its answer takes a step of an engine."""
        return routes.generates(self.method, self.path)


class PickRefused(Exception):
    """No engine gets the request: its client gets this answer. `reason`: the label of a counter."""

    def __init__(self, answer: RouterResponse, reason: str) -> None:
        super().__init__(reason)
        self.answer = answer
        self.reason = reason


class Pick(InFlightTry):
    """See the module. `named`: the worker and its fallbacks by their endpoints, in order. `workers` gets it back."""

    def __init__(self, worker: RouterWorker, named: Mapping[str, RouterWorker], workers: Workers) -> None:
        super().__init__(worker)
        self.named = named
        self.outcome: TryOutcome | WorkerFailure = TryOutcome.CLIENT_GONE
        self._workers = workers
        self._counted = False
        worker.in_flight.add(self)

    @property
    def endpoints(self) -> str:
        """Where to send the request, as the gateway wants it."""
        return ",".join(self.named)

    def interrupt(self, why: Interruption) -> None:
        """Its worker is down and silent: it counts as open there no more. The gateway has the request, which can't be
        cut, and may keep it for as long as it believes in the connection."""
        if self.interruption is None:
            self.interruption = why
            if self.outcome is TryOutcome.CLIENT_GONE:
                self.outcome = WorkerFailure.TIMEOUT
            self.end()

    def move(self, worker: RouterWorker) -> None:
        """The gateway has sent the request to another worker than the first one that it was given."""
        passed_over = self.worker
        if not self._counted:  # else its worker had no chance to be passed over: it was down
            self.outcome = TryOutcome.PASSED_OVER
            self.end()
        passed_over.probe_soon()
        self.worker, self.interruption, self._counted = worker, None, False
        worker.in_flight.add(self)

    def end(self) -> None:
        """Count it, and take it from its worker. Does nothing if that was done."""
        if not self._counted:
            self._counted = True
            self.worker.tries(self.outcome.value).inc()
            self._workers.try_ended(self)


class EndpointPicker:
    """See the module. Belongs to the event loop of its judgement, which has begun."""

    def __init__(self, options: PickerOptions, judgement: Judgement, endpoints: WorkerEndpoints,
                 metrics: RouterMetrics) -> None:
        self._options = options
        self._workers, self._placer = judgement.workers, judgement.placer
        self._endpoints = endpoints
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time
        self.errors = RouterErrors(judgement.workers)

    def check(self, request: PickRequest) -> None:
        """Raises PickRefused for a request that no engine may get, whatever its body is: the router's routes are the
        picker's, so that engines' operator routes can't be reached through a gateway by mistake."""
        if request.path not in routes.FORWARDED:
            raise self.refused(HTTPStatus.NOT_FOUND, f"no engine is picked for {request.path[:100]}", "route")
        if request.method not in routes.METHODS:
            raise self.refused(HTTPStatus.METHOD_NOT_ALLOWED, f"use one of {', '.join(routes.METHODS)}", "method",
                               request.path)

    async def pick(self, request: PickRequest, body: bytes) -> Pick:
        """The engine for a request that was checked. The caller ends the pick. Raises PickRefused."""
        began_s = self._now()
        plan = await self._placer.plan(request.headers, body, routes.completes(request.method, request.path),
                                       request.generates)
        left_out = self._left_out(request.subset)
        placed = self._placer.place(plan, left_out)
        if placed is None:
            raise self._unplaced(request, plan.model)
        worker, _ = placed
        others = self._placer.alternatives(plan, {*left_out, worker}, self._options.fallbacks)
        self._metrics.route_s.observe(self._now() - began_s)
        named: dict[str, RouterWorker] = {}
        for one in (worker, *others):  # two URLs may have one endpoint
            named.setdefault(self._endpoints.of(one), one)
        return Pick(worker, named, self._workers)

    def answered(self, pick: Pick, request: PickRequest, status: int, headers: Headers, served: str | None) -> None:
        """The answer to a picked request has begun. `served`: the endpoint that has answered, where the gateway says
        so."""
        by = None if served is None else pick.named.get(served) or self._endpoints.worker_at(served)
        if by is not None and by is not pick.worker:
            pick.move(by)
        worker = pick.worker
        self._metrics.first_byte_s.observe(self._now() - pick.began_s)
        self._metrics.requests.labels(request.path, str(status)).inc()
        pick.heard(generated=request.generates and status == HTTPStatus.OK)
        pick.outcome = TryOutcome.ANSWERED
        if status in responses.BUSY:
            pick.outcome = WorkerFailure.BUSY
            pause_s = responses.retry_after_s(headers, self._options.retry_after_s)
            if by is None:  # perhaps a gateway's own filter or breaker, which says nothing of the engine
                pause_s = min(pause_s, self._options.retry_after_s)
                worker.probe_soon()
            worker.pause(pause_s)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and request.generates:  # also a gateway's own, for no connection
            if status not in responses.BUSY:
                pick.outcome = WorkerFailure.SERVER_ERROR
            worker.probe_soon()
        elif status == HTTPStatus.NOT_FOUND and request.generates:
            pick.outcome = WorkerFailure.NO_MODEL
            worker.ask_models_soon()

    def end(self, pick: Pick) -> None:
        """The gateway's stream has ended, for whatever reason."""
        if pick.outcome is TryOutcome.CLIENT_GONE:
            self._metrics.clients_gone.inc()
        pick.end()

    @property
    def ready(self) -> bool:
        """Whether a request may get an engine."""
        return bool(self._pickable(None, None))

    def count_unpicked(self, request: PickRequest, status: int) -> None:
        """Count a request that the gateway has answered itself before its engine was picked."""
        self._metrics.refused.labels("gateway").inc()
        self._metrics.requests.labels(request.path, str(status)).inc()

    def count_refused(self, refused: PickRefused, path: str) -> None:
        """Count a request that was refused."""
        self._metrics.refused.labels(refused.reason).inc()
        label = path if path in routes.FORWARDED else OTHER
        self._metrics.requests.labels(label, str(refused.answer.status)).inc()

    def refused(self, status: HTTPStatus, text: str, reason: str, path: str = "",
                retry_after_s: float | None = None) -> PickRefused:
        """A refusal in the form of the engines' own errors."""
        return PickRefused(self.errors.response(status, text, retry_after_s, path), reason)

    def _left_out(self, subset: frozenset[str] | None) -> set[RouterWorker]:
        """The workers that can't be picked for a gateway that picks from `subset`."""
        return {worker for worker in self._workers
                if (endpoint := self._endpoints.of(worker)) is None or subset is not None and endpoint not in subset}

    def _pickable(self, model: str | None, subset: frozenset[str] | None) -> list[RouterWorker]:
        """The workers that may be picked, full or not."""
        left_out = self._left_out(subset)
        return [worker for worker in self._workers.up(model) if worker not in left_out]

    def _unplaced(self, request: PickRequest, model: str | None) -> PickRefused:
        any_up, retry_after_s = bool(self._pickable(model, request.subset)), self._options.retry_after_s
        if any_up or request.subset is None:
            return PickRefused(*self.errors.unplaced(any_up, retry_after_s, request.path))
        return self.refused(HTTPStatus.SERVICE_UNAVAILABLE, "no worker of those that the gateway allows is up: try "
                            "again later", "subset", request.path, retry_after_s)
