# SPDX-License-Identifier: Apache-2.0
"""Serves a picker until a signal ends it: ext_proc and health checks by gRPC, metrics by HTTP.

SIGTERM: for `unready_s` health checks fail and everything is still served, so that gateways notice. Then no new stream
is accepted, and open ones, whose answers the gateway still forwards, have `grace_s` to end. SIGINT skips the first
step. A second signal ends at once what is open.
"""
import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Callable
from http import HTTPStatus

import grpc
from aiohttp import web
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vllm_pd.errors import ConfigError
from vllm_pd.picker.endpoints import WorkerEndpoints
from vllm_pd.picker.options import PickerOptions
from vllm_pd.picker.picking import OTHER, EndpointPicker
from vllm_pd.picker.stream import PickerStream, Read
from vllm_pd.picker.wire import BadMessage, refusal
from vllm_pd.router.bodies import BodyBudget
from vllm_pd.router.judgement import Judgement, prepare_process
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.policy import RoutingPolicyConfig
from vllm_pd.rpc.addresses import url_of
from vllm_pd.rpc.ports import require_free

logger = logging.getLogger("vllm.pd.picker")

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVE = "liveness"  # the protocol's names of what is asked for by health checks
READY = ("", "readiness", EXT_PROC)
HEALTH_IDLE_S, HEALTH_AGE_S = 30.0, 120.0  # of a connection to the port of health checks
HEALTH_STREAMS = 4  # of one such connection
MAX_HEALTH_BYTES = 1 << 12  # of a question
IDLE_S = 600.0  # of a gateway's connection without any stream
SPARE_STREAMS = 64  # above max_streams: for answers that refuse, and for health checks
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 20.0, 10.0  # a gateway that is gone without a word ends its streams within both
GATEWAY_PING_S = 1.0  # a gateway may look so often whether the picker lives; else GOAWAY ends its connection
MAX_FRAME_BYTES = 1 << 20  # of a message beside the body in it
PAGE_CONNECTIONS, PAGE_S = 64, 20.0  # of the metrics port
STOP_S = 5.0  # for what is cancelled to end


def serve(options: PickerOptions, policy: RoutingPolicyConfig) -> None:
    """Run a picker until SIGINT or SIGTERM. Raises ConfigError for an invalid setting or a port in use, MissingPackage
    for a broker that needs the extra `nats`."""
    prepare_process(options)
    asyncio.run(_serve(PickerServer(options, policy)))


async def _serve(server: "PickerServer") -> None:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    await server.start()
    ending = None
    try:
        first = await signals.get()
        ending = asyncio.create_task(server.drain(0.0 if first == signal.SIGINT else server.options.unready_s))
        again = asyncio.create_task(signals.get())
        await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
    finally:
        if ending is not None:
            ending.cancel()
        await server.close()


