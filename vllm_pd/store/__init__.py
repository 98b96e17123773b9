# SPDX-License-Identifier: Apache-2.0
"""KV blocks by content, for all engines of a host: an arena in shared memory, and files below it. See docs/store.md."""
