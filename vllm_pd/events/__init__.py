# SPDX-License-Identifier: Apache-2.0
"""KV events and load of an engine, for the routers that read them."""
