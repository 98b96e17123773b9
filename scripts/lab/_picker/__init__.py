# SPDX-License-Identifier: Apache-2.0
"""What `scripts/lab/bench_picker.py` is made of, and Envoy for the tests of the picker."""
