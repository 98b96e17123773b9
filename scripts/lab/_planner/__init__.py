# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/lab/planner_scaling.py: a fleet in simulated time whose engines come and go."""
