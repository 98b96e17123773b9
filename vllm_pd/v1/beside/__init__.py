# SPDX-License-Identifier: Apache-2.0
"""PDConnector beside vLLM's own OffloadingConnector (V1)."""
