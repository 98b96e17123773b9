# SPDX-License-Identifier: Apache-2.0
"""The queue of prefill jobs and the list of engines: `vllm-pd broker`, or NATS, and an engine's line to either."""
