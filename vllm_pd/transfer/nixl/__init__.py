# SPDX-License-Identifier: Apache-2.0
"""The NIXL transport, over UCX."""
