# SPDX-License-Identifier: Apache-2.0
"""Imported by vLLM only where a configuration names PDStoreConnector. Changes the methods of vLLM's worker that
load weights. Raises ConfigError for a vLLM that lacks what the connectors stand on (`vllm_pd.v1.required`).
"""
from vllm_pd.v1.required import check_once

check_once()

from vllm_pd.v1.store.connector import PDStoreConnector as PDStoreConnector  # noqa: E402  not before the check
