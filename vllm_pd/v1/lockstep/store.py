# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group exchange short messages before there is a group: over the store of vLLM's process group,
through which a rank that does not take part is found within a deadline, and named."""
from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from vllm_pd.dp.interface import Exchange, GroupFailed
from vllm_pd.v1.lockstep.options import STEP_SYNC

if TYPE_CHECKING:
    from torch.distributed import Store

PREFIX = "vllm_pd/step_sync"


def over_store(store: Store, rank: int, size: int, wait_s: float) -> Exchange:
    """An all-gather of byte strings. All ranks are there when it is called for the first time: they have just made the
    process group. It raises GroupFailed, naming a rank that has written nothing within `wait_s`: one without the step
    sync never does, and then goes on to load its model until this rank's end breaks their process group."""
    rounds = 0

    def exchange(mine: bytes) -> list[bytes]:
        nonlocal rounds
        rounds += 1
        store.set(_key(rounds, rank), mine)
        until = time.monotonic() + wait_s
        return [_read(store, _key(rounds, peer), (rank, peer), until, wait_s) for peer in range(size)]

    return exchange


def _key(number: int, rank: int) -> str:
    return f"{PREFIX}/{number}/{rank}"


def _read(store: Store, key: str, ranks: tuple[int, int], until: float, wait_s: float) -> bytes:
    """What is there at `key`. `ranks`: this rank, and the one that writes it. Raises GroupFailed."""
    try:
        store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
        return store.get(key)
    except RuntimeError as error:  # of torch: the time is over, or the process that has the store is gone
        rank, peer = ranks
        raise GroupFailed(f"rank {peer} has not joined the step sync within {wait_s:g} s: rank {rank} has "
                          f"{STEP_SYNC}=True; start all ranks with the same, and with the same release of vllm-pd "
                          f"({str(error).splitlines()[0]})") from error
