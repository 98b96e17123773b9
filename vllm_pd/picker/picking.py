# SPDX-License-Identifier: Apache-2.0
"""Picks the engine for one request of a gateway, by the router's judgement. Nothing of gRPC is here.

A `Pick` is one request at one worker, as a try of the router's is: from the pick to the end of the gateway's stream it
counts as open there, and its prompt as load until the worker's own report has it. The gateway sends the request, so a
pick can't be interrupted, and nothing is tried again here. What the answer's status shows of the worker is applied as
in the router where one request is enough to know it: a worker that answers tokens works, one that refuses pauses, and
one that fails is probed, and is out when the probe fails.
"""
import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus

from vllm_pd.picker.endpoints import WorkerEndpoints
from vllm_pd.picker.options import PickerOptions
from vllm_pd.router import responses, routes
from vllm_pd.router.errors import RouterErrors
from vllm_pd.router.judgement import Judgement
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.responses import Headers, RouterResponse
from vllm_pd.router.workers import InFlightTry, Interruption, RouterWorker, TryOutcome, WorkerFailure, WorkerState

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
    """See the module. `endpoints` is the worker's and those of its fallbacks, as the gateway wants them."""

    def __init__(self, worker: RouterWorker, endpoints: str) -> None:
        super().__init__(worker)
        self.endpoints = endpoints
        self.outcome: TryOutcome | WorkerFailure = TryOutcome.CLIENT_GONE
        worker.in_flight.add(self)

    def interrupt(self, why: Interruption) -> None:
        """Nothing: the gateway has the request."""


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
            raise self._unplaced(request, plan.model, left_out)
        worker, _ = placed
        others = self._placer.alternatives(plan, {*left_out, worker}, self._options.fallbacks)
        self._metrics.route_s.observe(self._now() - began_s)
        return Pick(worker, ",".join(self._endpoints.of(one) for one in (worker, *others)))

    def answered(self, pick: Pick, request: PickRequest, status: int, headers: Headers, served: str | None) -> None:
        """The answer to a picked request has begun. `served`: the endpoint that has answered, where the gateway says
        so."""
        other = None if served is None else self._endpoints.worker_at(served)
        if other is not None and other is not pick.worker:
            self._move(pick, other)
        worker = pick.worker
        self._metrics.first_byte_s.observe(self._now() - pick.began_s)
        self._metrics.requests.labels(request.path, str(status)).inc()
        pick.heard(generated=request.generates and status == HTTPStatus.OK)
        pick.outcome = TryOutcome.ANSWERED
        if status in responses.BUSY:
            pick.outcome = WorkerFailure.BUSY
            worker.pause(responses.retry_after_s(headers, self._options.retry_after_s))
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
        self._count(pick)
        self._workers.try_ended(pick)

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

    def _unplaced(self, request: PickRequest, model: str | None, left_out: Collection[RouterWorker]) -> PickRefused:
        if any(worker.state is WorkerState.UP for worker in self._workers if worker not in left_out):
            return PickRefused(*self.errors.unplaced(model, self._options.retry_after_s, request.path))
        text, reason = (("no worker is up: try again later", "none_up") if request.subset is None else
                        ("no worker of those that the gateway allows is up: try again later", "subset"))
        return self.refused(HTTPStatus.SERVICE_UNAVAILABLE, text, reason, request.path, self._options.retry_after_s)

    def _move(self, pick: Pick, worker: RouterWorker) -> None:
        """The gateway has sent the request to another worker than the first one that it was given."""
        passed_over = pick.worker
        pick.outcome = TryOutcome.PASSED_OVER
        self._count(pick)
        self._workers.try_ended(pick)
        passed_over.probe_soon()
        pick.worker = worker
        worker.in_flight.add(pick)

    @staticmethod
    def _count(pick: Pick) -> None:
        pick.worker.tries(pick.outcome.value).inc()
