# SPDX-License-Identifier: Apache-2.0
"""For scripts/lab/draw_dashboard.py: the dashboard, a fleet with a Prometheus that reads it, and the picture."""
