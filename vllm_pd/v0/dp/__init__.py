# SPDX-License-Identifier: Apache-2.0
"""The step sync (`vllm_pd.dp`) in the patched vLLM's V1 engine: where its loop calls it, and which models need it."""
