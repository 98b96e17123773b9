# SPDX-License-Identifier: Apache-2.0
"""The binding of a V1 engine that has peers and OffloadingConnector: what that has kept becomes a prefix hit first.

A load goes as one from the store (`vllm_pd.v1.store.handover`): the request gets cache blocks, waits, and is looked up
anew with what has come as its prefix hit, by which it is decided who computes the rest. `OffloadedTier` is in the place
of the store.

OffloadingConnector copies the blocks of a step out with the next one, or later, and the blocks of a request that has
ended with the step after. It goes by the blocks that V1 schedules, so it does not see those that a parked request gets
for its peer: they might be blocks that it is yet to copy. So all blocks that it copies have a reference of ours until
all ranks have copied them, and those of a request that has ended until the next step says which of them it copies:
nobody gets them meanwhile.
"""
from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_pd.handover.fence import BlockFence
from vllm_pd.protocol.messages import Attempt
from vllm_pd.v1.store.handover import LOADS_S, V1HandoverWithStore

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.pd")

NEVER = float("-inf")
ANSWER_S = 10.0  # how long a request waits for an answer of OffloadingConnector


class OffloadedTier:
    """OffloadingConnector, of the scheduler role, as `V1HandoverWithStore` asks a store. A load from it never fails."""

    def __init__(self, connector: OffloadingConnector, ranks: int, block_size: int) -> None:
        self._connector = connector
        self._block_size = block_size
        self.ranks = ranks  # of the engine
        self.is_used = True
        self.is_fetching = False  # from other hosts, which it does not do
        self._asked_since: dict[str, float] = {}  # by request id, on the monotonic clock: those without an answer
        self._found: tuple[str, int] = "", 0  # request and tokens, of the last look-up

    def look_up(self, request: Request, cached_tokens: int) -> int | None:
        """How many tokens after the `cached_tokens` it has; None: ask again with the next step. To be called for each
        look-up of V1: it forgets the blocks that the request had before. After `ANSWER_S` without an answer: 0."""
        name = request.request_id
        tokens, _ = self._connector.get_num_new_matched_tokens(request, cached_tokens)
        self._found = name, tokens or 0
        if tokens is not None:
            self._asked_since.pop(name, None)
            return tokens
        now = time.monotonic()
        since = self._asked_since.setdefault(name, now)
        if now < since + ANSWER_S:
            return None
        if since > NEVER:
            logger.warning("request %s goes on without what OffloadingConnector may have: no answer after %g s",
                           name, ANSWER_S)
            self._asked_since[name] = NEVER
        return 0

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._asked_since.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        """Whether it needs steps."""
        return self._connector.has_pending_push_work()

    def first_name(self, request: Request, cached_tokens: int) -> bytes | None:
        """The name of the block that a load would begin with; None where `look_up` has found nothing to load."""
        found, tokens = self._found
        first = cached_tokens // self._block_size
        if not self.is_used or found != request.request_id or not tokens or first >= len(request.block_hashes):
            return None
        return request.block_hashes[first]

    def get_num_new_matched_tokens(self, request: Request, cached_tokens: int) -> tuple[int, bool]:
        """What `look_up` has found."""
        return self._found[1], True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """The request has blocks for what is loaded."""
        self._connector.update_state_after_alloc(request, blocks, tokens)

    def load_failed(self, request: Request) -> None:
        """Nothing: only what came before a reset is not used."""

    def reset_cache(self) -> bool:
        """Nothing is loaded any more."""
        self.is_used = False
        return True


class V1HandoverBeside(V1HandoverWithStore):
    """`tier`: the connector owns what is in it, and passes requests, steps and reports on to both."""

    def __init__(self, tier: OffloadedTier, *arguments: Any) -> None:
        super().__init__(tier, *arguments)
        self._tier = tier
        self._copy_fence = BlockFence(self._scheduler.kv_cache_manager.block_pool)
        self._copies: dict[int, int] = {}  # by job of OffloadingConnector: on how many ranks it has not ended
        self._gone: list[Attempt] = []  # ended requests, until the next step is scheduled
        self._numbers = itertools.count()
        self._asks_again = self._has_freed = False

    @property
    def is_loading(self) -> bool:
        """Whether the end of a load or copy is to be reported yet."""
        return bool(self._loads or self._copies)

    def match(self, request: Request, cached_tokens: int) -> int | None:
        """As with the store. None also while OffloadingConnector does not answer, and in the step that tells it of the
        request's preemption: it ends at a load that begins with that."""
        name = request.request_id
        self._offers.pop(name, None)
        tokens = self._tier.look_up(request, cached_tokens)
        if name not in self._loaded and (tokens is None or (
                tokens and name in self._scheduler.reset_preempted_req_ids)):
            self._asks_again = True
            return None
        return super().match(request, cached_tokens)

    def finished(self, request: Request, tables: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The request has ended and still has its blocks."""
        self._tier.forget(request.request_id)
        key = Attempt("ended", request.request_id, next(self._numbers))
        self._copy_fence.hold(key, tables[0])  # of the only group
        self._gone.append(key)
        return super().finished(request, tables)

    def copies_begin(self, jobs: Mapping[int, TransferJob]) -> None:
        """The step that is being scheduled has OffloadingConnector copy these blocks out."""
        for number, job in jobs.items():
            self._copy_fence.hold(_copy_key(number), job.src_spec.block_ids.tolist())
            self._copies[number] = self._tier.ranks
        for key in self._gone:
            self._has_freed = self._copy_fence.release(key) or self._has_freed
        self._gone.clear()

    def copies_ended(self, ranks: Mapping[int, int]) -> None:
        """On so many ranks these jobs have ended; loads are among them."""
        for number in ranks.keys() & self._copies.keys():
            self._copies[number] -= ranks[number]
            if not self._copies[number]:
                del self._copies[number]
                self._copy_fence.release(_copy_key(number))

    def cache_reset(self) -> None:
        """OffloadingConnector forgets all that it has. What it loads at present is not used."""
        for load in self._loads.values():
            load.is_right = False

    def after_schedule(self, output: SchedulerOutput, throttled: bool) -> None:
        """This step was scheduled. OffloadingConnector ends nothing without steps, and what it has given back may be
        what a request waits for."""
        super().after_schedule(output, throttled)
        self.stalled = self.stalled and not (self._asks_again or self._has_freed
                                             or self.is_loading or self._tier.has_work)
        self._asks_again = self._has_freed = False

    def finish_steps(self) -> None:
        """Process the outputs of all steps in flight, and wait for copies and loads, at most `LOADS_S`. The scheduler
        is paused."""
        deadline = time.monotonic() + LOADS_S
        self._access.finish_steps(lambda: bool(self._loads or len(self._copy_fence)) and time.monotonic() < deadline)


def _copy_key(number: int) -> Attempt:
    return Attempt("offload", "", number)
