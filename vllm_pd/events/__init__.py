# SPDX-License-Identifier: Apache-2.0
"""KV events and load figures: from an engine to whoever routes requests to it."""
