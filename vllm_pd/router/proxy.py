# SPDX-License-Identifier: Apache-2.0
"""Forwards one request: to a worker, to another one if that fails, and streams the answer back.

Nothing is sent to the client before the first byte of an answer's body has come. Until then a failed request is tried
on another worker, at once, on at most three in all. An answer with a Content-Length, if it is not too long, is read
whole before it is sent.

After the first byte nothing is tried again. A stream that breaks ends with an error event, any other answer with the
end of the connection. An answer is complete at the end of its framing (the last chunk, the length). Where it has no
framing, only the end of the connection shows its end; then a stream of completions must end with `[DONE]`, unless it is
compressed.

With `continue_streams`, a stream that breaks goes on at another worker where `vllm_pd.router.continuation` says so.
Such a stream is read event by event; all others pass as they come.
"""
import asyncio
import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus

from vllm_pd.router import responses
from vllm_pd.router.client_connection import (
    ClientConnection,
    ClientGone,
    ClientResponseBroken,
    Receive,
    Send,
    is_stream,
    respond,
    takes_events,
)
from vllm_pd.router.continuation import ContinuableStream
from vllm_pd.router.errors import RouterErrors
from vllm_pd.router.fatal_requests import FatalRequests
from vllm_pd.router.metaserver import Metaserver, OpenTry
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import MAX_TRIES, RequestOrder, RouterOptions
from vllm_pd.router.placing import PlacementPlan, Placer
from vllm_pd.router.policy import Choice
from vllm_pd.router.prefill_form import PrefillOutcome
from vllm_pd.router.prefill_leg import PrefillSender
from vllm_pd.router.request import RouterRequest, StreamBroke, Suspect
from vllm_pd.router.responses import Headers, RouterResponse
from vllm_pd.router.routes import COMPLETING
from vllm_pd.router.worker_client import TryFailed, WorkerClient, WorkerResponse, WorkerResponseBroken
from vllm_pd.router.workers import InFlightTry, Interruption, RouterWorker, TryOutcome, WorkerFailure, Workers

DETOKENIZE = b"/detokenize"
MAX_WHOLE_BYTES = 1 << 20
_DONE = re.compile(rb"data: ?\[DONE\]")
_TAIL_BYTES = 256
ENDING = "the router is shutting down"
LOOP = "this request has passed this router before: one of its workers is the router itself, or leads back to it"
_LOST = "the worker was lost after the answer had begun"
_ERROR_EVENT = re.compile(rb'(?:event: error\n)?data: \{\s*"(?:error"|object":\s*"error"|type":\s*"error")')
_CLIENT_ERROR = re.compile(rb'"code":\s*4\d\d\b')
_ERRORS = (WorkerFailure.SERVER_ERROR, WorkerFailure.DECLINED)
_NO_FAULT = (WorkerFailure.ROUTER, WorkerFailure.NOT_LOADED, WorkerFailure.REFUSED, WorkerFailure.DECLINED)
_FATAL = "engines were lost while they had this request, so it is not sent to another one"


class _StreamFailed(Exception):
    """In place of the rest of a stream the worker has sent an error."""


class _Try(InFlightTry):
    """A try with its answer, whether it has P's parameters, whether its answer has begun, and how it ended."""

    def __init__(self, worker: RouterWorker, has_params: bool = False) -> None:
        super().__init__(worker)
        self.has_params = has_params
        self.begun = False
        self.reply: WorkerResponse | None = None
        self.posting: OpenTry | None = None
        self.outcome: TryOutcome | WorkerFailure = TryOutcome.BROKEN_LATER


