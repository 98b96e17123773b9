# SPDX-License-Identifier: Apache-2.0
"""The binding of a V1 engine that has peers and the store: what is in the store becomes a prefix hit first.

Life of a load: a request, of a client or a peer's job, is looked up in the prefix cache. The store has blocks that
follow (`match`); the request gets blocks of the cache for these and waits (`allocated`). Each rank loads its part of
them and reports the end with a step (`loads_ended`). When all have reported, and the last one's step has been
processed, the blocks that have come are hashed, and the request is looked up anew, with them as its prefix hit: by that
it is decided who computes the rest, a peer is granted what follows, and may read it. After a load that failed on any
rank it is looked up anew without. Either way a request is loaded for once.

The blocks of a load have a reference of ours until all ranks have reported, for a request that is aborted is gone at
once, and a worker's thread may still copy. V1 makes steps meanwhile, though there may be nothing to compute.
"""
from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm_pd.handover.fence import BlockFence
from vllm_pd.handover.lookups import PrefixLookups
from vllm_pd.protocol.messages import Attempt
from vllm_pd.v1.binding import V1Handover

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

    from vllm_pd.v1.store.connector import PDStoreConnector

LOADS_S = 10.0  # how long a reset of the prefix cache waits for loads


class OfferedLoad(NamedTuple):
    """What `match` has answered: the prefix hit, and the tokens after it that are in the store."""
    cached_tokens: int
    tokens: int


@dataclass
class OpenLoad:
    """A load under way. `first`: the name of its first block. `open_ranks`: on how many it has not ended. `is_right`:
    whether it has not failed on any."""
    request: Request
    first: bytes
    open_ranks: int
    is_right: bool = True


class V1HandoverWithStore(V1Handover):
    """`store`: of the scheduler role. The connector owns it, and passes requests and steps on to it."""

    def __init__(self, store: PDStoreConnector, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._store = store
        self._load_fence = BlockFence(self._scheduler.kv_cache_manager.block_pool)
        self._offers: dict[str, OfferedLoad] = {}
        self._loads: dict[str, OpenLoad] = {}  # by request id, also where the request is gone
        self._loaded: set[str] = set()  # requests that were loaded for, or are
        self._lookups = PrefixLookups()  # before loads

    @property
    def is_loading(self) -> bool:
        """Whether the end of a load is to be reported yet."""
        return bool(self._loads)

    def match(self, request: Request, cached_tokens: int) -> int | None:
        """As without the store, but what that has comes first. None also while blocks of other hosts are waited for,
        and while these blocks are loaded for another request, whose hit they are to be; what is loaded for one that is
        gone will be nobody's."""
        self._offers.pop(request.request_id, None)
        first = self._first_name(request, cached_tokens)
        if first is not None and any(load.first == first and not load.request.is_finished()
                                     for load in self._loads.values()):
            return None
        tokens, _ = (0, False) if first is None else self._store.get_num_new_matched_tokens(request, cached_tokens)
        if tokens is None:
            return None
        if not tokens:
            return super().match(request, cached_tokens)
        self._offers[request.request_id] = OfferedLoad(cached_tokens, tokens)
        return tokens

    def allocated(self, request: Request, blocks: KVCacheBlocks, remote_tokens: int) -> None:
        """The request has these blocks; it is being parked where `remote_tokens` is more than 0."""
        offer = self._offers.pop(request.request_id, None)
        if offer is None or not remote_tokens:
            super().allocated(request, blocks, remote_tokens)
            return
        block_ids, first = blocks.get_block_ids()[0], offer.cached_tokens // self._scheduler.block_size
        self._load_fence.hold(_load_key(request.request_id), block_ids)
        self._loads[request.request_id] = OpenLoad(request, request.block_hashes[first], self._store.ranks)
        self._loaded.add(request.request_id)
        if not request.num_preemptions:  # V1 counts the others elsewhere
            self._lookups += PrefixLookups(1, request.num_tokens, offer.cached_tokens, 1,
                                           request.num_tokens - offer.cached_tokens, remote_tokens)
        self._store.update_state_after_alloc(request, blocks, remote_tokens)

    def finished(self, request: Request, tables: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The request has ended and still has its blocks."""
        self._offers.pop(request.request_id, None)
        self._loaded.discard(request.request_id)
        return super().finished(request, tables)

    def loads_ended(self, ended: Mapping[str, int], failed: Collection[str]) -> None:
        """So many ranks have reported these ids. They are applied when the step's output has been processed."""
        for request_id in ended.keys() & self._loads.keys():
            load = self._loads[request_id]
            load.open_ranks -= ended[request_id]
            load.is_right = load.is_right and request_id not in failed

    def after_schedule(self, output: SchedulerOutput, throttled: bool) -> None:
        """This step was scheduled. No load ends without steps, and no wait for other hosts' blocks."""
        super().after_schedule(output, throttled)
        self.stalled = self.stalled and not self._loads and not self._store.is_fetching

    def after_update(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """The output of a step was processed."""
        super().after_update(outputs)
        ended = [one for one, load in self._loads.items() if not load.open_ranks]
        for request_id in reversed(ended):  # each goes to the front
            load = self._loads.pop(request_id)
            request = load.request
            if not (load.is_right and self._store.is_used):
                self._store.load_failed(request)
                self._scheduler.fail_parked(request)
            elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._scheduler.begin_anew(request)
            self._load_fence.release(_load_key(request_id))
        if ended and self._scheduler.pause_state is PauseState.PAUSED_NEW:
            self.pause_changed(PauseState.PAUSED_NEW)  # jobs among them would not go on

    def remove_internal(self, stats: SchedulerStats) -> None:
        """Take out what V1 has counted of our own requests, and of look-ups that were made anew after a load."""
        super().remove_internal(stats)
        lookups, self._lookups = self._lookups, PrefixLookups()
        lookups.take_out_of(stats)

    def weights_replaced(self) -> None:
        """As without the store. The worker stops using it, too, and the loads that are under way fail."""
        self._store.reset_cache()
        super().weights_replaced()

    def finish_steps(self) -> None:
        """Process the outputs of all steps in flight, and wait for loads, at most `LOADS_S`. The scheduler is paused.
        """
        deadline = time.monotonic() + LOADS_S
        self._access.finish_steps(lambda: bool(self._loads) and time.monotonic() < deadline)

    def _first_name(self, request: Request, cached_tokens: int) -> bytes | None:
        """The name of the first block of a load for this request; None where there is to be none."""
        if request.request_id in self._loaded or request.request_id in self._loads or request.skip_reading_prefix_cache:
            return None
        return self._store.first_name(request, cached_tokens)


def _load_key(request_id: str) -> Attempt:
    return Attempt("store", request_id, 0)
