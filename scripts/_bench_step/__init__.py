# SPDX-License-Identifier: Apache-2.0
"""Step times of two trees, in turns: `worker` runs inside a tree, `pairs` makes sense of what two workers say."""
