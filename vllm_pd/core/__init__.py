# SPDX-License-Identifier: Apache-2.0
"""The protocol, pure: messages, its two halves, the policy. No sockets, threads, clock, vllm or torch."""
