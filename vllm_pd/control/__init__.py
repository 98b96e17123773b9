# SPDX-License-Identifier: Apache-2.0
"""The prefill queue with its registry (`broker`), and what speaks for an engine (`agent`, `thread`, `sides`)."""
