# SPDX-License-Identifier: Apache-2.0
"""What `scripts/lab/behind_gateway.py` is made of."""
