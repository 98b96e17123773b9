# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/lab/gpu_check.py."""
