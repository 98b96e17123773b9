# SPDX-License-Identifier: Apache-2.0
"""Chaos: real engines that are killed, stopped and misinformed while every answer is compared."""
