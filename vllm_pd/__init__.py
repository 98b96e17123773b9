# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on different engines: what the patched vLLM beside this package leans on."""
