# SPDX-License-Identifier: Apache-2.0
"""Serving a router until a signal ends it."""
import logging
import math
import os

import uvicorn

from vllm_pd.edge import Edge, EdgeLimits
from vllm_pd.ports import require_free
from vllm_pd.router import descriptors
from vllm_pd.router.app import Router
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import PolicyConfig

logger = logging.getLogger("vllm_pd.router")

GRACE_S = 30  # that open requests have after the first signal
SPARED = (b"/health", b"/metrics")  # paths that are served however many connections there are
BACKLOG = 2048
LIBRARY = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0"}  # half a gigabyte that no tokenizer needs


def serve(options: RouterOptions, policy: PolicyConfig) -> None:
    """Runs until SIGINT or SIGTERM. Raises ConfigError for a port that is taken, and for what can't be used."""
    for name, value in LIBRARY.items():  # read when transformers is imported
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    descriptors.raise_limit()
    router = Router(options, policy)
    if router.most_clients < router.options.max_connections:
        logger.warning("clients may have %d connections, not %d: more descriptors are not allowed (ulimit -n)",
                       router.most_clients, router.options.max_connections)
    if ":" not in router.options.host:
        require_free("--port", router.options.host, [router.options.port])
    uvicorn.Server(configure(router)).run()


def configure(router: Router) -> uvicorn.Config:
    """How a server serves this router."""
    options = router.options
    limits = EdgeLimits(head_s=options.header_timeout_s, body_s=options.body_timeout_s,
                        write_s=options.write_timeout_s, idle_s=options.idle_timeout_s,
                        connections=router.most_clients)
    edge = Edge(limits, lambda reason: router.metrics.clients_cut.labels(reason).inc(), SPARED)
    router.metrics.connections.set_function(lambda: len(edge))
    return uvicorn.Config(router, host=options.host, port=options.port, http=edge.connect, lifespan="on",
                          log_level="warning", access_log=False, server_header=False, date_header=False,
                          proxy_headers=False, ws="none", timeout_keep_alive=math.ceil(options.idle_timeout_s),
                          timeout_graceful_shutdown=GRACE_S, backlog=BACKLOG)
