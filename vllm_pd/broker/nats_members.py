# SPDX-License-Identifier: Apache-2.0
"""The members and the number of queued jobs, read from a NATS server without changing it."""
import asyncio
import collections
import time

from vllm_pd.broker.directory import Directory
from vllm_pd.broker.nats_session import open_entry
from vllm_pd.broker.nats_store import AWAY, Store
from vllm_pd.errors import ControlError
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.nats_address import NatsAddress


def list_nats_members(address: NatsAddress, ttl_s: float, timeout_s: float) -> tuple[list[m.Member], int]:
    """(members that were heard within `ttl_s`, jobs that no engine has got yet). Raises ControlError where the server
    can't be reached in time, or holds nothing of ours."""
    try:
        return asyncio.run(asyncio.wait_for(_read(address, ttl_s), timeout_s))
    except AWAY as error:
        raise ControlError(f"NATS at {', '.join(address.urls)} can't be asked: {error or 'no answer in time'}"
                           ) from error


async def _read(address: NatsAddress, ttl_s: float) -> tuple[list[m.Member], int]:
    """Read the bucket once and the number of queued jobs of all groups. Raises AWAY, also where no engine has ever made
    the bucket."""
    store = await Store.open(address, lambda: None, lambda error: None, make=False)
    try:
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
    finally:
        await store.close()
