# SPDX-License-Identifier: Apache-2.0
"""What the bindings to vLLM's V0 and V1 engines decide alike: both roles of an engine, above its own queues."""
