# SPDX-License-Identifier: Apache-2.0
"""The router as an ASGI application: its own routes, and the checks on requests that it forwards to workers."""
import asyncio
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec

from vllm_pd.errors import ConfigError
from vllm_pd.frontend.access import has_key, objection, reading_objection
from vllm_pd.router import descriptors, responses
from vllm_pd.router.bodies import BodyBudget, BodyRefused, HeldBody
from vllm_pd.router.client_connection import ClientGone, ClientResponseBroken, Receive, Send, respond
from vllm_pd.router.errors import RouterErrors
from vllm_pd.router.judgement import Judgement
from vllm_pd.router.metaserver import POST_BODY_S
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import METASERVER_PATH, RouterOptions
from vllm_pd.router.overview import FleetOverview
from vllm_pd.router.page import PAGE
from vllm_pd.router.policy import RoutingPolicyConfig
from vllm_pd.router.proxy import ENDING, RouterProxy, RouterRequest, shutting_down
from vllm_pd.router.responses import Headers, RouterResponse
from vllm_pd.router.routes import FORWARDED, METHODS, generates
from vllm_pd.router.worker_client import WorkerClient
from vllm_pd.router.workers import RouterWorker

MAX_OWN_BODY_BYTES = 65536
MAX_OPTIONS_BODY_BYTES = 4096  # OPTIONS needs no key


