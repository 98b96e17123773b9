# SPDX-License-Identifier: Apache-2.0
"""Commands that read what a stock vLLM 0.32 or later would do: this folder is run in that environment only."""
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
