# SPDX-License-Identifier: Apache-2.0
"""Upstream's own tests as a regression suite: which tests, on which trees, and what a difference means (B50).

``v0.txt``, ``v1.txt`` and ``dp.txt`` name the tests, ``deselect.txt`` those that are left out and why, ``mended.txt``
those that only the patched tree passes.
"""
