# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads in every process: the entry point of `vllm.general_plugins`."""
from __future__ import annotations


def register() -> None:
    """Nothing yet."""
