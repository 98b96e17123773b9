# SPDX-License-Identifier: Apache-2.0
"""The binding to vLLM's V1 engine: a plugin for a stock vLLM, no patch."""
