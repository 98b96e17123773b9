# SPDX-License-Identifier: Apache-2.0
"""Serving a router until a signal ends it."""
import logging
import os

import uvicorn

from vllm_pd.ports import require_free
from vllm_pd.router.app import Router
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import PolicyConfig

GRACE_S = 30  # that open requests have after the first signal
KEEP_ALIVE_S = 65
BACKLOG = 2048
LIBRARY = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "USE_TORCH": "0", "USE_TF": "0", "USE_FLAX": "0"}  # half a gigabyte that no tokenizer needs


def serve(options: RouterOptions, policy: PolicyConfig) -> None:
    """Runs until SIGINT or SIGTERM. Raises ConfigError for a port that is taken, and for what can't be used."""
    for name, value in LIBRARY.items():  # read when transformers is imported
        os.environ.setdefault(name, value)
    router = Router(options, policy)
    if ":" not in router.options.host:
        require_free("--port", router.options.host, [router.options.port])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    uvicorn.run(router, host=router.options.host, port=router.options.port, lifespan="on", log_level="warning",
                access_log=False, server_header=False, date_header=False, proxy_headers=False, ws="none",
                timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=GRACE_S, backlog=BACKLOG)
