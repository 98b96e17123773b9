# SPDX-License-Identifier: Apache-2.0
"""Imported by vLLM only where a configuration names PDConnector. All that changes vLLM's classes begins here.

The import checks that this vLLM has what the binding stands on (`vllm_pd.v1.required`) before anything else, then has
methods of vLLM call us: the last check of a configuration, where the settings are taken over (`vllm_pd.v1.claim`), the
engine's loop, where an engine is handed to its connector, the way of a request into it (both
`vllm_pd.v1.engine_access`), and the start of a server (`vllm_pd.v1.front`). All do nothing for a configuration without
PDConnector. Raises ConfigError for a vLLM that does not fit, MissingPackage without the extra `engine`. That without
NIXL comes later (`vllm_pd.v1.claim`), because not every transport needs it.
"""
from vllm_pd.extras import require_extra
from vllm_pd.v1.required import check_once

require_extra("engine", "httptools")
check_once()

from vllm_pd.v1.claim import claim_configurations  # noqa: E402  not before the check
from vllm_pd.v1.connector import PDConnector as PDConnector  # noqa: E402
from vllm_pd.v1.engine_access import hand_over_engines  # noqa: E402
from vllm_pd.v1.front import attach_servers  # noqa: E402

claim_configurations()
hand_over_engines(PDConnector)
attach_servers()
