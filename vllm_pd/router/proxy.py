# SPDX-License-Identifier: Apache-2.0
"""One request's way: to a worker, to another one where that fails, and the answer back as it comes.

Nothing goes to the client before the first byte of a body is there, so up to then a request can be tried elsewhere: at
once, on at most three workers in all. An answer that says how long it is, is awaited whole, if it is not too long.
After the first byte nothing is tried again: a stream that breaks is ended by an event that is an error, and anything
else by the end of the connection. An answer is complete where its framing ends (the last chunk, the length); only where
it has none, and the end of the connection is all that shows, a stream of completions has to end with `[DONE]`, unless
it is compressed.
"""
import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Any

from vllm_pd.router import responses
from vllm_pd.router.fatal_requests import FatalRequests
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import MAX_TRIES, RouterOptions
from vllm_pd.router.placing import PlacementPlan, Placer
from vllm_pd.router.policy import Choice
from vllm_pd.router.responses import Headers, RouterResponse
from vllm_pd.router.worker_client import TryFailed, WorkerClient, WorkerResponse, WorkerResponseBroken
from vllm_pd.router.workers import InFlightTry, Interruption, RouterWorker, WorkerFailure, Workers

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

COMPLETING = frozenset(("/v1/completions", "/v1/chat/completions"))
GENERATING = COMPLETING | {
    "/v1/embeddings", "/v1/responses", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
    "/v2/rerank"}
MAX_WHOLE_BYTES = 1 << 20
MAX_PAUSE_S = 60.0  # that a worker's Retry-After is believed for
EVENT_STREAM = b"text/event-stream"
_ENDED = re.compile(rb"data: ?\[DONE\]")
_TAIL_BYTES = 256
ENDING = "the router ends"
_LOST = "the worker was lost after the answer had begun"
_FIXED = (b"content-length", b"content-encoding")
_ERROR_FIRST = re.compile(rb'data: \{\s*"(?:error"|object":\s*"error")')
_CLIENTS_FAULT = re.compile(rb'"code":\s*4\d\d\b')
_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_FATAL = "engines were lost over this request, so that it is sent to no other"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class ClientResponseBroken(Exception):
    """The answer can't be completed, and nothing more can be said: the connection is to be dropped."""


class TryOutcome(Enum):
    """How a try ended; the label of its counter. The failures have those of `WorkerFailure`."""
    ANSWERED = "answered"
    STALE = "stale"
    BROKEN_LATER = "broken_later"
    CLIENT_GONE = "client_gone"
    CUT = "cut"  # the router ends


@dataclass
class RouterRequest:
    """A whole request. `target` is path and query as they came; `generates`: its answer takes an engine's step."""
    method: bytes
    path: str
    target: bytes
    headers: Headers
    body: bytes
    began_s: float
    generates: bool
    explain: bool = False
    tries: list[dict[str, str]] = field(default_factory=list)
    resent: int = 0  # tries that a connection that had been closed has cost
    suspects: "list[_Suspect]" = field(default_factory=list)
    refusals: list[tuple[RouterWorker, float]] = field(default_factory=list)  # who refused it, for how many seconds


@dataclass
class _Suspect:
    """A worker that has answered a request with 500; `failure` is what it has been taken out by, None where not."""
    worker: RouterWorker
    failure: int | None
    detail: str


