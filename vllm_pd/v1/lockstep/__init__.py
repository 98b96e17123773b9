# SPDX-License-Identifier: Apache-2.0
"""The step sync (`vllm_pd.dp`) in the engine loop of a stock vLLM, in the place of its waves (docs/dp.md).

`options`: what a user sets, and what is refused. `mark`: how the processes of an engine learn of it. `store`: how its
ranks meet. `core`: the engine loop. `sync`: one rank, as that loop uses it.
"""
