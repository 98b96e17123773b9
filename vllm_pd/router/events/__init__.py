# SPDX-License-Identifier: Apache-2.0
"""How a router reads the KV events and the load of its engines."""