class RouterProxy:
    """Belongs to the router's event loop."""

    def __init__(self, options: RouterOptions, workers: Workers, placer: Placer, upstream: WorkerClient,
                 metrics: RouterMetrics) -> None:
        self._options = options
        self._workers = workers
        self._placer = placer
        self._upstream = upstream
        self._metrics = metrics
        self._authorization = (None if options.worker_api_key is None
                               else f"Bearer {options.worker_api_key}".encode())
        self._fatal = FatalRequests()
        self._now = asyncio.get_running_loop().time
        self.ending = False  # whether a cancelled request is to tell its client why

    async def forward(self, request: RouterRequest, receive: Receive, send: Send) -> int:
        """Have it answered. Returns the status that went out. Raises ClientGone, or ClientResponseBroken."""
        if request.generates and self._fatal.is_known(request.path, request.body):
            self._metrics.refused.labels("fatal").inc()
            await respond(send, responses.error_response(HTTPStatus.BAD_GATEWAY, _FATAL))
            return HTTPStatus.BAD_GATEWAY
        headers = responses.request_headers(request.headers, self._authorization)
        line = _ClientConnection(receive, send)
        try:
            plan = await self._placer.plan(request.headers, request.body, request.path in COMPLETING)
            return await self._try_all(request, plan, headers, line)
        except asyncio.CancelledError:
            if not self.ending:
                raise
            asyncio.current_task().uncancel()
            return await self._cut(line)
        finally:
            line.close()
            self._acquit(request)

    async def _cut(self, line: "_ClientConnection") -> int:
        """The router ends. Raises ClientResponseBroken."""
        if not line.begun:
            answer = ended(self._options)
            await line.whole(answer)
            return answer.status
        if not line.takes_events:
            raise ClientResponseBroken(ENDING)
        await line.more(responses.error_event(ENDING, HTTPStatus.SERVICE_UNAVAILABLE))
        await line.end()
        return HTTPStatus.OK

    async def _try_all(self, request: RouterRequest, plan: PlacementPlan, headers: Headers,
                       line: "_ClientConnection") -> int:
        tried: list[RouterWorker] = []
        last: RouterResponse | None = None
        while len(tried) + request.resent < MAX_TRIES:
            placed = self._placer.place(plan, tried)
            if placed is None:
                break
            worker, choice = placed
            if not tried:
                self._metrics.route_s.observe(self._now() - request.began_s)
            tried.append(worker)
            try:
                return await self._try(worker, choice, request, headers, line)
            except TryFailed as failure:
                request.tries.append({"worker": worker.url, "failed": failure.kind.value})
                if failure.kind is WorkerFailure.ROUTER:
                    return await self._give_up(request, plan.model, True, None, line, short=True)
                last = failure.answer if failure.answer is not None else last
                if failure.kind is WorkerFailure.BROKEN and await self._is_fatal(worker, request):
                    last = responses.error_response(HTTPStatus.BAD_GATEWAY, _FATAL)
                    break
                if failure.final:
                    break
        return await self._give_up(request, plan.model, bool(tried), last, line)

    async def _is_fatal(self, worker: RouterWorker, request: RouterRequest) -> bool:
        return request.generates and await self._fatal.broke(worker, request.path, request.body)

    async def _give_up(self, request: RouterRequest, model: str | None, tried: bool, last: RouterResponse | None,
                       line: "_ClientConnection", short: bool = False) -> int:
        if short:
            answer = responses.error_response(
                HTTPStatus.SERVICE_UNAVAILABLE, "the router has no connection left for this request: try again later",
                self._options.retry_after_s)
            reason = "router"
        elif last is not None:
            answer, reason = last, "worker_refused"
        elif tried and self._workers.any_up(model):
            answer = responses.error_response(HTTPStatus.BAD_GATEWAY, "no worker could answer this request")
            reason = "tries"
        elif self._workers.any_up(model):
            answer = responses.error_response(HTTPStatus.TOO_MANY_REQUESTS, "all workers are full: try again later",
                                     self._options.retry_after_s)
            reason = "full"
        else:
            answer = responses.error_response(HTTPStatus.SERVICE_UNAVAILABLE, "no worker is up: try again later",
                                     self._options.retry_after_s)
            reason = "none_up"
        self._metrics.refused.labels(reason).inc()
        extra = [(b"x-vllm-pd-explain", responses.compact({"refused": reason, "tries": request.tries}))]
        await line.whole(RouterResponse(answer.status, answer.body, answer.headers + extra * request.explain))
        return answer.status

    async def _try(self, worker: RouterWorker, choice: Choice, request: RouterRequest, headers: Headers,
                   line: "_ClientConnection") -> int:
        """At this worker. Raises TryFailed as long as nothing has gone to the client."""
        flight = InFlightTry(worker)
        worker.flights.add(flight)
        line.watch(flight)
        reply: WorkerResponse | None = None
        end: TryOutcome | WorkerFailure = TryOutcome.BROKEN_LATER
        try:
            async with asyncio.timeout(self._options.timeout_s or None):
                reply = await self._open(worker, request, headers)
                flight.heard(generated=False)
                fit, whole, first = await self._first(reply, request.generates)
            generated = request.generates and reply.status == HTTPStatus.OK
            flight.heard(generated)
            if request.suspects and generated:
                self._convict(request)
            for refuser, seconds in request.refusals:
                refuser.busy(seconds)
            self._metrics.first_byte_s.observe(self._now() - request.began_s)
            if request.explain:
                fit += self._explained(choice, request)
            await line.begin(reply.status, fit, first, more=not whole)
            if not whole:
                await self._pass_on(flight, reply, first, request, line)
            if generated:
                self._fatal.answered(request.path, request.body)
            end = TryOutcome.ANSWERED
            return reply.status
        except TimeoutError:
            end = WorkerFailure.TIMEOUT
            why = f"no answer in {self._options.timeout_s:g} s"
            if worker.heard_s > flight.began_s:  # it is this request that takes so long, there or elsewhere
                raise TryFailed(WorkerFailure.TIMEOUT, why, final=True, answer=responses.error_response(
                    HTTPStatus.GATEWAY_TIMEOUT, why)) from None
            failure = TryFailed(WorkerFailure.TIMEOUT, why)
            self._note(worker, failure, request)
            raise failure from None
        except TryFailed as failure:
            end = failure.kind
            self._note(worker, failure, request)
            raise
        except asyncio.CancelledError:
            if not flight.landed():
                end = TryOutcome.CUT
                raise
            if flight.interruption is Interruption.CLIENT_GONE:
                end = TryOutcome.CLIENT_GONE
                raise ClientGone from None
            if flight.interruption is Interruption.SILENT:
                worker.doubt()
                await self._break_off(worker, line, f"nothing more came in {self._options.stream_timeout_s:g} s",
                                      HTTPStatus.GATEWAY_TIMEOUT)
                return HTTPStatus.OK
            if line.begun:
                await self._break_off(worker, line, f"{_LOST}: it was taken out")
                return HTTPStatus.OK
            end = WorkerFailure.PROBE
            raise TryFailed(WorkerFailure.PROBE, worker.problem) from None
        except WorkerResponseBroken as broken:
            if self._workers.another_up(worker):
                worker.fail(WorkerFailure.BROKEN, str(broken))
            else:
                worker.doubt()
            self._fatal.broke_later(worker, request.path, request.body)
            await self._break_off(worker, line, f"{_LOST}: {broken}")
            return HTTPStatus.OK
        finally:
            line.watch(None)
            if reply is not None:
                reply.close()
            worker.tries(end.value).inc()
            self._workers.landed(flight)  # with the last one a worker that leaves is forgotten

    async def _open(self, worker: RouterWorker, request: RouterRequest, headers: Headers) -> WorkerResponse:
        """The head of an answer. A connection that was closed while nobody used it is no fault of the worker's, but it
        is a try: the request may have got there. The last try takes a new one."""
        if len(request.tries) + request.resent < MAX_TRIES - 1:
            try:
                return await self._upstream.send(request.method, worker.url, request.target, headers, request.body)
            except TryFailed as failure:
                if not failure.stale:
                    raise
            request.resent += 1
            worker.tries(TryOutcome.STALE.value).inc()
        return await self._upstream.send(request.method, worker.url, request.target, headers, request.body, fresh=True)

    async def _first(self, reply: WorkerResponse, generates: bool) -> tuple[Headers, bool, bytes]:
        """(headers, whether this is all of it, the first bytes) of an answer that may go to the client. Raises
        TryFailed for one that may not."""
        headers = responses.response_headers(reply.headers)
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR or reply.status in _BUSY:
            await self._refused(reply, headers)
        if reply.status == HTTPStatus.NOT_FOUND and generates:
            await self._refused(reply, headers)
        streams = is_stream(headers)
        length = responses.find(headers, b"content-length")
        whole = not streams and length is not None and int(length) <= MAX_WHOLE_BYTES
        try:
            first = await (self._whole(reply, int(length)) if whole else reply.chunk())
        except WorkerResponseBroken as broken:
            raise TryFailed(WorkerFailure.BROKEN, str(broken)) from broken
        if not first and reply.status == HTTPStatus.OK and generates:
            raise TryFailed(WorkerFailure.EMPTY, "200 with an empty body")
        if streams and _ERROR_FIRST.match(first) and not _CLIENTS_FAULT.search(first):
            raise TryFailed(WorkerFailure.SERVER_ERROR, first[:200].decode(errors="replace"),
                            answer=RouterResponse(HTTPStatus.OK, first, headers))
        return headers, whole, first

    async def _pass_on(self, flight: InFlightTry, reply: WorkerResponse, first: bytes, request: RouterRequest,
                       line: "_ClientConnection") -> None:
        generated = request.generates and reply.status == HTTPStatus.OK
        needs_done = generated and request.path in COMPLETING and line.takes_events and not reply.framed
        tail = first[-_TAIL_BYTES:]
        with _SilenceTimer(flight, self._options.stream_timeout_s) as silence:
            while chunk := await reply.chunk():
                flight.heard(generated)
                if needs_done:
                    tail = (tail + chunk)[-_TAIL_BYTES:]
                silence.writing = True
                await line.more(chunk)
                silence.writing = False
        if needs_done and not _ENDED.search(tail):
            raise WorkerResponseBroken("the stream ended before its last event")
        await line.end()

    @staticmethod
    async def _whole(reply: WorkerResponse, length: int) -> bytes:
        parts = bytearray()
        while chunk := await reply.chunk():
            parts += chunk
        if len(parts) != length:
            raise WorkerResponseBroken(f"{len(parts)} of {length} bytes")
        return bytes(parts)

    async def _refused(self, reply: WorkerResponse, headers: Headers) -> None:
        """An answer that says that the worker can't, or hasn't that model; kept in case that nobody can."""
        body = bytearray()
        with suppress(WorkerResponseBroken):
            while len(body) < MAX_WHOLE_BYTES and (chunk := await reply.chunk()):
                body += chunk
        kept = [(name, value) for name, value in headers if name != b"content-length"]
        busy = reply.status in _BUSY
        if busy and responses.find(kept, b"retry-after") is None:
            kept.append((b"retry-after", str(max(1, round(self._options.retry_after_s))).encode()))
        answer = RouterResponse(reply.status, bytes(body), kept) if body else None
        kind = (WorkerFailure.BUSY if busy else WorkerFailure.NO_MODEL if reply.status == HTTPStatus.NOT_FOUND
                else WorkerFailure.SERVER_ERROR)
        raise TryFailed(kind, f"{reply.status} {bytes(body[:200]).decode(errors='replace')}", answer=answer)

    def _note(self, worker: RouterWorker, failure: TryFailed, request: RouterRequest) -> None:
        """What a failed try says about the worker."""
        if failure.kind is WorkerFailure.ROUTER:
            return
        if failure.kind is WorkerFailure.BUSY:
            after = responses.find(failure.answer.headers, b"retry-after") if failure.answer is not None else None
            seconds = float(after) if after is not None and after.isdigit() else self._options.retry_after_s
            request.refusals.append((worker, min(seconds, MAX_PAUSE_S)))
        elif failure.kind is WorkerFailure.NO_MODEL:
            worker.lacks_model()
        elif failure.kind is WorkerFailure.SERVER_ERROR:
            self._suspect(worker, str(failure), request)
        else:
            worker.fail(failure.kind, str(failure))

    def _suspect(self, worker: RouterWorker, detail: str, request: RouterRequest) -> None:
        """A 500 is the worker's fault where another one can answer, and the request's where no other can either. The
        first is out meanwhile, if there are others; all are probed. Without a step of the engine it says nothing."""
        if not request.generates:
            return
        failure = None
        if request.suspects:
            self._acquit(request)
            worker.doubt()
        elif self._workers.another_up(worker):
            failure = worker.fail(WorkerFailure.SERVER_ERROR, detail)
        else:
            worker.doubt()
        request.suspects.append(_Suspect(worker, failure, detail))

    @staticmethod
    def _acquit(request: RouterRequest) -> None:
        for suspect in request.suspects:
            if suspect.failure is not None:
                suspect.worker.acquit(suspect.failure)
                suspect.failure = None

    @staticmethod
    def _convict(request: RouterRequest) -> None:
        for suspect in request.suspects:
            if suspect.failure is None and not suspect.worker.leaving:
                suspect.worker.fail(WorkerFailure.SERVER_ERROR, suspect.detail)
        request.suspects.clear()

    async def _break_off(self, worker: RouterWorker, line: "_ClientConnection", why: str,
                         status: HTTPStatus = HTTPStatus.BAD_GATEWAY) -> None:
        self._metrics.of(worker.url, self._metrics.broken_streams).inc()
        if not line.takes_events:
            raise ClientResponseBroken(why)
        await line.more(responses.error_event(why, status))
        await line.end()

    @staticmethod
    def _explained(choice: Choice, request: RouterRequest) -> Headers:
        text = choice.header() + "".join(f"; tried {one['worker']}: {one['failed']}" for one in request.tries)
        return [(b"x-vllm-pd-worker", choice.worker.encode()), (b"x-vllm-pd-explain", text.encode("ascii", "replace"))]


