# SPDX-License-Identifier: Apache-2.0
"""V1's connectors over the KV store, with and without peers."""
