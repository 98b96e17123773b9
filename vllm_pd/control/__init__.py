# SPDX-License-Identifier: Apache-2.0
"""The prefill queue with its registry (`broker`), and the thread that speaks for an engine (`agent`)."""
