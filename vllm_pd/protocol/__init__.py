# SPDX-License-Identifier: Apache-2.0
"""The protocol, pure: messages and its two halves. No sockets, threads, clock, vllm or torch."""
