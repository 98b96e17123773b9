# SPDX-License-Identifier: Apache-2.0
"""The parts of `scripts/series.py` and `scripts/upstream.py`: standard library and git only, Python 3.9 or newer.

Imports point one way: errors <- pin, git, patch <- source <- folder <- verify <- rebase <- the two scripts.
"""
