# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group exchange short messages before there is a group: over the store of vLLM's process group,
through which a rank that does not take part is found within a deadline, and named."""
from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from vllm_pd.dp.interface import Exchange, GroupFailed

if TYPE_CHECKING:
    from torch.distributed import Store

PREFIX = "vllm_pd/step_sync"


def over_store(store: Store, rank: int, size: int, wait_s: float) -> Exchange:
    """An all-gather of byte strings. All ranks are there when it is called for the first time: they have just made the
    process group. It raises GroupFailed, naming a rank that has written nothing within `wait_s`."""
    rounds = 0

    def exchange(mine: bytes) -> list[bytes]:
        nonlocal rounds
        rounds += 1
        store.set(_key(rounds, rank), mine)
        until = time.monotonic() + wait_s
        return [_read(store, _key(rounds, peer), peer, until, wait_s) for peer in range(size)]

    return exchange


def _key(number: int, rank: int) -> str:
    return f"{PREFIX}/{number}/{rank}"


def _read(store: Store, key: str, peer: int, until: float, wait_s: float) -> bytes:
    try:
        store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
        return store.get(key)
    except RuntimeError as error:  # of torch: the time is over, or the process that has the store is gone
        raise GroupFailed(f"rank {peer} has not joined the step sync within {wait_s:g} s: start all ranks with "
                          f"step_sync, and with the same release of vllm-pd ({str(error).splitlines()[0]})") from error
