# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of data-parallel groups of V1 engines, on a patched tree or an unpatched one."""
