# SPDX-License-Identifier: Apache-2.0
"""Serves a router until a signal ends it.

SIGTERM: for `unready_s`, `/health` answers 503 and everything is still served, so that load balancers notice. Then the
router stops listening, and open requests have `grace_s` to end. Those still open then are ended with an error. SIGINT
skips the first step. A second signal ends open requests at once.
"""
import asyncio
import logging
import math
import signal
import socket
from types import FrameType

import uvicorn

from vllm_pd.frontend.edge import Edge, EdgeLimits
from vllm_pd.router.app import RouterApp
from vllm_pd.router.judgement import prepare_process
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import RoutingPolicyConfig
from vllm_pd.rpc.ports import require_free

logger = logging.getLogger("vllm.pd.router")

CUT_S = 2.0  # time to send the errors to the clients whose requests were ended
SPARED = (b"/health", b"/ping", b"/metrics")  # paths that are also served above the limit of connections
BACKLOG = 2048
TICK_S = 0.1


def serve(options: RouterOptions, policy: RoutingPolicyConfig) -> None:
    """Run a router until SIGINT or SIGTERM. Raises ConfigError for an invalid setting or a port in use, MissingPackage
    for a broker that needs the extra `nats`."""
    prepare_process(options)
    router = RouterApp(options, policy)
    if router.max_clients < router.options.max_connections:
        logger.warning("clients may have %d connections, not %d: no more descriptors are allowed (ulimit -n)",
                       router.max_clients, router.options.max_connections)
    require_free("--port", router.options.host, [router.options.port])
    RouterServer(router).run()


class RouterServer(uvicorn.Server):
    """The uvicorn server of one router; see the module."""

    def __init__(self, router: RouterApp) -> None:
        options = router.options
        limits = EdgeLimits(head_s=options.header_timeout_s, body_s=options.body_timeout_s,
                            write_s=options.write_timeout_s, idle_s=options.idle_timeout_s,
                            connections=router.max_clients)
        self._edge = edge = Edge(limits, lambda reason: router.metrics.clients_cut.labels(reason).inc(), SPARED,
                                 router.errors.body)
        self._router = router
        self._unready_s, self._grace_s = options.unready_s, options.grace_s
        self._hurried = False
        router.metrics.connections.set_function(lambda: len(edge))
        super().__init__(uvicorn.Config(
            router, host=options.host, port=options.port, http=edge.connect, lifespan="on", log_level="warning",
            access_log=False, server_header=False, date_header=False, proxy_headers=False, ws="none",
            timeout_keep_alive=math.ceil(options.idle_timeout_s),
            timeout_graceful_shutdown=math.ceil(options.grace_s + 2 * CUT_S), backlog=BACKLOG))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for each signal."""
        if self.should_exit:
            self._hurried = True
            return
        if sig == signal.SIGINT:
            self._unready_s = 0.0
        super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        """Serve until a signal, then for `unready_s` more."""
        await super().main_loop()
        self._router.unready()
        self._edge.ending = True
        await self._wait(self._unready_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait until no request is open."""
        cutting = asyncio.create_task(self._cut_later())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_later(self) -> None:
        await self._wait(self._grace_s)
        self._router.cut()
        await asyncio.sleep(CUT_S)
        self._edge.abort_all()

    async def _wait(self, seconds: float) -> None:
        """Wait so long, or until the next signal."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        while not self._hurried and loop.time() < until_s:
            await asyncio.sleep(min(TICK_S, max(0.0, until_s - loop.time())))