class PickerServer(external_processor_pb2_grpc.ExternalProcessorServicer):
    """One picker. It is made anywhere; `start` and all else run in one event loop. Raises ConfigError for options that
    are invalid."""

    def __init__(self, options: PickerOptions, policy: RoutingPolicyConfig) -> None:
        self.options = options = options.checked()
        self.metrics = RouterMetrics()
        self.judgement = Judgement(options, policy, self.metrics)
        self.workers = self.judgement.workers
        self._bodies = BodyBudget(options.max_body_bytes, options.max_bodies_bytes)
        self.metrics.body_bytes.set_function(lambda: self._bodies.held_bytes)
        self._open = 0
        self.metrics.connections.set_function(lambda: self._open)
        self._unready = False
        self._health = PickerHealth(lambda: self.ready)
        self._servers: list[grpc.aio.Server] = []
        self._web: web.ServerRunner | None = None

    async def start(self) -> None:
        """Listen, and begin to follow the workers. Raises ConfigError for a port that is in use."""
        options = self.options
        require_free("--port", options.host, [options.port])
        for key, port in (("--metrics-port", options.metrics_port), ("--health-port", options.health_port)):
            if port:
                require_free(key, options.host, [port])
        self._endpoints = WorkerEndpoints(self.workers, options.dns_period_s, options.dns_timeout_s)
        self.judgement.begin(b"1.1 vllm-pd-" + secrets.token_hex(6).encode())
        self.picker = EndpointPicker(options, self.judgement, self._endpoints, self.metrics)
        self.judgement.start()
        await self._listen()
        if options.metrics_port:
            await self._serve_metrics()
        logger.info("picking engines at %s%s", url_of(options.host, options.port), " with TLS" * bool(options.tls_cert))

    async def drain(self, unready_s: float) -> None:
        """Have health checks fail, accept no stream after `unready_s`, and wait `grace_s` for those that are open."""
        self._unready = True
        await asyncio.sleep(unready_s)
        await asyncio.gather(*(server.stop(self.options.grace_s) for server in self._servers))

    async def close(self) -> None:
        """End all streams, and stop everything that `start` began."""
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self._open:  # their tasks are cancelled, and end their picks
                    await asyncio.sleep(0.01)
        if self._web is not None:
            await self._web.cleanup()
        await self._endpoints.close()
        await self.judgement.close()

    @property
    def ready(self) -> bool:
        """Whether health checks succeed: a worker may be picked, and no signal has come."""
        return not self._unready and self.picker.ready

    async def Process(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        """Called by gRPC for each stream of ext_proc."""
        self._open += 1
        try:
            if self._open > self.options.max_streams:
                refused = self.picker.refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests are open: try again "
                                              "later", "streams", retry_after_s=self.options.retry_after_s)
                self.picker.count_refused(refused, OTHER)
                async with asyncio.timeout(self.options.write_timeout_s):
                    await context.write(refusal(refused.answer, refused.reason))
                return
            await PickerStream(self.picker, self._bodies, self.options, _reader(context), context.write).serve()
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the gateway is too slow")
        except (grpc.RpcError, grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception:  # one request must not end the others'
            logger.exception("unexpected error: a request is refused")
            await context.abort(grpc.StatusCode.INTERNAL, "unexpected error of the picker")
        finally:
            self._open -= 1

    async def _listen(self) -> None:
        options = self.options
        server = grpc.aio.server(maximum_concurrent_rpcs=options.max_streams + SPARE_STREAMS, options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", options.max_streams + SPARE_STREAMS),  # of one connection
            ("grpc.max_receive_message_length", options.max_body_bytes + MAX_FRAME_BYTES),
            ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
            ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
            ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),  # of pings that measure, too; else 60 s
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),  # else every ping to an idle server is one too many
            ("grpc.http2.min_ping_interval_without_data_ms", int(GATEWAY_PING_S * 1000))])
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._bind(server, "--port", options.port, options.tls_files())
        if options.health_port:
            server = grpc.aio.server(maximum_concurrent_rpcs=SPARE_STREAMS, options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", HEALTH_STREAMS),
                ("grpc.max_receive_message_length", MAX_HEALTH_BYTES),
                ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
                ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
                ("grpc.max_connection_idle_ms", int(HEALTH_IDLE_S * 1000)),
                ("grpc.max_connection_age_ms", int(HEALTH_AGE_S * 1000)),  # ends answers that nobody reads, too
                ("grpc.max_connection_age_grace_ms", int(STOP_S * 1000))])
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            await self._bind(server, "--health-port", options.health_port, None)

    async def _bind(self, server: grpc.aio.Server, key: str, port: int,
                    tls: tuple[bytes, bytes, bytes | None] | None) -> None:
        """Have a server listen. Raises ConfigError naming `key`."""
        address = url_of(self.options.host, port).removeprefix("tcp://")
        try:
            if tls is None:
                server.add_insecure_port(address)
            else:
                certificate, private_key, client_ca = tls
                server.add_secure_port(address, grpc.ssl_server_credentials(
                    [(private_key, certificate)], client_ca, require_client_auth=client_ca is not None))
        except RuntimeError as error:
            raise ConfigError(key, port, f"gRPC can't listen at {address} ({error}): choose a free port") from None
        await server.start()
        self._servers.append(server)

    async def _serve_metrics(self) -> None:
        self._web = web.ServerRunner(PageServer(self._page, access_log=None))
        await self._web.setup()
        await web.TCPSite(self._web, self.options.host, self.options.metrics_port).start()

    async def _page(self, request: web.BaseRequest) -> web.Response:
        """Called by aiohttp for each request to the metrics port."""
        if request.method not in ("GET", "HEAD") or request.path not in ("/metrics", "/health"):
            answer = web.Response(status=404)
        elif request.path == "/metrics":
            answer = web.Response(body=self.metrics.page(), headers={
                "content-type": "text/plain; version=0.0.4; charset=utf-8"})
        else:
            answer = web.json_response({"status": "ok" if self.ready else "not ready",
                                        "workers": self.workers.counts()}, status=200 if self.ready else 503)
        answer.force_close()
        return answer


class PageServer(web.Server):
    """HTTP with bounds that aiohttp has not: PAGE_CONNECTIONS at a time, each for one request, and PAGE_S from its
    beginning to the end of the answer."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Called by aiohttp."""
        super().connection_made(handler, transport)
        if len(self.connections) > PAGE_CONNECTIONS:
            transport.abort()
        else:
            asyncio.get_running_loop().call_later(PAGE_S, transport.abort)


class PickerHealth(health_pb2_grpc.HealthServicer):
    """Answers gRPC health checks by what `ready` returns at that moment. Nothing is kept for a peer: there is no
    Watch, which clients may do without by the protocol of health checks."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    async def Check(self, request: health_pb2.HealthCheckRequest,
                    context: grpc.aio.ServicerContext) -> health_pb2.HealthCheckResponse:
        """Called by gRPC."""
        if request.service != LIVE and request.service not in READY:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        serves = request.service == LIVE or self._ready()
        known = health_pb2.HealthCheckResponse
        return known(status=known.SERVING if serves else known.NOT_SERVING)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Called by gRPC."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "use Check")


def _reader(context: grpc.aio.ServicerContext) -> Read:
    async def read() -> ext_proc.ProcessingRequest | None:
        message = await context.read()
        return None if message is grpc.aio.EOF else message

    return read
