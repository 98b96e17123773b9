# SPDX-License-Identifier: Apache-2.0
"""Step sync of data-parallel ranks (see vllm_pd.dp.interface for how an engine loop uses it).

    member = vllm_pd.dp.join(rank, size, host, wake=..., exchange=..., abort=..., settings=Settings())

`host` is the address (data_parallel_master_ip) at which rank 0 can be reached by all; used by groups over several hosts
only. `exchange` is an all-gather of byte strings over the ranks' process group (`over(dp_group)` makes one).
`wake()` must be thread-safe and must not block, e.g. `lambda: input_queue.put_nowait((DP_STEP, b""))`. `abort(error)`
is called on another thread when the group has failed and the engine loop stays away from the member (stuck in a
collective): it has to end the process; the default does just that (`os._exit(1)`). Raises GroupFailed, ConfigError.
"""
from vllm_pd.dp.group import join, over
from vllm_pd.dp.interface import Counters, Decision, GroupFailed, Member, Settings

__all__ = ["Counters", "Decision", "GroupFailed", "Member", "Settings", "join", "over"]
