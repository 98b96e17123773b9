# SPDX-License-Identifier: Apache-2.0
"""Imported where the command line asks for the step sync and may name no connector of ours: vLLM then imports nothing
else of the binding. As with PDConnector, what the step sync stands on is looked for before anything is changed. Raises
ConfigError for a vLLM that does not fit.
"""
from vllm_pd.v1.required import check_once

check_once()

from vllm_pd.v1.claim import claim_configurations  # noqa: E402  not before the check

claim_configurations()
