# SPDX-License-Identifier: Apache-2.0
"""Moments that are on no clock."""
LONG_AGO, NEVER = float("-inf"), float("inf")
