# SPDX-License-Identifier: Apache-2.0
"""What `scripts/lab/compare_forms.py` is made of."""
