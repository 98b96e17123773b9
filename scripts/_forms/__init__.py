# SPDX-License-Identifier: Apache-2.0
"""What `scripts/compare_forms.py` is made of."""