class _WorkerBody(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class RouterApp:
    """The whole router. Everything, `start` and `close` included, runs in the event loop that serves it."""

    def __init__(self, options: RouterOptions, policy: RoutingPolicyConfig) -> None:
        self.options = options.checked()
        self.metrics = RouterMetrics()
        self._judgement = Judgement(self.options, policy, self.metrics)
        self.workers, self._discovery = self._judgement.workers, self._judgement.discovery
        self.errors = RouterErrors(self.workers)
        self.max_clients = min(self.options.max_connections, descriptors.for_clients(self.options.broker is not None))
        self._bodies = BodyBudget(self.options.max_body_bytes, self.options.max_bodies_bytes)
        self.metrics.body_bytes.set_function(lambda: self._bodies.held_bytes)
        self._via = b"1.1 vllm-pd-" + secrets.token_hex(6).encode()  # in the header Via of all that goes to workers
        self._running = False
        self._unready = False
        self._cut = False
        self._open: set[asyncio.Task] = set()  # of requests for workers

    async def start(self) -> None:
        """Begin to follow the registry, to probe the workers and to read their events."""
        options, judgement = self.options, self._judgement
        judgement.begin(self._via)
        self.placer, self.subscriptions, self.probes = judgement.placer, judgement.subscriptions, judgement.probes
        self._membership = judgement.membership
        self.worker_client = WorkerClient(options.connect_timeout_s, judgement.tls, self.max_clients)
        self.proxy = RouterProxy(options, self.workers, self.placer, self.worker_client, self.metrics,
                                 self.errors, self._via)
        key = options.key_for_workers
        self._overview = FleetOverview(self.workers, judgement.session,
                                       {} if key is None else {"Authorization": f"Bearer {key}"},
                                       lambda: self._membership.members, self.subscriptions.load_of, self._about)
        self.workers.on_end.append(self._close_connections)
        judgement.start()
        self._running = True

    async def close(self) -> None:
        """Stop everything that `start` began."""
        if not self._running:
            return
        self._running = False
        await self._overview.close()
        await self._judgement.close()
        self.worker_client.close()

    def unready(self) -> None:
        """From now on `/health` answers 503. Requests are still served."""
        self._unready = True

    def cut(self) -> None:
        """End every open request: a stream with an error event, a request whose answer has not begun with 503."""
        self._cut = True
        self.proxy.ending = True
        for task in list(self._open):
            task.cancel()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """The server starts and ends us."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.start()
                except Exception as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    raise
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _serve(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One HTTP request, counted with its path and status. All paths that are not ours have one label, because
        clients could make any number of them. A client that has gone is counted by itself."""
        path = scope["path"]
        if path in FORWARDED:
            label, handle = path, self._forward
        else:
            label, handle = (path, self._own) if path in _OWN_ROUTES else ("other", self._own)
        try:
            status = await handle(scope, receive, send)
        except ClientGone:
            self.metrics.clients_gone.inc()
            return
        self.metrics.requests.labels(label, str(int(status))).inc()

    # Requests for workers.

    async def _forward(self, scope: dict[str, Any], receive: Receive, send: Send) -> int:
        """Check a request for a worker, read its body within the budget of such bodies, and send it on. Returns the
        status of the answer. Raises ClientGone. `cut` has it answered with 503 while its body is read."""
        headers = scope["headers"]
        if scope["method"] not in METHODS:
            return await _respond(send, self.errors.response(
                HTTPStatus.METHOD_NOT_ALLOWED, f"use one of {', '.join(METHODS)}", path=scope["path"]))
        if scope["method"] != "OPTIONS" and not self._has_key(headers):
            return await _respond(send, RouterResponse.of_json({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED))
        task = asyncio.current_task()
        self._open.add(task)
        try:
            with self._budget_of(scope["method"]).hold() as held:
                try:
                    body = await _read_body(receive, headers, held)
                except BodyRefused as refused:
                    retry_after_s = None if refused.final else self.options.retry_after_s
                    return await _respond(send, self.errors.response(refused.status, str(refused), retry_after_s,
                                                                     scope["path"]))
                except asyncio.CancelledError:
                    if not self._cut:
                        raise
                    task.uncancel()
                    return await _respond(send, shutting_down(self.options, self.errors, scope["path"]))
                return await self._send_on(scope, body, receive, send)
        finally:
            self._open.discard(task)

    def _budget_of(self, method: str) -> BodyBudget:
        """The budget for a body. OPTIONS needs no key, so it must not use up the budget of requests that do."""
        return BodyBudget(MAX_OPTIONS_BODY_BYTES, MAX_OPTIONS_BODY_BYTES) if method == "OPTIONS" else self._bodies

    async def _send_on(self, scope: dict[str, Any], body: bytes, receive: Receive, send: Send) -> int:
        path, headers, query = scope["path"], scope["headers"], scope["query_string"]
        target = path.encode() + (b"?" + query if query else b"")
        request = RouterRequest(scope["method"].encode(), path, target, headers, body,
                                asyncio.get_running_loop().time(), generates(scope["method"], path),
                                explain=_wants_explanation(headers))
        try:
            return await self.proxy.forward(request, receive, send)
        except ClientResponseBroken as error:
            self.metrics.requests.labels(path, "broken").inc()
            raise ConnectionAbortedError(f"the worker was lost in the middle of an answer: {error}") from error

    # Requests for the router.

    async def _own(self, scope: dict[str, Any], receive: Receive, send: Send) -> int:
        route = _OWN_ROUTES.get(scope["path"])
        if route is None:
            return await _respond(send, self.errors.response(HTTPStatus.NOT_FOUND,
                                                         f"the router has no {scope['path']}"))
        methods, handle = route
        if scope["method"] not in methods:
            return await _respond(send, self.errors.response(HTTPStatus.METHOD_NOT_ALLOWED,
                                                         f"use {' or '.join(methods)}"))
        return await _respond(send, await handle(self, scope, receive))

    async def _health(self, scope: dict[str, Any], receive: Receive) -> RouterResponse:
        counts = self.workers.counts()
        if self._unready:
            return self.errors.response(HTTPStatus.SERVICE_UNAVAILABLE, ENDING, self.options.retry_after_s)
        if self.workers.any_up():
            return RouterResponse.of_json({"status": "ok", "workers": counts})
        answer = self.errors.response(HTTPStatus.SERVICE_UNAVAILABLE, f"no worker is up: {counts}",
                                 self.options.retry_after_s)
        return answer

    async def _load(self, scope: dict[str, Any], receive: Receive) -> RouterResponse:
        return RouterResponse.of_json({"server_load": len(self._open)})

    async def _metrics_page(self, scope: dict[str, Any], receive: Receive) -> RouterResponse:
        return RouterResponse(200, self.metrics.page(),
                              [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")])

    async def _workers(self, scope: dict[str, Any], receive: Receive) -> RouterResponse:
        """GET, POST and DELETE of /workers: list them, add one, take one out."""
        refused = self._refused(scope)
        if refused is not None:
            return refused
        if scope["method"] == "GET":
            return RouterResponse.of_json({"workers": self._judgement.workers_json(), **self._about()})
        try:
            with BodyBudget(MAX_OWN_BODY_BYTES, MAX_OWN_BODY_BYTES).hold() as held:
                body = await _read_body(receive, scope["headers"], held)
        except BodyRefused as refused:
            return self.errors.response(refused.status, str(refused))
        try:
            url = msgspec.json.decode(body, type=_WorkerBody).url
            if scope["method"] == "DELETE":
                self._discovery.dismiss(url)
                known = self._membership.remove(url)
                return (RouterResponse.of_json({"removed": url}) if known else
                        self.errors.response(HTTPStatus.NOT_FOUND, f"there is no worker {url}"))
            worker = self._membership.add(url)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return self.errors.response(HTTPStatus.BAD_REQUEST, f'{error}; write {{"url": "http://HOST:PORT"}}')
        except ConfigError as error:
            return self.errors.response(HTTPStatus.BAD_REQUEST, str(error))
        if worker is None:
            return self.errors.response(HTTPStatus.CONFLICT, f"there are {len(self.workers)} workers already")
        return RouterResponse.of_json(worker.as_json(), HTTPStatus.CREATED)

    async def _metaserver(self, scope: dict[str, Any], receive: Receive) -> RouterResponse:
        """A decode engine posts the job of a request that it has from this router. It has no key to send: it knows the
        request's id, which nobody else can know. Without an open request no body is read."""
        metaserver = self.proxy.metaserver
        if metaserver is None:
            return self.errors.response(HTTPStatus.NOT_FOUND, f"the router has no {scope['path']}: start it with "
                                        "--metaserver")
        if not len(metaserver):
            return metaserver.refuse_unread(HTTPStatus.NOT_FOUND, "no request is open whose job may be posted")
        with metaserver.bodies.hold() as held:
            try:
                async with asyncio.timeout(POST_BODY_S):
                    body = await _read_body(receive, scope["headers"], held)
            except BodyRefused as refused:
                return metaserver.refuse_unread(refused.status, str(refused))
            except TimeoutError:
                return metaserver.refuse_unread(HTTPStatus.REQUEST_TIMEOUT, f"no whole body in {POST_BODY_S:g} s")
            return await metaserver.serve(body, receive, _nowhere)

    async def _page(self, scope: dict[str, Any], receive: Receive) -> RouterResponse:
        return PAGE

    async def _fleet(self, scope: dict[str, Any], receive: Receive) -> RouterResponse:
        refused = self._refused(scope)
        if refused is not None:
            return refused
        return RouterResponse(200, await self._overview.page(), [(b"content-type", b"application/json"),
                                                                 (b"cache-control", b"no-store")])

    def _about(self) -> dict[str, Any]:
        """What an operator sees of the router itself."""
        return {**self._judgement.about(), "open_requests": len(self._open)}

    def _refused(self, scope: dict[str, Any]) -> RouterResponse | None:
        """The error for a request to /workers or /fleet that is not allowed, else None. A change needs the operator's
        key, as engines get the prompts of all clients and the workers' key. Without --operator-key and --api-key it
        must come from this machine, as for the engines' operator routes. With --api-key alone it is never allowed, as a
        request that comes through a proxy on this machine may look like one from here. Without --api-key everybody may
        read but a web page, also one whose name its owner has made resolve to this machine."""
        headers, operator_key = scope["headers"], self.options.operator_key
        if operator_key is not None and has_key(_authorization(headers), (operator_key, )):
            return None
        if not self._has_key(headers):
            return RouterResponse.of_json({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
        problem: str | None
        if scope["method"] in ("GET", "HEAD"):
            problem = reading_objection(scope) if self.options.api_key is None else None
        elif operator_key is not None:
            problem = "this needs the key of --operator-key: send it in Authorization: Bearer KEY"
        elif self.options.api_key is not None:
            problem = "clients may not change workers: start the router with --operator-key, and send that key"
        else:
            problem = objection(scope, "--operator-key")
        return None if problem is None else self.errors.response(HTTPStatus.FORBIDDEN, problem)

    def _has_key(self, headers: Headers) -> bool:
        if self.options.api_key is None:
            return True
        return has_key(_authorization(headers), (self.options.api_key, ))

    def _close_connections(self, worker: RouterWorker) -> None:
        """Connections belong to a URL, and a new worker may have the URL already: then they stay."""
        if self.workers.get(worker.url) is None:
            self.worker_client.forget(worker.url)


_OWN_ROUTES: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "/health": (("GET", "HEAD"), RouterApp._health),
    "/ping": (("GET", "HEAD", "POST"), RouterApp._health),
    "/load": (("GET", "HEAD"), RouterApp._load),
    "/metrics": (("GET", "HEAD"), RouterApp._metrics_page),
    "/workers": (("GET", "POST", "DELETE"), RouterApp._workers),
    "/": (("GET", "HEAD"), RouterApp._page),
    "/fleet": (("GET", "HEAD"), RouterApp._fleet),
    METASERVER_PATH: (("POST",), RouterApp._metaserver),
}


async def _nowhere(message: dict[str, Any]) -> None:
    """For an answer that is sent elsewhere."""


async def _respond(send: Send, answer: RouterResponse) -> int:
    await respond(send, answer)
    return answer.status


async def _read_body(receive: Receive, headers: Headers, held: HeldBody) -> bytes:
    """The whole body. Raises ClientGone, BodyRefused."""
    length = responses.find(headers, b"content-length")
    if length is not None:
        held.check_length(int(length))
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    held.add(len(message.get("body", b"")))
    if not message.get("more_body", False):
        return message.get("body", b"")
    parts = bytearray(message.get("body", b""))
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        held.add(len(message.get("body", b"")))
        parts += message.get("body", b"")
    return bytes(parts)


def _authorization(headers: Headers) -> bytes:
    return responses.find(headers, b"authorization") or b""


def _wants_explanation(headers: Headers) -> bool:
    value = responses.find(headers, b"x-vllm-pd-explain")
    return value is not None and value not in (b"0", b"")
