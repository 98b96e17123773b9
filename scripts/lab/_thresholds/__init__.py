# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/lab/compare_thresholds.py: one decode engine and its prefill engines in simulated time."""
