# SPDX-License-Identifier: Apache-2.0
"""Measure a data-parallel group of V1 engines, on a patched tree and on an unpatched one alike."""
