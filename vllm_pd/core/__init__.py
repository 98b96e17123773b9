# SPDX-License-Identifier: Apache-2.0
"""The protocol, pure: messages, the two sides of an attempt, the policy. No sockets, threads, clock, vllm or torch."""
