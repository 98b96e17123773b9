# SPDX-License-Identifier: Apache-2.0
"""Step times of several installations of vLLM, in turns: `worker` runs inside a tree, `worker_v1` inside an environment
of engine V1, `turns` is the other end of either, `pairs` makes sense of what two of them say."""
