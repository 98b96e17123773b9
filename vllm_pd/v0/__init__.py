# SPDX-License-Identifier: Apache-2.0
"""The binding to vLLM's V0 engine: what the patched scheduler and engine call, in their own terms."""
