# SPDX-License-Identifier: Apache-2.0
"""Serving a router until a signal ends it.

SIGTERM: `/health` says 503 while everything is served on for `unready_s`, so that who balances load finds out; then
nothing new is taken and what is open has `grace_s`; then it is cut, and its clients hear why. SIGINT does without the
first step. A second signal cuts at once.
"""
import asyncio
import logging
import math
import os
import signal
import socket
from types import FrameType

import uvicorn

from vllm_pd.edge import Edge, EdgeLimits
from vllm_pd.ports import require_free
from vllm_pd.router import descriptors
from vllm_pd.router.app import RouterApp
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import RoutingPolicyConfig

logger = logging.getLogger("vllm_pd.router")

CUT_S = 2.0  # in which those may hear of it whose requests are cut
SPARED = (b"/health", b"/ping", b"/metrics")  # paths that are served however many connections there are
BACKLOG = 2048
TICK_S = 0.1
LIBRARY = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0"}  # half a gigabyte that no tokenizer needs


def serve(options: RouterOptions, policy: RoutingPolicyConfig) -> None:
    """Runs until SIGINT or SIGTERM. Raises ConfigError for a port that is taken, and for what can't be used."""
    for name, value in LIBRARY.items():  # read when transformers is imported
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    descriptors.raise_limit()
    router = RouterApp(options, policy)
    if router.most_clients < router.options.max_connections:
        logger.warning("clients may have %d connections, not %d: more descriptors are not allowed (ulimit -n)",
                       router.most_clients, router.options.max_connections)
    if ":" not in router.options.host:
        require_free("--port", router.options.host, [router.options.port])
    RouterServer(router).run()


class RouterServer(uvicorn.Server):
    """Of one router; see the module."""

    def __init__(self, router: RouterApp) -> None:
        options = router.options
        limits = EdgeLimits(head_s=options.header_timeout_s, body_s=options.body_timeout_s,
                            write_s=options.write_timeout_s, idle_s=options.idle_timeout_s,
                            connections=router.most_clients)
        self._edge = edge = Edge(limits, lambda reason: router.metrics.clients_cut.labels(reason).inc(), SPARED)
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
        """A signal."""
        if self.should_exit:
            self._hurried = True
            return
        if sig == signal.SIGINT:
            self._unready_s = 0.0
        super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        """Until it is to stop listening."""
        await super().main_loop()
        self._router.unready()
        self._edge.ending = True
        await self._wait(self._unready_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Until nothing is open."""
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
        """So long, or until the next signal."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        while not self._hurried and loop.time() < until_s:
            await asyncio.sleep(min(TICK_S, max(0.0, until_s - loop.time())))
