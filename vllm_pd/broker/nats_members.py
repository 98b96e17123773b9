# SPDX-License-Identifier: Apache-2.0
"""What people ask a NATS server for, read without changing it: the members and the number of queued jobs, and where
both are kept."""
import asyncio
import collections
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vllm_pd.broker.directory import Directory
from vllm_pd.broker.nats_session import open_entry
from vllm_pd.broker.nats_store import AWAY, Kept, Store
from vllm_pd.errors import ControlError
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.nats_address import NatsAddress

T = TypeVar("T")


def list_nats_members(address: NatsAddress, ttl_s: float, timeout_s: float) -> tuple[list[m.Member], int]:
    """(members that were heard within `ttl_s`, jobs that no engine has got yet). Raises ControlError where the server
    can't be reached in time, or holds nothing of ours."""
    return _ask(address, lambda store: _read(store, ttl_s), timeout_s)


def find_kept(address: NatsAddress, timeout_s: float) -> Kept:
    """Where members and jobs are kept. Raises as `list_nats_members`."""
    return _ask(address, Store.kept, timeout_s)


def _ask(address: NatsAddress, question: Callable[[Store], Awaitable[T]], timeout_s: float) -> T:
    """Open what an engine has made on the server, and ask. Raises ControlError."""
    async def work() -> T:
        store = await Store.open(address, lambda: None, lambda error: None, make=False)
        try:
            return await question(store)
        finally:
            await store.close()

    try:
        return asyncio.run(asyncio.wait_for(work(), timeout_s))
    except AWAY as error:
        raise ControlError(f"NATS at {', '.join(address.urls)} can't be asked: {error or 'no answer in time'}"
                           ) from error


async def _read(store: Store, ttl_s: float) -> tuple[list[m.Member], int]:
    """Read the bucket once and the number of queued jobs of all groups. Raises AWAY."""
    directory = Directory(ttl_s)
    server_s = await store.now_s()
    directory.clock_is(time.monotonic(), server_s)
    async for change in store.watch_members():
        if change is None:
            break
        if change.frame is not None:
            member = open_entry(change.key, change.frame, collections.Counter())
            if member is not None:
                directory.heard(time.monotonic(), change.key, member, change.stamp_s)
    return directory.members(), await store.all_waiting()
