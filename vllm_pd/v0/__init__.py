# SPDX-License-Identifier: Apache-2.0
"""The binding to vLLM's V0 engine: what the patched scheduler and engine call, in their own terms."""

CONNECTOR = "PDConnector"
SETTINGS_KEY = "vllm_pd"  # in VllmConfig.additional_config, which travels to every process of an engine
