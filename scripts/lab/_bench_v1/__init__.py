# SPDX-License-Identifier: Apache-2.0
"""The figures of engine V1: `installations` to compare, step times (`steps`), `servers` and what they use while their
requests wait (`waiting`). `parking` and `wake_probe` run inside engines."""