class RouterProxy:
    """Forwards requests to workers. Belongs to the router's event loop. `via`: this router's value of the header Via
    (RFC 9110, 7.6.3), by which it knows its own requests."""

    def __init__(self, options: RouterOptions, workers: Workers, placer: Placer, worker_client: WorkerClient,
                 metrics: RouterMetrics, errors: RouterErrors, via: bytes) -> None:
        self._options = options
        self._workers = workers
        self._placer = placer
        self._worker_client = worker_client
        self._metrics = metrics
        self._errors = errors
        self._via = via
        self._authorization = (None if options.worker_api_key is None
                               else f"Bearer {options.worker_api_key}".encode())
        self.fatal = FatalRequests()
        sender = PrefillSender(options, workers, placer, worker_client, metrics)
        self._prefills = sender if options.order is RequestOrder.PREFILL_FIRST else None
        self.metaserver = (None if options.metaserver is None else
                           Metaserver(options.metaserver, sender, placer, self.fatal, metrics, errors))
        self._now = asyncio.get_running_loop().time
        self.ending = False  # the router is shutting down: a cancelled request tells its client so

    async def forward(self, request: RouterRequest, receive: Receive, send: Send) -> int:
        """Answer a request. Returns the status that was sent. Raises ClientGone, ClientResponseBroken."""
        if any(name == b"via" and self._via in value for name, value in request.headers):
            await respond(send, self._errors.response(HTTPStatus.LOOP_DETECTED, LOOP, path=request.path))
            return HTTPStatus.LOOP_DETECTED
        if self._options.continue_streams and request.generates:
            request.stream = ContinuableStream.of(request.path, request.body)
            if request.stream is not None:
                request.body = request.stream.body
        if request.generates and self.fatal.is_known(request.path, request.body):
            self._metrics.refused.labels("fatal").inc()
            await respond(send, self._fatal_answer(request))
            return HTTPStatus.BAD_GATEWAY
        authorization = self._authorization
        if authorization and request.method == b"OPTIONS":  # the router asks for no key there, so it lends none
            authorization = b""
        headers = [*responses.request_headers(request.headers, authorization), (b"via", self._via)]
        client = ClientConnection(receive, send)
        try:
            completes = request.generates and request.path in COMPLETING
            plan = await self._placer.plan(request.headers, request.body, completes, request.generates)
            if (self._prefills is not None and completes
                    and await self._run_prefill_leg(request, plan, headers, client)):
                return await self._give_up(request, plan.model, True, self._fatal_answer(request), client)
            return await self._try_on(request, plan, headers, client)
        except asyncio.CancelledError:
            if not self.ending:
                raise
            asyncio.current_task().uncancel()
            return await self._cut(request, client)
        finally:
            client.close()
            self._revoke_failures(request)

    async def _cut(self, request: RouterRequest, client: ClientConnection) -> int:
        """End a request because the router is shutting down. Raises ClientResponseBroken."""
        if not client.begun:
            answer = shutting_down(self._options, self._errors, request.path)
            await client.whole(answer)
            return answer.status
        if not client.takes_events:
            raise ClientResponseBroken(ENDING)
        await client.more(self._errors.event(ENDING, HTTPStatus.SERVICE_UNAVAILABLE, request.path))
        await client.end()
        return HTTPStatus.OK

    async def _run_prefill_leg(self, request: RouterRequest, plan: PlacementPlan, headers: Headers,
                                   client: ClientConnection) -> bool:
        """Have a P compute the prompt, before a D gets the request. Returns whether the request may be what has crashed
        that P and another engine. Raises ClientGone."""
        path, body = request.path, request.body
        leg = request.prefill_leg = await self._prefills.run(request, plan, headers, client,
                                                             self.fatal.is_known_at_prefill(path, body))
        if leg.outcome is PrefillOutcome.PREFILLED:
            self.fatal.prefilled(path, body)
        return leg.outcome is WorkerFailure.BROKEN and await self.fatal.connection_broke(leg.worker, path, body,
                                                                                         at_prefill=True)

    async def _try_on(self, request: RouterRequest, plan: PlacementPlan, headers: Headers,
                      client: ClientConnection) -> int:
        """Try workers, and others for the rest of a stream that breaks. Returns the status that was sent."""
        broken: list[RouterWorker] = []
        while True:
            try:
                return await self._try_all(request, plan, headers, client, broken)
            except StreamBroke as error:
                broke = request.broke = error.with_traceback(None)  # its frames hold the request
            broken.append(broke.worker)
            ending = request.stream.end()
            if ending is not None:
                return await self._end_stream(client, ending)
            if not request.stream.can_go_on or broke.lost and await self._is_fatal(broke.worker, request):
                return await self._end_stream(client, self._broken_event(request, broke))
            path, body = request.stream.next_request()
            request.rest = request.target.replace(request.path.encode(), path.encode(), 1), body
            request.tries, request.resent, request.refusals = [], 0, []
            headers = [one for one in headers if one[0] != b"accept-encoding"]
            plan = await self._placer.plan(request.headers, body, True)

    async def _try_all(self, request: RouterRequest, plan: PlacementPlan, headers: Headers,
                       client: ClientConnection, broken: Sequence[RouterWorker]) -> int:
        """Try one worker after the other, in MAX_TRIES tries at most, and give up where none answers. `broken` get no
        try: the stream that is to go on broke there. Returns the status that was sent. Raises StreamBroke, ClientGone,
        ClientResponseBroken."""
        tried = list(broken)
        last: RouterResponse | None = None
        while len(request.tries) + request.resent < MAX_TRIES:
            placed = self._placer.place(plan, tried)
            if placed is None:
                break
            worker, choice = placed
            if not request.tries and request.broke is None:
                at_prefill_s = request.prefill_leg.took_s if request.prefill_leg is not None else 0.0
                self._metrics.route_s.observe(self._now() - request.began_s - at_prefill_s)
            tried.append(worker)
            try:
                return await self._try(worker, choice, request, plan, headers, client)
            except TryFailed as failure:
                plan.prefilled = False
                request.tries.append({"worker": worker.url, "failed": failure.kind.value})
                if failure.kind is WorkerFailure.ROUTER:
                    return await self._give_up(request, plan.model, True, None, client, short=True)
                last = failure.answer if failure.answer is not None else last
                if failure.kind is WorkerFailure.NOT_LOADED:
                    tried.remove(worker)
                if failure.kind is WorkerFailure.BROKEN and await self._is_fatal(worker, request):
                    last = self._fatal_answer(request)
                    break
                if failure.final:
                    break
        return await self._give_up(request, plan.model, bool(tried), last, client)

    async def _is_fatal(self, worker: RouterWorker, request: RouterRequest) -> bool:
        return request.generates and await self.fatal.connection_broke(worker, request.path, request.body)

    async def _give_up(self, request: RouterRequest, model: str | None, tried: bool, last: RouterResponse | None,
                       client: ClientConnection, short: bool = False) -> int:
        """End a request that no worker has answered, with `last`, a worker's answer that may go to the client, or else
        an error of the router's; a stream that broke before gets an error event. `tried`: whether a worker had it.
        `short`: this router has no connection left. Returns the status that was sent."""
        if request.broke is not None:
            return await self._end_stream(client, self._broken_event(request, request.broke))
        error, retry_after_s = functools.partial(self._errors.response, path=request.path), self._options.retry_after_s
        if short:
            answer = error(HTTPStatus.SERVICE_UNAVAILABLE,
                           "the router has no connection left for this request: try again later", retry_after_s)
            reason = "router"
        elif last is not None:
            answer, reason = last, "worker_refused"
        elif tried and self._workers.any_up(model):
            answer = error(HTTPStatus.BAD_GATEWAY, "no worker could answer this request")
            reason = "tries"
        else:
            answer, reason = self._errors.unplaced(self._workers.any_up(model), retry_after_s, request.path)
        self._metrics.refused.labels(reason).inc()
        extra = [(b"x-vllm-pd-explain", responses.compact({"refused": reason, "tries": request.tries}))]
        await client.whole(RouterResponse(answer.status, answer.body, answer.headers + extra * request.explain))
        return answer.status

    async def _try(self, worker: RouterWorker, choice: Choice, request: RouterRequest, plan: PlacementPlan,
                   headers: Headers, client: ClientConnection) -> int:
        """Try one worker. Returns the status that was sent. Raises TryFailed where it fails before anything was sent to
        the client, ClientGone, ClientResponseBroken."""
        this = _Try(worker, request.prefill_leg is not None and request.prefill_leg.params is not None)
        worker.in_flight.add(this)
        client.watch(this)
        try:
            this.posting = self._begin_posting(request, plan, headers)
            return await self._exchange(this, choice, request, headers, client)
        except TimeoutError:
            raise self._timed_out(this, request) from None
        except TryFailed as failure:
            if this.has_params and failure.kind in _ERRORS:  # perhaps P has died with its blocks
                failure.kind = WorkerFailure.NOT_LOADED
            this.outcome = failure.kind
            self._apply_failure(worker, failure, request)
            raise
        except asyncio.CancelledError:
            if not this.take_interruption():
                this.outcome = TryOutcome.CUT
                raise
            return await self._interrupted(this, request, client)
        except WorkerResponseBroken as broken:
            this.settle()
            return await self._response_broke(this, request, client, broken)
        except _StreamFailed as failed:
            this.settle()
            worker.probe_soon()
            return await self._end_broken(worker, request, client, f"{_LOST}: {failed}")
        finally:
            client.watch(None)
            if this.posting is not None:
                this.posting.end(this.outcome is TryOutcome.ANSWERED)
            if this.reply is not None:
                this.reply.close()
            worker.tries(this.outcome.value).inc()
            self._workers.try_ended(this)

    def _begin_posting(self, request: RouterRequest, plan: PlacementPlan, headers: Headers) -> OpenTry | None:
        return None if self.metaserver is None else self.metaserver.begin(request, plan, headers)

    async def _exchange(self, this: _Try, choice: Choice, request: RouterRequest, headers: Headers,
                        client: ClientConnection) -> int:
        """Send the request to the worker and its answer to the client. Returns the answer's status."""
        async with asyncio.timeout(self._options.timeout_s or None):
            if request.broke is not None and (tokens := request.stream.detokenize_request()) is not None:
                await self._compare(this.worker, request.stream, headers, tokens)
            reply = this.reply = await self._send(this, request, headers)
            this.heard(generated=False)
            fit, whole, first = await self._first(reply, request.generates)
        if this.posting is not None:
            this.posting.answer_begins()
        if request.stream is not None and not (reply.status == HTTPStatus.OK and takes_events(fit)):
            if request.broke is not None:
                raise TryFailed(WorkerFailure.REFUSED, f"{reply.status} in place of the rest of a stream")
            request.stream = None
        generated = request.generates and reply.status == HTTPStatus.OK
        this.heard(generated)
        if request.suspects and generated:
            self._take_out_suspects(request)
        for refuser, seconds in request.refusals:
            refuser.pause(seconds)
        this.begun = True
        out = first
        if request.stream is not None:
            if request.broke is None:
                request.stream.model_len = this.worker.max_model_len
            out = request.stream.receive(first)
        if request.broke is not None:
            self._metrics.of(this.worker.url, self._metrics.continued_streams).inc()
            await client.more(out)
        else:
            self._metrics.first_byte_s.observe(self._now() - request.began_s)
            if request.explain:
                fit += self._explain_headers(choice, request)
            await client.begin(reply.status, fit, out, more=not whole)
        if not whole:
            await self._pass_on(this, reply, first, request, client)
        if generated:
            self.fatal.answered(request.path, request.body)
        this.outcome = TryOutcome.ANSWERED
        return reply.status

    async def _compare(self, worker: RouterWorker, stream: ContinuableStream, headers: Headers, tokens: bytes) -> None:
        """Have the worker say the text of the last tokens of a broken stream. Raises TryFailed where it is not the text
        that is out."""
        reply = await self._worker_client.send(b"POST", worker.url, DETOKENIZE, headers, tokens, fresh=True)
        said = bytearray()
        try:
            while len(said) < MAX_WHOLE_BYTES and (chunk := await reply.chunk()):
                said += chunk
        except WorkerResponseBroken as broken:
            raise TryFailed(WorkerFailure.BROKEN, str(broken)) from broken
        finally:
            reply.close()
        if reply.status != HTTPStatus.OK or not stream.is_out(bytes(said)):
            raise TryFailed(WorkerFailure.REFUSED, f"{DETOKENIZE.decode()}: {reply.status}, another text than that of "
                            "the stream")

    def _timed_out(self, this: _Try, request: RouterRequest) -> TryFailed:
        """The failure of a try whose answer did not begin within `timeout_s`."""
        this.outcome = WorkerFailure.TIMEOUT
        why = f"no answer in {self._options.timeout_s:g} s"
        if this.worker.heard_s > this.began_s:  # the worker works, so the request itself takes so long
            answer = self._errors.response(HTTPStatus.GATEWAY_TIMEOUT, why, path=request.path)
            return TryFailed(WorkerFailure.TIMEOUT, why, answer=answer, final=True)
        failure = TryFailed(WorkerFailure.TIMEOUT, why)
        self._apply_failure(this.worker, failure, request)
        return failure

    async def _interrupted(self, this: _Try, request: RouterRequest, client: ClientConnection) -> int:
        """End an interrupted try. Raises ClientGone, TryFailed, ClientResponseBroken."""
        worker = this.worker
        if this.interruption is Interruption.CLIENT_GONE:
            this.outcome = TryOutcome.CLIENT_GONE
            raise ClientGone from None
        if this.interruption is Interruption.SILENT:
            worker.probe_soon()
            return await self._end_broken(worker, request, client,
                                          f"nothing more came in {self._options.stream_timeout_s:g} s",
                                          HTTPStatus.GATEWAY_TIMEOUT)
        if this.begun:
            return await self._end_broken(worker, request, client, f"{_LOST}: it was taken out")
        this.outcome = WorkerFailure.PROBE
        raise TryFailed(WorkerFailure.PROBE, worker.problem) from None

    async def _response_broke(self, this: _Try, request: RouterRequest, client: ClientConnection,
                              broken: WorkerResponseBroken) -> int:
        """End an answer that broke after its first byte. Raises ClientResponseBroken."""
        worker = this.worker
        if self._workers.another_up(worker):
            worker.fail(WorkerFailure.BROKEN, str(broken))
        else:
            worker.probe_soon()
        lost = request.stream is not None and request.stream.can_go_on
        if not lost:
            self.fatal.stream_broke(worker, request.path, request.body)
        return await self._end_broken(worker, request, client, f"{_LOST}: {broken}", lost=lost)

    async def _send(self, this: _Try, request: RouterRequest, headers: Headers) -> WorkerResponse:
        """Send the request and wait for the head of the answer. If the worker had closed an idle connection, that is no
        failure of the worker, but it counts as a try, because the request may have arrived; it is sent again on a new
        connection. The last try takes a new connection anyway. P's parameters go with the first try only. Raises
        TryFailed."""
        with_params = request.prefill_leg.take_body() if request.prefill_leg is not None else None
        target, body = request.rest or (request.target, request.body)
        worker = this.worker
        if this.posting is not None:
            headers, body = this.posting.headers, this.posting.body
        if len(request.tries) + request.resent < MAX_TRIES - 1:
            try:
                return await self._worker_client.send(request.method, worker.url, target, headers, with_params or body)
            except TryFailed as failure:
                if not failure.stale:
                    raise
            request.resent += 1
            worker.tries(TryOutcome.STALE.value).inc()
            return await self._worker_client.send_again(request.method, worker.url, target, headers, body)
        return await self._worker_client.send(request.method, worker.url, target, headers, body, fresh=True)

    async def _first(self, reply: WorkerResponse, generates: bool) -> tuple[Headers, bool, bytes]:
        """(headers for the client, whether the bytes are the whole body, the first bytes of the body). Raises TryFailed
        for an answer that must not go to the client."""
        headers = responses.response_headers(reply.headers)
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR or reply.status in responses.BUSY:
            await self._fail_refused(reply, headers)
        if reply.status == HTTPStatus.NOT_FOUND and generates:
            await self._fail_refused(reply, headers)
        streams = is_stream(headers)
        length = responses.find(headers, b"content-length")
        whole = not streams and length is not None and int(length) <= MAX_WHOLE_BYTES
        try:
            first = await (self._read_whole(reply, int(length)) if whole else reply.chunk())
        except WorkerResponseBroken as broken:
            raise TryFailed(WorkerFailure.BROKEN, str(broken)) from broken
        if not first and reply.status == HTTPStatus.OK and generates:
            raise TryFailed(WorkerFailure.EMPTY, "200 with an empty body")
        if streams and _ERROR_EVENT.match(first) and not _CLIENT_ERROR.search(first):
            raise TryFailed(WorkerFailure.of_error(first), first[:200].decode(errors="replace"),
                            answer=RouterResponse(HTTPStatus.OK, first, headers))
        return headers, whole, first

    async def _pass_on(self, this: _Try, reply: WorkerResponse, first: bytes, request: RouterRequest,
                       client: ClientConnection) -> None:
        """Send the client the rest of an answer, of which it has `first`, as it comes. Raises WorkerResponseBroken
        where the worker ends it too early, and _StreamFailed where it sends an error in place of the rest."""
        generated = request.generates and reply.status == HTTPStatus.OK
        needs_done = generated and request.path in COMPLETING and client.takes_events and not reply.framed
        tail = first[-_TAIL_BYTES:]
        stream = request.stream
        with _SilenceTimer(this, self._options.stream_timeout_s) as silence:
            while True:
                if stream is not None and stream.error is not None:
                    raise _StreamFailed(stream.error)
                if not (chunk := await reply.chunk()):
                    break
                this.heard(generated)
                if needs_done:
                    tail = (tail + chunk)[-_TAIL_BYTES:]
                out = chunk if stream is None else stream.receive(chunk)
                if out:
                    silence.writing = True
                    await client.more(out)
                    silence.writing = False
        if needs_done and not _DONE.search(tail):
            raise WorkerResponseBroken("the stream ended before its last event")
        if stream is not None:
            await client.more(stream.rest())
            if stream.error is not None:
                raise _StreamFailed(stream.error)
        await client.end()

    @staticmethod
    async def _read_whole(reply: WorkerResponse, length: int) -> bytes:
        parts = bytearray()
        while chunk := await reply.chunk():
            parts += chunk
        if len(parts) != length:
            raise WorkerResponseBroken(f"{len(parts)} of {length} bytes")
        return bytes(parts)

    async def _fail_refused(self, reply: WorkerResponse, headers: Headers) -> None:
        """Raises TryFailed for an answer with which the worker refuses the request. The error keeps the answer, for the
        client, in case no other worker takes the request."""
        body = bytearray()
        with suppress(WorkerResponseBroken):
            while len(body) < MAX_WHOLE_BYTES and (chunk := await reply.chunk()):
                body += chunk
        kept = [(name, value) for name, value in headers if name != b"content-length"]
        busy = reply.status in responses.BUSY
        if busy and responses.find(kept, b"retry-after") is None:
            kept.append((b"retry-after", str(max(1, round(self._options.retry_after_s))).encode()))
        answer = RouterResponse(reply.status, bytes(body), kept) if body else None
        kind = (WorkerFailure.BUSY if busy else WorkerFailure.NO_MODEL if reply.status == HTTPStatus.NOT_FOUND
                else WorkerFailure.of_error(body))
        raise TryFailed(kind, f"{reply.status} {bytes(body[:200]).decode(errors='replace')}", answer=answer)

    def _apply_failure(self, worker: RouterWorker, failure: TryFailed, request: RouterRequest) -> None:
        """Do what a failed try means for the worker: take it out, pause it, or ask for its models."""
        if failure.kind in _NO_FAULT:
            return
        if failure.kind is WorkerFailure.BUSY:
            headers = failure.answer.headers if failure.answer is not None else []
            request.refusals.append((worker, responses.retry_after_s(headers, self._options.retry_after_s)))
        elif failure.kind is WorkerFailure.NO_MODEL:
            worker.ask_models_soon()
        elif failure.kind is WorkerFailure.SERVER_ERROR:
            self._suspect(worker, str(failure), request)
        else:
            worker.fail(failure.kind, str(failure))

    def _suspect(self, worker: RouterWorker, detail: str, request: RouterRequest) -> None:
        """The worker answered 500. It is the worker's fault if another one can answer the request, and the request's if
        no other can. Until that is known the first such worker is out, if another one is up, and all are probed. Where
        the answer takes no step of the engine, a 500 says nothing about the engine."""
        if not request.generates:
            return
        failure = None
        if request.suspects:
            self._revoke_failures(request)
            worker.probe_soon()
        elif self._workers.another_up(worker):
            failure = worker.fail(WorkerFailure.SERVER_ERROR, detail)
        else:
            worker.probe_soon()
        request.suspects.append(Suspect(worker, failure, detail))

    @staticmethod
    def _revoke_failures(request: RouterRequest) -> None:
        """No worker could answer the request: those taken out for it are up again."""
        for suspect in request.suspects:
            if suspect.failure is not None:
                suspect.worker.revoke_failure(suspect.failure)
                suspect.failure = None

    @staticmethod
    def _take_out_suspects(request: RouterRequest) -> None:
        """Another worker could answer the request: those that answered 500 are out."""
        for suspect in request.suspects:
            if suspect.failure is None and not suspect.worker.leaving:
                suspect.worker.fail(WorkerFailure.SERVER_ERROR, suspect.detail)
        request.suspects.clear()

    async def _end_broken(self, worker: RouterWorker, request: RouterRequest, client: ClientConnection, why: str,
                          status: HTTPStatus = HTTPStatus.BAD_GATEWAY, lost: bool = False) -> int:
        """End an incomplete answer with an error event. Returns the answer's status. Raises StreamBroke where it may
        go on instead, ClientResponseBroken where the answer is no stream that may get such an event."""
        self._metrics.of(worker.url, self._metrics.broken_streams).inc()
        if not client.takes_events:
            raise ClientResponseBroken(why)
        broke = StreamBroke(worker, why, status, lost)
        if request.stream is not None:
            raise broke
        return await self._end_stream(client, self._broken_event(request, broke))

    def _broken_event(self, request: RouterRequest, broke: StreamBroke) -> bytes:
        return self._errors.event(str(broke), broke.status, request.path)

    def _fatal_answer(self, request: RouterRequest) -> RouterResponse:
        return self._errors.response(HTTPStatus.BAD_GATEWAY, _FATAL, path=request.path)

    @staticmethod
    async def _end_stream(client: ClientConnection, last: bytes) -> int:
        await client.more(last)
        await client.end()
        return HTTPStatus.OK

    @staticmethod
    def _explain_headers(choice: Choice, request: RouterRequest) -> Headers:
        text = choice.header() + "".join(f"; tried {one['worker']}: {one['failed']}" for one in request.tries)
        text += request.prefill_leg.explained() if request.prefill_leg is not None else ""
        return [(b"x-vllm-pd-worker", choice.worker.encode()), (b"x-vllm-pd-explain", text.encode("ascii", "replace"))]


class _SilenceTimer:
    """Interrupts a try when its worker sends nothing for `limit_s` seconds; 0 means never. While `writing` is true the
    router waits for the client, which does not count. One timer serves a whole answer."""

    def __init__(self, watched: InFlightTry, limit_s: float) -> None:
        self.writing = False
        self._watched = watched
        self._limit_s = limit_s
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "_SilenceTimer":
        if self._limit_s:
            self._check_in(self._limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        now_s = self._watched.worker.now()
        if self.writing:
            self._since_s = now_s
        left_s = max(self._since_s, self._watched.heard_s) + self._limit_s - now_s
        if left_s > 0:
            self._check_in(left_s)
        else:
            self._watched.interrupt(Interruption.SILENT)


def shutting_down(options: RouterOptions, errors: RouterErrors, path: str) -> RouterResponse:
    """The answer to a request that the router can't serve any more because it is shutting down."""
    return errors.response(HTTPStatus.SERVICE_UNAVAILABLE, ENDING, options.retry_after_s, path)