class _SilenceTimer:
    """Interrupts a flight to which its worker sends nothing for `limit_s`; 0: never. Time in which the client does not
    take what there is, `writing`, does not count. One timer for all of an answer."""

    def __init__(self, flight: InFlightTry, limit_s: float) -> None:
        self.writing = False
        self._flight = flight
        self._limit_s = limit_s
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "_SilenceTimer":
        if self._limit_s:
            self._look_in(self._limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        now_s = self._flight.worker.now()
        if self.writing:
            self._since_s = now_s
        left_s = max(self._since_s, self._flight.heard_s) + self._limit_s - now_s
        if left_s > 0:
            self._look_in(left_s)
        else:
            self._flight.interrupt(Interruption.SILENT)


class _ClientConnection:
    """The client's side of one request: what goes out, and whether it is still there."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.begun = False
        self.takes_events = False  # of ours, beside those of the answer
        self._receive = receive
        self._send = send
        self._flight: InFlightTry | None = None
        self._gone = False
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def watch(self, flight: InFlightTry | None) -> None:
        """Interrupt this one when the client goes."""
        self._flight = flight
        if self._gone and flight is not None:
            flight.interrupt(Interruption.CLIENT_GONE)

    async def begin(self, status: int, headers: Headers, first: bytes, more: bool) -> None:
        self.begun = True
        self.takes_events = is_stream(headers) and not any(name in _FIXED for name, _ in headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": first, "more_body": more})

    async def more(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, answer: RouterResponse) -> None:
        await respond(self._send, answer)

    def close(self) -> None:
        self._watcher.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._flight is not None:
            self._flight.interrupt(Interruption.CLIENT_GONE)


def ended(options: RouterOptions) -> RouterResponse:
    """What a request gets for which there is no time any more."""
    return responses.error_response(HTTPStatus.SERVICE_UNAVAILABLE, ENDING, options.retry_after_s)


def is_stream(headers: Headers) -> bool:
    """Whether these are of a stream of events."""
    return (responses.find(headers, b"content-type") or b"").startswith(EVENT_STREAM)


async def respond(send: Send, answer: RouterResponse) -> None:
    """Send a whole answer."""
    await send({"type": "http.response.start", "status": int(answer.status),
                "headers": [*answer.headers, (b"content-length", str(len(answer.body)).encode())]})
    await send({"type": "http.response.body", "body": answer.body})
