# SPDX-License-Identifier: Apache-2.0
"""Step sync of data-parallel ranks (see vllm_pd.dp.interface for how an engine loop uses it).

    member = vllm_pd.dp.join(rank, size, host, wake=..., exchange=..., abort=..., settings=SyncSettings())

`host` is rank 0's address (data_parallel_master_ip). All ranks must reach it; only groups over several hosts use it.
`exchange` is an all-gather of byte strings over the ranks' process group (`over(dp_group)` makes one).
`wake()` must be thread-safe and must not block, e.g. `lambda: input_queue.put_nowait((DP_STEP, b""))`.
`abort(error)` is called on another thread when the group has failed and the engine loop does not call the member,
because it is stuck in a collective. It must end the process. The default does only that (`os._exit(1)`).
`join` raises GroupFailed and ConfigError.
"""
from vllm_pd.dp.group import join, over
from vllm_pd.dp.interface import GroupFailed, GroupMember, StepDecision, SyncCounters, SyncSettings

__all__ = ["GroupFailed", "GroupMember", "StepDecision", "SyncCounters", "SyncSettings", "join", "over"]
