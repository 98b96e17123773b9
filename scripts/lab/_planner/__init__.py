# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/lab/planner_shifts.py: a fleet in simulated time whose engines change between roles."""
