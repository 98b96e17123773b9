# SPDX-License-Identifier: Apache-2.0
"""The store beyond one host: blocks from the arenas of other hosts (docs/store.md, "Beyond one host")."""
