# SPDX-License-Identifier: Apache-2.0
"""Transfers of engines with several ranks: which rank sends what, and how an engine reaches the processes of its
ranks."""
