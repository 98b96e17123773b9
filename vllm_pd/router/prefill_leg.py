# SPDX-License-Identifier: Apache-2.0
"""The first leg of a request in the order prefill-first: one P computes the prompt before D gets the request.

There is one try at one P. Whatever goes wrong there, D gets the request as the client sent it and decides for itself,
so no failure of P's, and no error in the request, is seen by the client in another way than in the order decode-first.
"""
import asyncio
import uuid
from enum import StrEnum
from http import HTTPStatus

from vllm_pd.router import prefill_form, responses
from vllm_pd.router.client_connection import ClientConnection, ClientGone
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.placing import PlacementPlan, Placer
from vllm_pd.router.prefill_form import NotPrefilled, PrefillOutcome
from vllm_pd.router.request import PrefillLeg, RouterRequest
from vllm_pd.router.responses import Headers
from vllm_pd.router.worker_client import TryFailed, WorkerClient, WorkerResponse, WorkerResponseBroken
from vllm_pd.router.workers import InFlightTry, Interruption, RouterWorker, WorkerFailure, Workers

MAX_ANSWER_BYTES = 1 << 20
REQUEST_ID = b"x-request-id"


class PrefillSender:
    """Has Ps compute prompts. Belongs to the router's event loop."""

    def __init__(self, options: RouterOptions, workers: Workers, placer: Placer, worker_client: WorkerClient,
                 metrics: RouterMetrics) -> None:
        self._options = options
        self._workers = workers
        self._placer = placer
        self._worker_client = worker_client
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time

    async def run(self, request: RouterRequest, plan: PlacementPlan, headers: Headers,
                  client: ClientConnection, is_fatal: bool) -> PrefillLeg:
        """Have a P compute the request's prompt, if the request is covered and there is a P, unless it `is_fatal` to
        Ps. Where the client has sent no request id, one is added to `headers`: some engines match both legs by it.
        Raises ClientGone."""
        leg = PrefillLeg()
        try:
            if is_fatal:
                raise NotPrefilled(PrefillOutcome.FATAL)
            fields = prefill_form.read_fields(request.body)
            leg.worker = worker = self._choose(plan)
            if responses.find(headers, REQUEST_ID) is None:
                headers.append((REQUEST_ID, uuid.uuid4().hex.encode()))
            began_s = self._now()
            try:
                leg.params = prefill_form.read_params(await self.ask(worker, request.target, headers,
                                                                     prefill_form.prefill_body(fields), client))
            finally:
                leg.took_s = self._now() - began_s
            leg.fields, leg.outcome, plan.prefilled = fields, PrefillOutcome.PREFILLED, True
            self._metrics.prefill_s.observe(leg.took_s)
        except NotPrefilled as error:
            leg.outcome = error.outcome
        except ClientGone:
            leg.outcome = PrefillOutcome.CLIENT_GONE
            raise
        finally:
            self._metrics.prefill_first.labels(leg.outcome.value).inc()
        return leg

    def _choose(self, plan: PlacementPlan) -> RouterWorker:
        """The P for a request. Raises NotPrefilled."""
        if self._workers.is_adapter(plan.model):
            raise NotPrefilled(PrefillOutcome.ADAPTER)
        if not self._workers.candidates(plan.model):
            raise NotPrefilled(PrefillOutcome.NO_DECODE)
        worker = self._placer.place_prefill(plan)
        if worker is None:
            raise NotPrefilled(PrefillOutcome.NO_PREFILL)
        return worker

    async def ask(self, worker: RouterWorker, target: bytes, headers: Headers, body: bytes,
                  client: ClientConnection) -> bytes:
        """The body of a P's answer with status 200. It counts as open there until then, and ends when `client` goes.
        Raises NotPrefilled, ClientGone."""
        this = InFlightTry(worker)
        worker.in_flight.add(this)
        client.watch(this)
        try:
            async with asyncio.timeout(self._options.prefill_timeout_s):
                return await self._exchange(this, target, headers, body)
        except TimeoutError:
            if worker.heard_s <= this.began_s:
                worker.fail(WorkerFailure.TIMEOUT, f"no prefill in {self._options.prefill_timeout_s:g} s")
            raise NotPrefilled(WorkerFailure.TIMEOUT) from None
        except TryFailed as failure:
            if failure.kind is not WorkerFailure.ROUTER:
                worker.fail(failure.kind, str(failure))
            raise NotPrefilled(failure.kind) from None
        except asyncio.CancelledError:
            if not this.take_interruption():
                raise
            if this.interruption is Interruption.CLIENT_GONE:
                raise ClientGone from None
            raise NotPrefilled(WorkerFailure.PROBE) from None
        finally:
            client.watch(None)
            self._workers.try_ended(this)

    async def _exchange(self, this: InFlightTry, target: bytes, headers: Headers, body: bytes) -> bytes:
        """Raises NotPrefilled, TryFailed."""
        worker = this.worker
        reply = await self._send(worker, target, [one for one in headers if one[0] != b"accept-encoding"], body)
        try:
            this.heard(generated=False)
            content = await _read(reply)
        except WorkerResponseBroken as broken:
            raise TryFailed(WorkerFailure.BROKEN, str(broken)) from broken
        finally:
            reply.close()
        if reply.status == HTTPStatus.OK:
            this.heard(generated=True)
            return content
        raise NotPrefilled(self._refusal(worker, reply))

    async def _send(self, worker: RouterWorker, target: bytes, headers: Headers, body: bytes) -> WorkerResponse:
        """Send the request to P and wait for the head of its answer; once more where P had closed an idle connection.
        Raises TryFailed."""
        try:
            return await self._worker_client.send(b"POST", worker.url, target, headers, body)
        except TryFailed as failure:
            if not failure.stale:
                raise
        return await self._worker_client.send_again(b"POST", worker.url, target, headers, body)

    def _refusal(self, worker: RouterWorker, reply: WorkerResponse) -> StrEnum:
        """What P's error means. No P is out for it: D shows whether the request is the reason, and the probe whether P
        is. P gets no requests for a while that another P can take."""
        if reply.status == HTTPStatus.NOT_FOUND:
            worker.ask_models_soon()
            return WorkerFailure.NO_MODEL
        busy = reply.status in responses.BUSY
        if not busy and reply.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return PrefillOutcome.REFUSED
        worker.pause(responses.retry_after_s(reply.headers, self._options.retry_after_s))
        if busy:
            return WorkerFailure.BUSY
        worker.probe_soon()
        return WorkerFailure.SERVER_ERROR


async def _read(reply: WorkerResponse) -> bytes:
    """The body of P's answer. Raises WorkerResponseBroken, and NotPrefilled for one that is too long."""
    parts = bytearray()
    while chunk := await reply.chunk():
        parts += chunk
        if len(parts) > MAX_ANSWER_BYTES:
            raise NotPrefilled(PrefillOutcome.BAD_PARAMS)
    return bytes(parts)
