# SPDX-License-Identifier: Apache-2.0
"""Requests to engines with upstream's NIXL connectors, which need a proxy: it asks the prefill engine (P) first.

P gets the prompt for one token and with `do_remote_decode`. Then the decode engine gets it with the
`kv_transfer_params` of P's answer. Both have the same X-Request-Id. Upstream's toy proxy server does the same; here the
load generator does it, so that no proxy is needed.
"""

import json
from collections.abc import Mapping
from typing import Any

from vllm_pd.bench.connection import LoadConnection
from vllm_pd.bench.load import GenerationRequest
from vllm_pd.router.prefill_form import REMOTE_DECODE


async def prefill_at(url: str, model: str, prompt: Any, headers: Mapping[str, str] | None,
                     params: dict[str, Any] | None = REMOTE_DECODE) -> dict[str, Any] | None:
    """Has the engine at `url` compute a prompt. What its answer says for the decode engine. Raises LoadError and
    OSError."""
    body = GenerationRequest(prompt, 1, ignore_eos=True, kv_transfer_params=params).body(model)
    with await LoadConnection.open(url) as connection:
        answer = await connection.exchange("POST", "/v1/completions", json.dumps(body).encode(), headers)
        return answer.required().json().get("kv_transfer_params")
