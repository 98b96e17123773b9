# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/lab/planner_shifts.py: a fleet whose engines change their roles, in simulated time."""
